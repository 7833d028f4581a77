#include "cpu/backend.h"

#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "cpu/amx.h"
#include "cpu/tuning.h"
#include "cpu/walk.h"
#include "cpu/workspace.h"
#include "plan/own_of_thread.h"

#include "hwy/highway.h"
#include "hwy/targets.h"

namespace anyflash::cpu {
namespace {

/// The targets that are not disabled. This makes Highway choose among all targets again, so disabled ones have to be
/// disabled anew.
std::vector<std::int64_t> usable_targets() {
  const auto supported = hwy::SupportedTargets();
  hwy::GetChosenTarget().Update(supported);
  std::vector<std::int64_t> targets;
  for (std::int64_t rest = supported & HWY_TARGETS; rest != 0; rest &= rest - 1) targets.push_back(rest & -rest);
  return targets;
}

/// The instruction sets that this machine can run, best first, before ANYFLASH_ISA is applied.
const std::vector<std::int64_t>& all_targets() {
  static const auto& targets =
      *new std::vector<std::int64_t>(usable_targets());  // never destroyed: calls may come while the process ends
  return targets;
}

/// AMX has a name of its own: it is AVX3 with tiles.
constexpr const char* tiles_name = "AMX";
bool has_tiles(std::int64_t target) { return target == HWY_AVX3 && amx::available(); }
std::atomic<bool> tiles_allowed{true};

/// Restricts the kernels to one instruction set, or to none if the name is empty. `argument`: where the name comes
/// from.
void restrict_targets(const char* argument, std::string_view name) {
  std::string names;
  std::int64_t disabled = ~std::int64_t{0};
  const auto offer = [&](const char* offered, std::int64_t target) {
    names += std::string(names.empty() ? "" : ", ") + offered;
    if (name.empty() || name == offered) disabled &= ~target;
  };
  for (const auto target : all_targets()) {
    if (has_tiles(target)) offer(tiles_name, target);
    offer(hwy::TargetName(target), target);
  }
  if (disabled == ~std::int64_t{0}) {
    throw Error(Error::Kind::value,
                std::string(argument) + ": " + std::string(name) + " does not run here, expected one of " + names);
  }
  tiles_allowed = name.empty() || name == tiles_name;
  hwy::DisableTargets(disabled);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

bool obey_environment() {
  const char* wanted = std::getenv("ANYFLASH_ISA");
  if (wanted != nullptr && *wanted != '\0') restrict_targets("ANYFLASH_ISA", wanted);
  return true;
}

std::string model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0)
      if (const auto colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "unknown";
}

constexpr std::int32_t kKeyRows = 64;  // of a key block

struct KeptMemory {
  hwy::AlignedFreeUniquePtr<char[]> bytes;
  std::int64_t size = 0;

  /// Valid until the next call.
  char* at_least(std::int64_t wanted) {
    if (wanted > size) {
      size = 0;
      bytes.reset();
      bytes = allocate<char>(wanted);
      size = wanted;
    }
    return bytes.get();
  }
};

/// Should few queries, which would be one block of one thread, be split? It costs a single thread almost nothing if
/// there are enough keys, and it keeps them all packed. (That needs large enough caches, see caches.h; but plans must
/// not depend on caches.)
bool cut_few_queries(const Problem& problem) {
  const auto bytes = (padded(problem.d_qk) + padded(problem.d_v)) * (problem.type == ElementType::float64 ? 8 : 4);
  return problem.dimensions == 1 && problem.queries() <= kMaxQueryRows && problem.keys() >= tuning::kKeysOfFewQueries &&
         problem.keys() <= KeptBlocks::most * kKeyRows && problem.keys() * bytes <= tuning::kPanelBytes;
}

}  // namespace

void choose_instruction_set() {
  static const bool chosen = obey_environment();
  static_cast<void>(chosen);
}

bool tiles_in_use() { return tiles_allowed && amx::available(); }

std::vector<DeviceInfo> devices() { return {{Device{}, model(), omp_get_max_threads()}}; }

TileMenu tile_menu(const Problem& problem) {
  TileMenu menu;
  menu.key_rows = kKeyRows;
  menu.tile_cost = tuning::kTileCost;
  const auto* const rows = tuning::kQueryRows;
  const bool one_block = problem.dimensions == 1 && problem.queries() <= rows[0];
  const bool all = problem.direction == Direction::forward && !one_block && !cut_few_queries(problem);
  menu.query_rows.assign(rows, all ? std::end(tuning::kQueryRows) : rows + 1);
  return menu;
}

std::int64_t workspace(const Problem& problem, const ExecutionPlan& plan) {
  return problem.direction == Direction::forward ? forward_workspace(problem, plan) : backward_workspace(problem, plan);
}

Workspace allocate_workspace(const Problem& problem, const ExecutionPlan& plan) {
  const auto bytes = workspace(problem, plan);
  const bool keep = problem.direction == Direction::forward && !problem.tensors_in_budget;
  auto* const kept = keep ? own_of_thread<KeptMemory>() : nullptr;
  if (kept) return {kept->at_least(bytes), [](char*) {}};
  return {allocate<char>(bytes).release(), [](char* memory) { hwy::FreeAlignedBytes(memory, nullptr, nullptr); }};
}

}  // namespace anyflash::cpu

namespace anyflash {

const char* instruction_set() {
  cpu::choose_instruction_set();
  for (const auto target : cpu::usable_targets())
    return cpu::has_tiles(target) && cpu::tiles_in_use() ? cpu::tiles_name : hwy::TargetName(target);
  return "none";
}

std::vector<const char*> instruction_sets() {
  std::vector<const char*> names;
  for (const auto target : cpu::all_targets()) {
    if (cpu::has_tiles(target)) names.push_back(cpu::tiles_name);
    names.push_back(hwy::TargetName(target));
  }
  return names;
}

void use_instruction_set(std::string_view name) {
  cpu::choose_instruction_set();  // the environment variable is applied only once, now
  cpu::restrict_targets("instruction set", name);
}

}  // namespace anyflash
