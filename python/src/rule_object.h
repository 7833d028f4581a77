// A rule as Python sees it: the rule, and the arrays that it reads.
#pragma once

#include <memory>
#include <vector>

#include "arrays.h"

namespace anyflash::python {

struct RuleObject {
  Rule rule;
  std::vector<std::shared_ptr<Arrays>> tables;  // document ids, bitmaps, masks: alive as long as any rule made of them
};

/// The rule in `object`, or TypeError.
const RuleObject& rule_of(nb::handle object);

void add_rules(nb::module_& module);
void add_calls(nb::module_& module);
void add_explain(nb::module_& module);
void add_jax(nb::module_& module);
void add_sharding(nb::module_& module);
void add_tile_machine(nb::module_& module);

}  // namespace anyflash::python
