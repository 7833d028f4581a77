#include "plan/chunks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "backends.h"
#include "plan/cost.h"
#include "tile_machine/backend.h"

namespace anyflash::planning {
namespace {

constexpr double as_fast = 1.03;  // of candidates that are this close the one with the fewest bytes is taken

/// `most`, a quarter of it, a quarter of that, ..., 1.
std::vector<std::int64_t> quarters(std::int64_t most) {
  std::vector<std::int64_t> numbers;
  for (auto n = std::max<std::int64_t>(most, 1); n > 1; n = (n + 3) / 4) numbers.push_back(n);
  numbers.push_back(1);
  return numbers;
}

std::vector<std::int64_t> powers(std::int64_t most) {
  std::vector<std::int64_t> numbers;
  for (std::int64_t n = 1; n < most; n *= 2) numbers.push_back(n);
  numbers.push_back(std::max<std::int64_t>(most, 1));
  return numbers;
}

/// Entries of a sequence that lie between the first and the last of so many neighbouring blocks.
std::int64_t entries_of(const Grid& grid, std::int64_t chunks) {
  const auto blocks = grid.count(), at_once = (blocks + chunks - 1) / chunks, size = rules::volume(grid.size);
  if (chunks == 1 || rules::volume(grid.step) != 1) return size;
  std::int64_t row = 1, row_entries = 1;  // blocks and entries of a row of blocks in the outermost dimension
  int outer = 0;
  while (outer < 2 && grid.size[outer] == 1) ++outer;
  for (int i = outer + 1; i < 3; ++i) row *= grid.blocks(i), row_entries *= grid.size[i];
  const auto rows = row == 1 ? at_once : at_once / row + 2;
  return std::min(size, rows * grid.extent[outer] * row_entries);
}

/// Bytes of memory pages that `entries` entries of `heads` heads of a tensor lie in.
std::int64_t slice_bytes(const Operand& operand, std::int64_t size, std::int64_t entries, std::int64_t heads,
                         std::int64_t channels) {
  if (!operand.given()) return 0;
  constexpr std::int64_t around = 2 << 20;  // what a page fault may map: a large folio of the page cache
  const auto step = std::abs(operand.sequence[2]), head = std::abs(operand.head);
  if (step > head && head > 0) return entries * step * size + around;                  // heads lie between entries
  if (step == 1 && channels > 1) return heads * channels * (entries * size + around);  // channels lie apart
  if (entries * step >= head) return heads * entries * std::max(step, channels) * size + around;  // in one piece
  return heads * (entries * std::max(step, channels) * size + around);
}

/// Bytes of the tensors' parts that a chunk of the call touches.
std::int64_t bytes_of_slices(const Problem& problem, const ExecutionPlan& plan) {
  const auto& chunks = problem.chunks;
  const auto size = static_cast<std::int64_t>(element_size(problem.type));
  const auto all = problem.batch * problem.heads_kv, heads = problem.heads_q / problem.heads_kv;
  const bool alone = problem.direction == Direction::backward && (chunks.q > 0 || chunks.kv > 0);
  const auto groups = alone ? 1 : chunks.groups > 0 ? std::min(chunks.groups, all) : all;
  const auto of_q = alone ? 1 : groups * heads;
  const auto q = entries_of(plan.query_grid, std::clamp<std::int64_t>(chunks.q, 1, plan.query_grid.count()));
  const auto k = entries_of(plan.key_grid, std::clamp<std::int64_t>(chunks.kv, 1, plan.key_grid.count()));
  std::int64_t bytes = 0;
  for (const auto* one : {&problem.q, &problem.dq}) bytes += slice_bytes(*one, size, q, of_q, problem.d_qk);
  for (const auto* one : {&problem.out, &problem.dout}) bytes += slice_bytes(*one, size, q, of_q, problem.d_v);
  for (const auto* one : {&problem.k, &problem.dk}) bytes += slice_bytes(*one, size, k, groups, problem.d_qk);
  for (const auto* one : {&problem.v, &problem.dv}) bytes += slice_bytes(*one, size, k, groups, problem.d_v);
  return bytes + of_q * q * 2 * std::max<std::int64_t>(size, 4) + (4 << 20);  // lse and dlse
}

/// Numbers of chunks ask a GPU for so many parts.
std::int64_t parts_of(const Problem& problem) {
  return problem.num_chunks_q.value_or(1) * problem.num_chunks_kv.value_or(1);
}

/// Which kernels of a GPU fit may depend on the batch: so deterministic calls that may be divided take the portable ones
/// whatever fits.
bool only_portable(const Problem& problem) {
  return problem.device.kind == DeviceKind::cuda && problem.deterministic &&
         (problem.memory_budget || parts_of(problem) > 1);
}

/// Collects the candidates of one call.
class Collector {
 public:
  Collector(const Problem& problem, const ExecutionPlan& plan, const Calibration& machine, const Backend& backend)
      : problem_(problem),
        plan_(plan),
        machine_(machine),
        backend_(backend),
        work_(problem.device.kind == DeviceKind::cpu ? work_of(plan) : Work()),
        groups_(problem.batch * problem.heads_kv),
        cpu_(problem.device.kind == DeviceKind::cpu) {}

  std::vector<Candidate> collect() {
    const bool counts = problem_.num_chunks_q.value_or(1) > 1 || problem_.num_chunks_kv.value_or(1) > 1;
    if (!cpu_) {
      collect_groups();
    } else if (problem_.direction == Direction::forward) {
      collect_forward(counts || problem_.tensors_in_budget);
    } else {
      if (!counts) collect_ordinary();
      collect_chunks(counts);
    }
    mark();
    return std::move(found_);
  }

 private:
  /// A GPU takes fewer groups at a time, or its portable kernels, whose workspace does not grow with the channels.
  void collect_groups() {
    const auto parts = parts_of(problem_);
    const auto most = std::max<std::int64_t>(1, (groups_ + parts - 1) / parts);
    std::vector<Chunks> divisions;
    if (most == groups_) divisions.push_back({});
    for (auto n = most; n >= 1; n = n == 1 ? 0 : (n + 1) / 2)
      if (n < groups_ || n == 1) divisions.push_back({.groups = n});
    const bool portable = only_portable(problem_);
    if (!portable)
      for (const auto& one : divisions) add(one);
    for (std::size_t i = 0; i < divisions.size(); ++i) {
      divisions[i].portable = true;
      add(divisions[i]);
      if (!portable && found_.back().shown.bytes >= found_[i].shown.bytes) found_.pop_back();
    }
  }

  void collect_forward(bool chunks) {
    const bool free_q = problem_.tensors_in_budget && !problem_.num_chunks_q;
    const bool free_kv = problem_.tensors_in_budget && !problem_.num_chunks_kv;
    const auto chunks_q =
        free_q ? powers(plan_.query_grid.count()) : std::vector<std::int64_t>{problem_.num_chunks_q.value_or(0)};
    const auto chunks_kv =
        free_kv ? powers(plan_.key_grid.count()) : std::vector<std::int64_t>{problem_.num_chunks_kv.value_or(0)};
    for (const auto q : chunks_q)
      for (const auto kv : chunks_kv)
        for (const auto groups : quarters(groups_))
          for (const auto threads : thread_counts())
            for (const std::int64_t kept : {0, 16, 4, 1}) {
              Chunks made{groups == groups_ && groups > 1 ? 0 : groups, q > 1 ? q : 0, kv > 1 ? kv : 0, kept, threads};
              if (chunks || made.any()) add(made);
            }
    if (!chunks) add({});
  }

  void collect_ordinary() {
    add({});
    for (const auto groups : quarters(groups_))
      for (const auto threads : thread_counts())
        for (const std::int64_t kept : {0, 1}) {
          const Chunks made{groups == groups_ && groups > 1 ? 0 : groups, 0, 0, kept, threads};
          if (made.any()) add(made);
        }
  }

  void collect_chunks(bool counts) {
    const auto q_blocks = plan_.query_grid.count(), k_blocks = plan_.key_grid.count();
    const auto of = [&](const std::optional<std::int64_t>& given, std::int64_t blocks) {
      return counts && given ? std::vector<std::int64_t>{*given} : powers(blocks);
    };
    for (const auto q : of(problem_.num_chunks_q, q_blocks))
      for (const auto kv : of(problem_.num_chunks_kv, k_blocks))
        for (const auto threads : thread_counts())
          for (const std::int64_t kept : {0, 1}) add({1, q, kv, kept, threads});
  }

  /// 0 for all, then fewer.
  std::vector<int> thread_counts() const {
    std::vector<int> counts{0};
    for (int n = threads_of(problem_, plan_) / 2; n >= 1; n /= 2) counts.push_back(n);
    return counts;
  }

  void add(const Chunks& chunks) {
    problem_.chunks = chunks;
    Candidate made{chunks, {}};
    auto& shown = made.shown;
    shown.groups = chunks.groups > 0 ? std::min(chunks.groups, groups_) : groups_;
    shown.chunks_q = std::max<std::int64_t>(chunks.q, 1), shown.chunks_kv = std::max<std::int64_t>(chunks.kv, 1);
    shown.threads = cpu_ ? threads_of(problem_, plan_) : 0;
    shown.kept = chunks.kept;
    shown.bytes = backend_.workspace(problem_, plan_);
    if (problem_.tensors_in_budget) shown.bytes += bytes_of_slices(problem_, plan_);
    if (cpu_) {
      shown.cost = cost_of(problem_, plan_, work_, machine_);
    } else {
      shown.timed = false, shown.portable = chunks.portable;
      // More for more launches, and the portable kernels only where nothing else fits.
      shown.cost.compute = double(groups_) / double(shown.groups) + (chunks.portable ? 2.0 * double(groups_) : 0.0);
    }
    shown.fits = !problem_.memory_budget || shown.bytes <= *problem_.memory_budget;
    found_.push_back(std::move(made));
  }

  void mark() {
    double fastest = std::numeric_limits<double>::infinity();
    for (const auto& one : found_)
      if (one.shown.fits) fastest = std::min(fastest, one.shown.cost.total());
    Candidate* best = nullptr;
    for (auto& one : found_) {
      if (one.shown.fits && !one.chunks.any()) {  // what fits undivided is not divided
        best = &one;
        break;
      }
      if (!one.shown.fits || one.shown.cost.total() > as_fast * fastest) continue;
      if (!best || one.shown.bytes < best->shown.bytes) best = &one;
    }
    if (best) best->shown.chosen = true;
  }

  Problem problem_;
  const ExecutionPlan& plan_;
  const Calibration& machine_;
  const Backend& backend_;
  const Work work_;
  const std::int64_t groups_;
  const bool cpu_;
  std::vector<Candidate> found_;
};

/// What a choice on the CPU depends on beside the plan.
std::string memo_key(const Problem& problem, const ExecutionPlan& plan) {
  std::string key;
  const auto append = [&](const auto&... numbers) {
    (key.append(reinterpret_cast<const char*>(&numbers), sizeof(numbers)), ...);
  };
  append(problem.batch, problem.heads_q, problem.heads_kv, problem.d_qk, problem.d_v, problem.type, problem.softcap > 0,
         threads_of(problem, plan), problem.memory_budget.value_or(-1), problem.num_chunks_q.value_or(-1),
         problem.num_chunks_kv.value_or(-1), problem.dq.given(), problem.dk.given(), problem.dv.given(),
         problem.dbias.given(), problem.dsink.given(), problem.k.head, problem.k.sequence[2], problem.v.head,
         problem.v.sequence[2]);
  for (const auto size : problem.dbias.size) append(size);
  return key;
}

std::int64_t least_of(const std::vector<Candidate>& candidates) {
  auto least = std::numeric_limits<std::int64_t>::max();
  for (const auto& one : candidates) least = std::min(least, one.shown.bytes);
  return least;
}

}  // namespace

void fail_budget(const Problem& problem, std::int64_t least) {
  throw Error(Error::Kind::value, "memory_budget: " + std::to_string(*problem.memory_budget) +
                                      " bytes, expected at least " + std::to_string(least));
}

std::vector<Candidate> candidates_of(const Problem& problem, const ExecutionPlan& plan, const Calibration& machine) {
  if (problem.device.kind == DeviceKind::tiles) return simulator::ways(problem, plan);
  return candidates_on(backend_of(problem.device), problem, plan, machine);
}

std::vector<Candidate> candidates_on(const Backend& backend, const Problem& problem, const ExecutionPlan& plan,
                                     const Calibration& machine) {
  return Collector(problem, plan, machine, backend).collect();
}

std::int64_t least_bytes(const Problem& problem, const ExecutionPlan& plan) {
  if (problem.device.kind == DeviceKind::tiles) return simulator::least_bytes(problem, plan);
  auto bounded = problem;  // calls with a budget may have other candidates
  if (!bounded.memory_budget) bounded.memory_budget = 0;
  return least_of(candidates_of(bounded, plan));
}

Chunks chosen_chunks(const Problem& problem, const ExecutionPlan& plan) {
  return chosen_on(backend_of(problem.device), problem, plan);
}

Chunks chosen_on(const Backend& backend, const Problem& problem, const ExecutionPlan& plan) {
  const bool counts = problem.num_chunks_q.value_or(1) > 1 || problem.num_chunks_kv.value_or(1) > 1;
  if (!counts && !problem.tensors_in_budget && !only_portable(problem)) {
    if (!problem.memory_budget) return {};
    if (backend.workspace(problem, plan) <= *problem.memory_budget) return {};
  }
  const bool memo = problem.device.kind == DeviceKind::cpu && !problem.tensors_in_budget;
  const auto key = memo ? memo_key(problem, plan) : std::string();
  if (memo)
    if (const auto known = plan.memo.find(key)) return *known;
  const auto candidates = candidates_on(backend, problem, plan);
  const auto chosen =
      std::find_if(candidates.begin(), candidates.end(), [](const Candidate& one) { return one.shown.chosen; });
  if (chosen == candidates.end()) fail_budget(problem, least_of(candidates));
  if (memo) plan.memo.add(key, chosen->chunks);
  return chosen->chunks;
}

}  // namespace anyflash::planning
