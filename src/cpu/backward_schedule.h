// The schedule of a backward pass: which thread computes which key block when, and when a task may add to a query
// gradient.
//
// A task is one key block of one group (batch entry, key/value head), with AMX up to four neighbouring ones. The query
// gradient of a query block is the sum over its key blocks, added in ascending order of key blocks, whichever threads
// computed them. So the sum has the same bits for any number of threads. Tasks are handed out in ascending order, and a
// task waits only for lower ones. So the lowest unfinished task never waits, and there is no deadlock.
//
// With many groups a thread takes a whole group, whose query blocks it keeps, and waits for no other thread until all
// groups are taken. Then others help it (shares.h). The order of additions is the same.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include "cpu/shares.h"
#include "cpu/tuning.h"
#include "cpu/workspace.h"
#include "plan/plan.h"

namespace anyflash::cpu {

/// The position of a key block among the key blocks that a query block visits; of those, `before` come before block
/// `first`.
struct Rank {
  std::int32_t index = 0, total = 0, before = 0;
};

inline Rank rank_of(const RunList& keys_of_query_block, std::int32_t query_block, std::int32_t key_block,
                    std::int32_t first) {
  Rank rank;
  for (auto r = keys_of_query_block.start[query_block]; r < keys_of_query_block.start[query_block + 1]; ++r) {
    const Run& run = keys_of_query_block.runs[r];
    rank.total += run.count;
    rank.before += std::clamp(first - run.first, 0, run.count);
    if (key_block >= run.first + run.count) {
      rank.index += run.count;
    } else if (key_block > run.first) {
      rank.index += key_block - run.first;
    }
  }
  return rank;
}

/// Counts how often something has been done; waiters see all that was written before.
class Turn {
 public:
  void wait_for(std::int32_t count) const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins)
      if (spins > 64) std::this_thread::yield();
  }
  void add(std::int32_t count) { done_.fetch_add(count, std::memory_order_acq_rel); }

 private:
  std::atomic<std::int32_t> done_{0};
};

/// Hands out the tasks of one backward pass.
class BackwardSchedule {
 public:
  struct Task {
    std::int64_t group;
    std::int32_t first_key_block, key_blocks;
    std::int64_t slot;  ///< the index of the group's query gradient buffer
    Shares::Share share;
  };

  /// key_blocks >= 1. together: how many of them a thread should take at once.
  BackwardSchedule(std::int64_t groups, std::int64_t heads_in_group, std::int64_t query_blocks, std::int64_t key_blocks,
                   std::int64_t together, int threads, Parts& parts)
      : groups_(groups),
        heads_(heads_in_group),
        query_blocks_(query_blocks),
        key_blocks_(static_cast<std::int32_t>(key_blocks)) {
    // Whole groups, if handing them out leaves no thread idle for more than a tenth of the time.
    const auto rounds = (groups + threads - 1) / threads;
    whole_groups_ = rounds * threads * 10 <= groups * 11;
    if (!whole_groups_) together = std::min(together, groups * key_blocks / (threads * tuning::kTasksOfThread));
    together_ = static_cast<std::int32_t>(std::clamp<std::int64_t>(together, 1, key_blocks));
    parts_ = (key_blocks + together_ - 1) / together_;
    tasks_ = whole_groups_ ? groups : groups * parts_;
    threads_ = static_cast<int>(std::clamp<std::int64_t>(tasks_, 1, threads));
    shares_.emplace(whole_groups_ ? groups : 0, parts_, threads_, parts);
    // A buffer per thread, or buffers for as many groups as the threads' tasks probably span.
    slots_ = whole_groups_ ? threads_ : std::min<std::int64_t>(groups, 1 + (threads_ + parts_ - 1) / parts_);
    turns_ = turns(groups * heads_in_group * query_blocks, parts);
    finished_ = turns(groups, parts);
  }

  int threads() const { return threads_; }
  std::int64_t slots() const { return slots_; }
  std::int32_t together() const { return together_; }

  /// The next task for a thread, false if there is none. task: its last one. Waits until the task's buffers are free.
  bool next(int thread, Task& task) {
    const auto take = [&](std::int64_t group, std::int64_t part, std::int64_t slot) {
      task.group = group, task.slot = slot;
      task.first_key_block = static_cast<std::int32_t>(part) * together_;
      task.key_blocks = std::min(together_, key_blocks_ - task.first_key_block);
    };
    if (whole_groups_) {
      if (!shares_->next(thread, 1, task.share)) return false;
      take(task.share.group, task.share.first, task.share.owner);
      return true;
    }
    const auto ticket = next_.fetch_add(1, std::memory_order_relaxed);
    if (ticket >= tasks_) return false;
    take(ticket / parts_, ticket % parts_, ticket / parts_ % slots_);
    if (task.group >= slots_) finished_[task.group - slots_].wait_for(key_blocks_);
    return true;
  }
  void finish(const Task& task) { finished_[task.group].add(task.key_blocks); }

  /// How many key blocks have been added to the query gradient of a block of a head of a group.
  Turn& turn(std::int64_t group, std::int64_t head_in_group, std::int64_t query_block) {
    return turns_[(group * heads_ + head_in_group) * query_blocks_ + query_block];
  }

 private:
  static Turn* turns(std::int64_t count, Parts& parts) {
    Turn* const made = parts.take<Turn>(count);
    if (made) std::uninitialized_default_construct_n(made, count);
    return made;
  }

  std::int64_t groups_, heads_, query_blocks_, tasks_ = 0, slots_ = 1;
  std::int64_t parts_ = 1;
  std::int32_t key_blocks_, together_ = 1;
  int threads_ = 1;
  bool whole_groups_ = false;
  std::atomic<std::int64_t> next_{0};
  Turn *turns_, *finished_;
  std::optional<Shares> shares_;  // with whole groups
};

}  // namespace anyflash::cpu
