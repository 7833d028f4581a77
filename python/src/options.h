// The options of a call, from Python's dict of them by name to the library's own.
#pragma once

#include <anyflash/option_list.h>

#include <optional>

#include "rule_object.h"
#include "without_gil.h"

namespace anyflash::python {

struct PlanObject {
  std::optional<Plan> plan;
  nb::object rule;  // the tables the plan reads

  /// What the plan has on a GPU may go behind a wait for that, and so for calls of Python that are queued there.
  ~PlanObject() {
    const WithoutGil without_gil;
    plan.reset();
  }
};

/// Those that are in the dict; the others have their defaults. TypeError for a name that is none of an option.
Options read_options(const nb::dict& given, Arrays& arrays);

/// One of them as it came; None if it did not.
nb::object option_in(const nb::dict& given, const char* name);

/// What return_lse asks for: 0 nothing, 1 the log-sum-exp, 2 l and m.
int wanted_statistics(nb::handle return_lse);

/// The module's scalar_options, {name: default}, tensor_options, the names, and plain_scalars.
void add_options(nb::module_& module);

}  // namespace anyflash::python
