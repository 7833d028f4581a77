// Hands out work that lies in groups of equal parts. A thread takes a group for itself, part after part, so that it
// loads what they share once; when every group is taken it helps where most is left, lest all wait for the slowest
// thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "cpu/workspace.h"

namespace anyflash::cpu {

class Shares {
 public:
  struct Share {
    std::int64_t group = -1;
    std::int64_t first, count;  ///< parts
    int owner;                  ///< the thread that took the group: alone it did all that it took before
  };

  Shares(std::int64_t groups, std::int64_t parts, Parts& memory)
      : groups_(groups), parts_(parts), group_(memory.take<Group>(groups)) {
    if (group_) std::uninitialized_default_construct_n(group_, groups);
  }

  /// A thread's next share, of at most `most` parts, false if there is none. share: its last one. Those of a group are
  /// handed out in ascending order.
  bool next(int thread, std::int64_t most, Share& share) {
    while (share.group >= 0 || take_group(thread, share) || help(share)) {
      share.first = group_[share.group].taken.fetch_add(most, std::memory_order_relaxed);
      share.count = std::min(most, parts_ - share.first);
      if (share.count > 0) return true;
      share.group = -1;
    }
    return false;
  }

 private:
  struct alignas(64) Group {
    std::atomic<std::int64_t> taken{0};
    std::atomic<int> owner{-1};
  };

  bool take_group(int thread, Share& share) {
    if (next_group_.load(std::memory_order_acquire) >= groups_) return false;
    const auto group = next_group_.fetch_add(1, std::memory_order_acq_rel);
    if (group >= groups_) return false;
    share.group = group, share.owner = thread;
    group_[group].owner.store(thread, std::memory_order_release);
    return true;
  }
  /// Joins the group of which most is left. One whose owner is not known yet is left to it.
  bool help(Share& share) {
    std::int64_t most_left = 0;
    for (std::int64_t i = 0; i < groups_; ++i) {
      const int owner = group_[i].owner.load(std::memory_order_acquire);
      const auto left = parts_ - group_[i].taken.load(std::memory_order_relaxed);
      if (owner >= 0 && left > most_left) most_left = left, share.group = i, share.owner = owner;
    }
    return most_left > 0;
  }

  const std::int64_t groups_, parts_;
  Group* const group_;
  std::atomic<std::int64_t> next_group_{0};
};

}  // namespace anyflash::cpu
