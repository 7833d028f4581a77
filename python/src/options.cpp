#include "options.h"

#include <array>
#include <algorithm>
#include <variant>

namespace anyflash::python {
namespace {

struct IsRule {};
struct IsPlan {};
struct IsStream {};
struct IsTensor {
  TensorView Options::* member;
  Elements elements;
};
using Place = std::variant<Align Options::*, Layout Options::*, std::optional<double> Options::*, double Options::*,
                           bool Options::*, std::int64_t Options::*, std::optional<std::int64_t> Options::*, IsTensor,
                           IsRule, IsPlan, IsStream>;

struct Known {
  const char* name;
  PyObject* word;  // interned, as are the names in Python's code: found by address
  Place place;
  bool is_scalar = false;
};

std::vector<Known> known_options() {
  std::vector<Known> found;
  const auto add = [&](const char* name, Place place) {
    found.push_back({name, PyUnicode_InternFromString(name), place});
  };
  add("rule", IsRule());
  for_each_tensor([&](const char* name, auto member, bool integers) {
    add(name, IsTensor{member, integers ? Elements::indices : Elements::numbers});
  });
  for_each_scalar([&](const char* name, auto member, const char*) {
    add(name, member);
    found.back().is_scalar = true;
  });
  add("plan", IsPlan());
  add("stream", IsStream());
  return found;
}

const std::vector<Known>& known() {
  static const auto& found = *new std::vector<Known>(known_options());  // the interpreter may go before it would
  return found;
}

const Known& option_named(nb::handle word) {
  for (const auto& option : known()) {
    if (option.word == word.ptr()) return option;
  }
  for (const auto& option : known()) {
    if (PyUnicode_Check(word.ptr()) && PyUnicode_CompareWithASCIIString(word.ptr(), option.name) == 0) return option;
  }
  throw Error(Error::Kind::type, "options: no '" + echoed(word) + "'");
}

/// Sets one of the options.
struct Reader {
  Options& options;
  Arrays& arrays;
  const char* name;
  nb::handle value;

  void operator()(Align Options::* member) const { options.*member = align_of(value); }
  void operator()(Layout Options::* member) const { options.*member = layout_of(value); }
  void operator()(std::optional<double> Options::* member) const {
    if (!value.is_none()) options.*member = real(value, name);
  }
  void operator()(double Options::* member) const { options.*member = real(value, name); }
  void operator()(bool Options::* member) const { options.*member = flag(value, name); }
  void operator()(std::int64_t Options::* member) const { options.*member = integer(value, name); }
  void operator()(std::optional<std::int64_t> Options::* member) const {
    if (!value.is_none()) options.*member = integer(value, name);
  }
  void operator()(IsTensor tensor) const { options.*tensor.member = arrays.input(value, name, tensor.elements); }
  void operator()(IsRule) const { options.rule = rule_of(value).rule; }
  void operator()(IsPlan) const {
    if (value.is_none()) return;
    if (!nb::isinstance<PlanObject>(value) || !nb::inst_ready(value)) {
      throw Error(Error::Kind::type, "plan: type " + class_name(value) + ", expected what anyflash.plan gives");
    }
    options.plan = &*nb::inst_ptr<PlanObject>(value)->plan;
  }
  void operator()(IsStream) const { options.stream = reinterpret_cast<void*>(integer(value, name)); }
};

/// Are the names those of scalar options, and the values None, bool, int, float or str? Else Python takes a closer
/// look.
bool plain_scalars(const nb::dict& given) {
  Py_ssize_t at = 0;
  PyObject *word = nullptr, *value = nullptr;
  while (PyDict_Next(given.ptr(), &at, &word, &value)) {
    const auto& options = known();
    const auto found = std::find_if(options.begin(), options.end(), [&](auto& one) { return one.word == word; });
    if (found == options.end() || !found->is_scalar) return false;
    if (value != Py_None && !PyFloat_CheckExact(value) && !PyUnicode_CheckExact(value) && !PyLong_CheckExact(value) &&
        !PyBool_Check(value)) {
      return false;
    }
  }
  return true;
}

nb::object python_of(Align value) { return nb::cast(align_names[int(value)]); }
nb::object python_of(Layout value) { return nb::cast(layout_names[int(value)]); }
template <typename Number>
nb::object python_of(const std::optional<Number>& value) {
  return value ? nb::cast(*value) : nb::object(nb::none());
}
nb::object python_of(double value) { return nb::cast(value); }
nb::object python_of(bool value) { return nb::cast(value); }
nb::object python_of(std::int64_t value) { return nb::cast(value); }

}  // namespace

Options read_options(const nb::dict& given, Arrays& arrays) {
  Options options;
  Py_ssize_t at = 0;
  PyObject *word = nullptr, *value = nullptr;
  while (PyDict_Next(given.ptr(), &at, &word, &value)) {
    const auto& option = option_named(word);
    std::visit(Reader{options, arrays, option.name, value}, option.place);
  }
  return options;
}

nb::object option_in(const nb::dict& given, const char* name) {
  const nb::handle value = PyDict_GetItemString(given.ptr(), name);
  return value.is_valid() ? nb::borrow(value) : nb::object(nb::none());
}

int wanted_statistics(nb::handle return_lse) {
  if (PyUnicode_Check(return_lse.ptr())) {
    if (PyUnicode_CompareWithASCIIString(return_lse.ptr(), "lm") == 0) return 2;
  } else if (PyBool_Check(return_lse.ptr())) {
    return return_lse.is(Py_True) ? 1 : 0;
  }
  throw Error(Error::Kind::value, "return_lse: " + echoed(nb::repr(return_lse)) + ", expected True, False or 'lm'");
}

void add_options(nb::module_& module) {
  const Options options;
  nb::dict scalars;
  nb::list tensors;
  for_each_scalar([&](const char* name, auto member, const char*) { scalars[name] = python_of(options.*member); });
  for_each_tensor([&](const char* name, auto, bool) { tensors.append(nb::cast(name)); });
  module.attr("scalar_options") = scalars;
  module.attr("tensor_options") = nb::tuple(tensors);
  module.def("plain_scalars", &plain_scalars, nb::arg("given"));
}

}  // namespace anyflash::python
