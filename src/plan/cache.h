// Plans kept for later calls of the same kind: a call on tiny input has no time to make one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace anyflash::planning {

/// Everything that a plan depends on, as bytes.
using PlanKey = std::string;

std::size_t bytes_of(const ExecutionPlan& plan);

/// Evicts the least recently used plans when there are too many, or too large ones. Safe from any number of threads.
class PlanCache {
 public:
  static constexpr std::size_t most_plans = 64;
  static constexpr std::size_t most_bytes = std::size_t{64} << 20;

  /// asked_before, if given: was this asked with the same key before, not long ago?
  std::shared_ptr<const ExecutionPlan> find(const PlanKey& key, bool* asked_before = nullptr);
  /// Keeps the plan and returns it, or the one that another thread has inserted meanwhile. A plan that is too large is
  /// not kept, unless the caller keeps it (keep).
  std::shared_ptr<const ExecutionPlan> insert(const PlanKey& key, std::shared_ptr<ExecutionPlan> plan,
                                              bool keep = false);
  std::size_t plans();

  // Around a fork (threads.cpp).
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Entry {
    std::size_t hash;
    PlanKey key;
    std::shared_ptr<const ExecutionPlan> plan;
    std::size_t bytes;
    std::uint64_t last_use;
  };
  Entry* entry(std::size_t hash, const PlanKey& key);

  std::mutex mutex_;
  std::array<std::size_t, most_plans> asked_{};  // hashes of the last keys; a wrong answer costs a little time
  std::size_t next_asked_ = 0;
  std::vector<Entry> entries_;  // few: searched linearly
  std::size_t bytes_ = 0;
  std::uint64_t uses_ = 0;
};

/// The process's only cache.
PlanCache& plan_cache();

}  // namespace anyflash::planning
