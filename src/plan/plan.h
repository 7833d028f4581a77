// How a Problem will run: the boxes of the blocks, and for each block the runs of blocks that it visits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <forward_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/run.h"
#include "problem/problem.h"
#include "rules/box.h"
#include "rules/program.h"

namespace anyflash {

using rules::Box;
using rules::Grid;
using rules::TileClass;

/// What a backend can run, at what cost: the plan chooses boxes from this menu.
struct TileMenu {
  std::vector<int> query_rows;  ///< allowed rows of a query block, each a multiple of 64, e.g. {64, 128, 256}
  int key_rows = 64;            ///< rows of a key block, a multiple of 64
  double tile_cost = 0.0;       ///< cost of loading one key block for a query block, in pairs of a visited tile
};

/// A block is divided into cells of 64 entries, one mask word each: 64 in a row in a block that is a row, 8 x 8 in a
/// block of one plane, 4 x 4 x 4 in any other. Row r of a block is entry r % 64 of its cell r / 64.
inline int cells_of(const Box& block) { return static_cast<int>(rules::volume(block.extent) / 64); }

/// Cell `cell` of a block, counted row-major. If a block is partly beyond the sequence, a cell may be wholly beyond it.
/// Its origin is then outside, and its words must not be evaluated.
inline Box cell_of(const Box& block, int cell) {
  Box result = block;
  if (block.extent[0] > 1) {
    result.extent = {{4, 4, 4}};
  } else if (block.extent[1] > 1) {
    result.extent = {{1, 8, 8}};
  } else {
    result.extent = {{1, 1, 64}};
  }
  for (int i = 2; i >= 0; --i) {
    const auto cells = block.extent[i] / result.extent[i];
    result.origin[i] += cell % cells * result.extent[i] * block.step[i];
    cell /= cells;
  }
  return result;
}

/// For each block of one side the runs of the other side's blocks, ascending.
struct RunList {
  std::vector<std::int64_t> start;  ///< runs[start[block]] .. runs[start[block + 1] - 1]
  std::vector<Run> runs;
};

/// The mask of one (batch, head), or of all of them if they share it.
struct MaskGroup {
  rules::Program program;
  RunList keys_of_query_block;
  RunList queries_of_key_block;  ///< the transpose; made for backward plans only
};

/// What backends keep for a plan that outlives its call, such as its runs in GPU memory. Made by the first call that
/// needs it, destroyed with the plan. Safe from any number of threads.
class Companions {
 public:
  /// The companion of a device; make() creates it if there is none yet.
  template <typename Make>
  std::shared_ptr<void> of(int device, const Make& make) const {
    auto& one = companion_of(device);
    std::call_once(one.made, [&] { one.data = make(); });  // other devices need not wait for it
    return one.data;
  }

 private:
  struct Companion {
    explicit Companion(int device) : device(device) {}
    const int device;
    std::once_flag made;
    std::shared_ptr<void> data;
  };

  Companion& companion_of(int device) const {
    const std::lock_guard lock(mutex_);
    for (auto& one : all_)
      if (one.device == device) return one;
    return all_.emplace_front(device);
  }

  mutable std::mutex mutex_;
  mutable std::forward_list<Companion> all_;
};

/// What has been chosen for calls with this plan, by what the choice depends on. Safe from any number of threads.
class ChunkMemo {
 public:
  std::optional<Chunks> find(const std::string& key) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [known, chunks] : chosen_)
      if (known == key) return chunks;
    return {};
  }
  void add(const std::string& key, const Chunks& chunks) const {
    const std::lock_guard lock(mutex_);
    if (chosen_.size() >= most) chosen_.erase(chosen_.begin());
    chosen_.emplace_back(key, chunks);
  }

 private:
  static constexpr std::size_t most = 8;
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<std::string, Chunks>> chosen_;
};

/// A plan for one direction.
struct ExecutionPlan {
  Grid query_grid, key_grid;
  std::int64_t batch_groups = 1, head_groups = 1;  ///< 1, or batch / heads_q where the mask differs between them
  std::vector<MaskGroup> groups;                   ///< [batch group][head group]
  std::shared_ptr<const void> tables;              ///< the owner of what programs point to (document tables)
  int threads = 0;
  /// Lengths or tables are in device memory. groups then holds one mask, without them (with its runs if there are only
  /// lengths), and the backend finds the masks in each call.
  bool masks_on_device = false;
  bool kept = false;          ///< it outlives the call: in the cache, or held by the caller
  bool shares_words = false;  ///< on a GPU tiles may share a table of words: not if tables may be used only once
  Companions companions;

  /// Of all groups: the most key blocks that a query block visits, the most query blocks that a key block does, and the
  /// tiles that are visited.
  std::int64_t most_keys = 0, most_queries = 0, tiles = 0;
  ChunkMemo memo;

  const MaskGroup& group(std::int64_t b, std::int64_t h) const {
    return groups[(batch_groups > 1 ? b : 0) * head_groups + (head_groups > 1 ? h : 0)];
  }
};

/// The number of threads of a call: the plan's, or fewer if the call asks for fewer.
inline int threads_of(const Problem& problem, const ExecutionPlan& plan) {
  const int most = problem.threads > 0 ? std::min(problem.threads, plan.threads) : plan.threads;
  return std::max(problem.chunks.threads > 0 ? std::min(problem.chunks.threads, most) : most, 1);
}

/// Makes the plan for a problem, or returns the cached one. Plans of rules without tables are cached by rule, shape and
/// menu. So are plans of rules whose only tables are documents, with these in the key, from the second call on. The
/// boxes depend on the rule, the sizes, the alignment and the menu, but not on threads or other batch entries. The rule
/// is one that rules::check has accepted for these shapes. keep: the plan will outlive the call.
std::shared_ptr<const ExecutionPlan> make_plan(const Problem& problem, const TileMenu& menu, bool keep = false);

namespace detail {
/// The contents of a public Plan: the plans, and what they were made for, so that a call can be checked against it.
struct PlanPair {
  std::shared_ptr<const ExecutionPlan> forward, backward;
  std::int64_t forward_workspace = 0, backward_workspace = 0;
  Chunks forward_chunks, backward_chunks;
  Problem made_for;                                                   ///< numbers and the rule, no pointers
  std::vector<std::int64_t> cu_seqlens_q, cu_seqlens_k, key_lengths;  ///< their values
  std::int64_t cu_seqlens_size = 0, key_lengths_size = 0;             ///< their sizes, wherever they are
  std::uint64_t tables_hash = 0;                                      ///< rules::tables_hash of the rule
};
}  // namespace detail

}  // namespace anyflash
