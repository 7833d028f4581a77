// The extension module anyflash._core: the C++ calls for the Python files next to it, which hold the documentation.
#include <anyflash/names.h>
#include <nanobind/stl/vector.h>

#include "options.h"

namespace anyflash::python {
namespace {

PyObject* exception_for(Error::Kind kind) {
  switch (kind) {
    case Error::Kind::type: return PyExc_TypeError;
    case Error::Kind::memory: return PyExc_MemoryError;
    default: return PyExc_ValueError;
  }
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    PyErr_SetString(exception_for(error.kind()), error.what());
  }
}

}  // namespace

NB_MODULE(_core, module) {
  nb::set_leak_warnings(false);  // about rules that a program still holds when the interpreter ends
  nb::register_exception_translator(&translate);
  find_numpy();
  module.def("echoed", &echoed, nb::arg("object").none(), nb::arg("most") = 40);
  module.def("check_name", [](const std::string& what, nb::handle given, const std::vector<std::string>& known) {
    place_of_name(what, utf8(given, what.c_str()), Names(known.begin(), known.end()));
  });
  module.def("did_you_mean", [](nb::handle given, const std::vector<std::string>& known) {
    return did_you_mean(echoed(given), Names(known.begin(), known.end()));
  });
  module.attr("version") = ANYFLASH_VERSION;
  module.def("synchronize", [](int index, std::intptr_t stream) {
    const WithoutGil without_gil;
    synchronize({DeviceKind::cuda, index}, reinterpret_cast<void*>(stream));
  });
  module.def("instruction_set", &instruction_set);
  module.def("instruction_sets", &instruction_sets);
  add_options(module);
  add_rules(module);
  add_calls(module);
  add_explain(module);
  add_jax(module);
  add_sharding(module);
  add_tile_machine(module);
}

}  // namespace anyflash::python
