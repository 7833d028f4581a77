// Hands out work in groups of equal parts. A thread takes a group for itself, part after part, so that it loads their
// common data once. Once all groups are taken, a thread helps the group with the most parts left, so that none waits
// long for the slowest thread.
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
    int owner;                  ///< the thread that took the group; it did all earlier parts that it took alone
  };

  Shares(std::int64_t groups, std::int64_t parts, int threads, Parts& memory)
      : groups_(groups),
        parts_(parts),
        threads_(std::max(threads, 1)),
        taken_(memory.take<Taken>(groups)),
        owned_(memory.take<Owned>(threads_)) {
    if (taken_) std::uninitialized_default_construct_n(taken_, groups);
    if (owned_) std::uninitialized_default_construct_n(owned_, threads_);
  }

  /// The next share, at most `most` parts, for a thread below `threads`; false if there is none. share: its last one.
  /// Shares of a group are handed out in ascending order.
  bool next(int thread, std::int64_t most, Share& share) {
    while (share.group >= 0 || take_group(thread, share) || help(share)) {
      share.first = taken_[share.group].parts.fetch_add(most, std::memory_order_relaxed);
      share.count = std::min(most, parts_ - share.first);
      if (share.count > 0) return true;
      share.group = -1;
    }
    return false;
  }

 private:
  struct alignas(64) Taken {
    std::atomic<std::int64_t> parts{0};
  };
  struct alignas(64) Owned {
    std::atomic<std::int64_t> group{-1};  ///< the group that a thread took last
  };

  bool take_group(int thread, Share& share) {
    if (next_group_.load(std::memory_order_acquire) >= groups_) return false;
    const auto group = next_group_.fetch_add(1, std::memory_order_acq_rel);
    if (group >= groups_) return false;
    share.group = group, share.owner = thread;
    owned_[thread].group.store(group, std::memory_order_release);
    return true;
  }
  /// Joins the group with the most parts left, except one whose owner has not announced it yet.
  bool help(Share& share) {
    std::int64_t most_left = 0;
    for (int owner = 0; owner < threads_; ++owner) {
      const auto group = owned_[owner].group.load(std::memory_order_acquire);
      if (group < 0) continue;
      const auto left = parts_ - taken_[group].parts.load(std::memory_order_relaxed);
      if (left > most_left) most_left = left, share.group = group, share.owner = owner;
    }
    return most_left > 0;
  }

  const std::int64_t groups_, parts_;
  const int threads_;
  Taken* const taken_;
  Owned* const owned_;
  std::atomic<std::int64_t> next_group_{0};
};

}  // namespace anyflash::cpu
