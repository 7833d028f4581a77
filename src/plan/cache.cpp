// A few dozen plans in a plain vector: searching it costs less than a hash table's bookkeeping would.
#include "plan/cache.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

namespace anyflash::planning {
namespace {

std::size_t bytes_of(const RunList& list) {
  return list.start.capacity() * sizeof(list.start[0]) + list.runs.capacity() * sizeof(Run);
}

}  // namespace

std::size_t bytes_of(const ExecutionPlan& plan) {
  std::size_t bytes = sizeof(plan) + plan.groups.capacity() * sizeof(MaskGroup);
  for (const auto& group : plan.groups) {
    bytes += bytes_of(group.keys_of_query_block) + bytes_of(group.queries_of_key_block);
    if (group.program.has_documents) {  // two numbers an entry
      bytes += 8 * std::size_t(rules::volume(group.program.q_size()) + rules::volume(group.program.k_size()));
    }
  }
  return bytes;
}

PlanCache::Entry* PlanCache::entry(std::size_t hash, const PlanKey& key) {
  for (auto& entry : entries_) {
    if (entry.hash == hash && entry.key == key) return &entry;
  }
  return nullptr;
}

std::shared_ptr<const ExecutionPlan> PlanCache::find(const PlanKey& key, bool* asked_before) {
  const auto hash = std::hash<PlanKey>{}(key);
  const std::lock_guard lock(mutex_);
  auto* found = entry(hash, key);
  if (!found) {
    if (!asked_before) return nullptr;
    *asked_before = std::find(asked_.begin(), asked_.end(), hash) != asked_.end();
    if (!*asked_before) asked_[next_asked_++ % asked_.size()] = hash;
    return nullptr;
  }
  found->last_use = ++uses_;
  return found->plan;
}

std::shared_ptr<const ExecutionPlan> PlanCache::insert(const PlanKey& key, std::shared_ptr<ExecutionPlan> plan,
                                                       bool keep) {
  const auto hash = std::hash<PlanKey>{}(key);
  const auto bytes = bytes_of(*plan) + key.size();
  std::vector<std::shared_ptr<const ExecutionPlan>> gone;  // freed without the lock: a companion may wait for its GPU
  const std::lock_guard lock(mutex_);
  if (auto* found = entry(hash, key)) return found->plan;
  if (bytes > most_bytes) {
    plan->kept = keep;
    return plan;
  }
  while (entries_.size() >= most_plans || (bytes_ + bytes > most_bytes && !entries_.empty())) {
    const auto oldest = std::min_element(entries_.begin(), entries_.end(),
                                         [](const Entry& a, const Entry& b) { return a.last_use < b.last_use; });
    bytes_ -= oldest->bytes;
    gone.push_back(std::move(oldest->plan));
    *oldest = std::move(entries_.back());
    entries_.pop_back();
  }
  entries_.push_back({hash, key, plan, bytes, ++uses_});
  bytes_ += bytes;
  return plan;
}

std::size_t PlanCache::plans() {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

PlanCache& plan_cache() {
  static auto& cache = *new PlanCache;  // never destroyed: calls may still come while the process ends
  return cache;
}

}  // namespace anyflash::planning
