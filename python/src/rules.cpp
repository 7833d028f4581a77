// Python's Rule class and the functions that make rules. Their documentation is in anyflash/_rules.py.
#include "rule_object.h"

namespace anyflash::python {
namespace {

RuleObject joined(Rule rule, const RuleObject& a, const RuleObject& b) {
  RuleObject made{std::move(rule), a.tables};
  made.tables.insert(made.tables.end(), b.tables.begin(), b.tables.end());
  return made;
}

/// One number for all dimensions, or a sequence of 1 to 3.
PerDimension per_dimension(nb::handle value, const char* name) {
  if (PyIndex_Check(value.ptr())) return integer(value, name);
  if (!nb::isinstance<nb::tuple>(value) && !nb::isinstance<nb::list>(value)) {
    throw Error(Error::Kind::type, std::string(name) + ": expected an integer or a tuple of 1 to 3, got " + class_name(value));
  }
  const auto count = nb::len(value);
  if (count < 1 || count > 3) {
    throw Error(Error::Kind::value, std::string(name) + ": " + std::to_string(count) + " numbers, expected 1 to 3");
  }
  PerDimension numbers = 0;
  numbers.count = int(count);
  for (std::size_t i = 0; i < count; ++i) numbers.value[i] = integer(value[i], name);
  return numbers;
}

RuleObject local_rule(nb::handle window, nb::handle log2_stride, nb::handle causal) {
  const auto stride = integer(log2_stride, "log2_stride");
  if (stride < 0 || stride > 30) {
    throw Error(Error::Kind::value, "log2_stride: " + std::to_string(stride) + ", expected 0 to 30");
  }
  return {local(integer(window, "window"), int(stride), flag(causal, "causal")), {}};
}

using MakeFromTwo = Rule (*)(const TensorView&, const TensorView&);

RuleObject rule_of_tables(MakeFromTwo make, nb::handle first, const char* first_name, nb::handle second,
                          const char* second_name) {
  const auto tables = std::make_shared<Arrays>();
  const auto a = tables->input(first, first_name, Elements::indices);
  const auto b = tables->input(second, second_name, Elements::indices);
  return {make(a, b), {tables}};
}

RuleObject blocks_rule(nb::handle bitmap, nb::handle block_q, nb::handle block_k) {
  const auto tables = std::make_shared<Arrays>();
  const auto view = tables->input(bitmap, "bitmap", Elements::mask);
  return {blocks(view, integer(block_q, "block_q"), integer(block_k, "block_k")), {tables}};
}

RuleObject dense_rule(nb::handle mask) {
  const auto tables = std::make_shared<Arrays>();
  const auto view = tables->input(mask, "mask", Elements::mask);
  return {dense(view), {tables}};
}

}  // namespace

const RuleObject& rule_of(nb::handle object) {
  if (!nb::isinstance<RuleObject>(object)) {
    throw Error(Error::Kind::type, "rule: expected a rule such as anyflash.causal(), got " + class_name(object));
  }
  return *nb::inst_ptr<RuleObject>(object);
}

void add_rules(nb::module_& module) {
  nb::class_<RuleObject>(module, "Rule",
                         "Which keys a query sees. Made by full, causal, local, window, prefix, sink, documents,\n"
                         "documents_packed, tiles, neighbourhood, blocks and dense; combined with & | ~. Immutable. It keeps\n"
                         "the arrays it was made of alive and reads them when it runs; str(rule) is the rule as text.")
      .def("__repr__", [](const RuleObject& self) { return self.rule.text(); })
      .def("__and__", [](const RuleObject& a, const RuleObject& b) { return joined(a.rule & b.rule, a, b); },
           nb::is_operator(), nb::arg("other"), "Visible where both rules say so.")
      .def("__or__", [](const RuleObject& a, const RuleObject& b) { return joined(a.rule | b.rule, a, b); },
           nb::is_operator(), nb::arg("other"), "Visible where either rule says so.")
      .def("__invert__", [](const RuleObject& a) { return RuleObject{~a.rule, a.tables}; },
           "Visible where the rule says it is not.");

  module.def("full", [] { return RuleObject{full(), {}}; });
  module.def("causal", [] { return RuleObject{causal(), {}}; });
  module.def("local", &local_rule, nb::arg("window"), nb::arg("log2_stride"), nb::arg("causal"));
  module.def("window", [](nb::handle left, nb::handle right) {
    return RuleObject{window(per_dimension(left, "left"), per_dimension(right, "right")), {}};
  });
  module.def("prefix", [](nb::handle n) { return RuleObject{prefix(integer(n, "n")), {}}; });
  module.def("sink", [](nb::handle n) { return RuleObject{sink(integer(n, "n")), {}}; });
  module.def("documents", [](nb::handle ids_q, nb::handle ids_k) {
    return rule_of_tables(&documents, ids_q, "ids_q", ids_k, "ids_k");
  });
  module.def("documents_packed", [](nb::handle cu_q, nb::handle cu_k) {
    return rule_of_tables(&documents_packed, cu_q, "cu_seqlens_q", cu_k, "cu_seqlens_k");
  });
  module.def("tiles", [](nb::handle shape, nb::handle kernel) {
    return RuleObject{tiles(per_dimension(shape, "shape"), per_dimension(kernel, "kernel")), {}};
  });
  module.def("neighbourhood", [](nb::handle kernel, nb::handle dilation, nb::handle causal) {
    return RuleObject{neighbourhood(per_dimension(kernel, "kernel"), per_dimension(dilation, "dilation"),
                                    per_dimension(causal, "causal")), {}};
  });
  module.def("blocks", &blocks_rule);
  module.def("dense", &dense_rule);
  module.def("parse_rule", [](nb::handle text) {
    const char* characters = PyUnicode_Check(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), nullptr) : nullptr;
    if (!characters) {
      PyErr_Clear();
      throw Error(Error::Kind::type, "text: expected a str, got " + class_name(text));
    }
    return RuleObject{parse_rule(characters), {}};
  });
}

}  // namespace anyflash::python
