#include "problem/regions.h"

#include "rules/node.h"

namespace anyflash::problem {
namespace {

/// Calls visit(table) for every tensor in a rule.
template <typename Visit>
void for_each_table(const rules::Node& node, const Visit& visit) {
  if (node.left) for_each_table(*node.left, visit);
  if (node.right) for_each_table(*node.right, visit);
  if (node.table_q.given()) visit(node.table_q);
  if (node.table_k.given()) visit(node.table_k);
}

}  // namespace

void Regions::add(Argument argument, bool written) {
  if (!is_empty(argument.view)) regions_[count_++] = {argument.name, &argument.view, extent_of(argument.view), written};
}

void Regions::check_against_outputs(const Region& region, int outputs_from) const {
  for (int i = outputs_from; i < count_; ++i) {
    const auto& output = regions_[i];
    if (!output.written || output.extent.high <= region.extent.low || region.extent.high <= output.extent.low) continue;
    if (share_memory(*output.view, *region.view)) {
      fail_value(output.name, std::string("shares memory with ") + region.name + ", expected memory of its own");
    }
  }
}

void Regions::check(const Rule& rule, Device device) const {
  // Inputs come before outputs, so each output is compared with all inputs and the outputs before it.
  for (int i = 0; i < count_; ++i) check_against_outputs(regions_[i], i + 1);
  for_each_table(rule.node(), [&](const TensorView& table) {
    check_memory({"a table of the rule", table}, table.device.kind == DeviceKind::cpu ? Device{} : device);
    if (!is_empty(table)) check_against_outputs({"a table of the rule", &table, extent_of(table), false}, 0);
  });
}

}  // namespace anyflash::problem
