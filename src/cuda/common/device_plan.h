// A plan's masks in device memory: programs with all that they point to, and runs.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/common/memory.h"
#include "cuda/portable/args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// The groups of a plan, as kernels take them. Those of lengths and tables in device memory are found in each call; of
/// another kept plan they stay in device memory as long as the plan lives, or for good once a graph reads them; of any
/// other one in the call's memory.
class DevicePlan {
 public:
  /// The device is the calling thread's. Throws Error if there is no memory, or if the stream is captured for a graph
  /// and the plan is not kept: a graph would read what is gone when it runs.
  DevicePlan(const Problem& problem, const ExecutionPlan& plan, CallMemory& memory, cudaStream_t stream);

  const DeviceGroup* groups() const { return groups_; }

  /// The words of all tiles that have none in the tables, by the number in their runs, null where all have; of_queries:
  /// a word for each query of a tile, else for each key. They are asked for on the stream, to `memory`
  /// (word_workspace), or, of a kept plan, were once.
  /// too_many: becomes 1, on the stream, if they were found on the device and there is not room for all; then there are
  /// none.
  const std::uint64_t* words(bool of_queries, char* memory, std::int32_t* too_many);

 private:
  const Problem& problem_;
  const ExecutionPlan& plan_;
  cudaStream_t stream_;
  std::shared_ptr<void> kept_;
  const DeviceGroup* groups_ = nullptr;
  const unsigned long long* numbered_ = nullptr;  // LateArgs::numbered
};

/// Could entries of a batch have masks of their own, if there were more of them?
bool may_differ_in_batch(const Problem& problem);

/// Bytes of such words, at most.
std::int64_t word_bytes(const Problem& problem, const ExecutionPlan& plan, bool of_queries);

/// Are they linear in the sequences, whatever the rule: at most so many bytes for each batch entry? changes_bits: the
/// kernels that are taken then round otherwise than the others. Sizes alone tell in that case, if masks differ in the
/// batch: results must not depend on what else is in it. Late plans have some for each block, whatever their masks.
bool words_fit(const Problem& problem, const ExecutionPlan& plan, bool of_queries, std::int64_t entry_bytes,
               bool changes_bits);

/// Of these, what a call makes for itself.
std::int64_t word_workspace(const Problem& problem, const ExecutionPlan& plan, bool of_queries);

/// Bytes that a DevicePlan takes in each call.
std::size_t device_bytes(const Problem& problem, const ExecutionPlan& plan);

}  // namespace anyflash::cuda
