#include "cpu/backend.h"

#include <cstdlib>
#include <string>

#include "hwy/highway.h"
#include "hwy/targets.h"

namespace anyflash::cpu {
namespace {

std::vector<std::int64_t> usable_targets() {
  std::vector<std::int64_t> targets;
  for (std::int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0; rest &= rest - 1)
    targets.push_back(rest & -rest);
  return targets;
}

/// The instruction sets this machine can run, best first, before ANYFLASH_ISA has its say.
const std::vector<std::int64_t>& all_targets() {
  static const std::vector<std::int64_t> targets = usable_targets();
  return targets;
}

bool restrict_targets() {
  const auto& targets = all_targets();
  const char* wanted = std::getenv("ANYFLASH_ISA");
  if (wanted == nullptr || *wanted == '\0') return true;
  for (const auto target : targets) {
    if (std::string(wanted) == hwy::TargetName(target)) {
      hwy::DisableTargets(~target);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      return true;
    }
  }
  std::string names;
  for (const auto target : targets) names += std::string(names.empty() ? "" : ", ") + hwy::TargetName(target);
  throw Error(Error::Kind::value,
              std::string("ANYFLASH_ISA: ") + wanted + " does not run here, expected one of " + names);
}

}  // namespace

void choose_instruction_set() {
  static const bool chosen = restrict_targets();
  static_cast<void>(chosen);
}

TileMenu tile_menu(const Problem& problem) {
  TileMenu menu;
  menu.key_rows = 64;
  // A tile costs, beside its pairs, about as much as 32 rows of them: measured from blocks of 64 to 256 rows.
  menu.tile_cost = 2048.0;
  menu.query_rows = problem.direction == Direction::forward ? std::vector<int>{64, 128, 256} : std::vector<int>{64};
  return menu;
}

const char* instruction_set() {
  choose_instruction_set();
  for (const auto target : usable_targets()) return hwy::TargetName(target);
  return "none";
}

std::vector<const char*> instruction_sets() {
  std::vector<const char*> names;
  for (const auto target : all_targets()) names.push_back(hwy::TargetName(target));
  return names;
}

}  // namespace anyflash::cpu
