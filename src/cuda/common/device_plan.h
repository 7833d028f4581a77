// A plan's masks in device memory: programs with everything that they point to, and runs.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/common/device_masks.h"
#include "cuda/common/memory.h"
#include "cuda/portable/args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// The groups of a plan, as kernels read them. Masks from lengths and tables in device memory are found in
/// each call. A kept plan's other groups stay in device memory as long as the plan lives, or forever once a graph reads
/// them. Those of other plans are in the call's memory.
class DevicePlan {
 public:
  /// The device is the calling thread's. Throws Error if there is no memory, or if the stream is being captured for a
  /// graph and the plan is not kept: the graph would read memory that no longer exists.
  DevicePlan(const Problem& problem, const ExecutionPlan& plan, CallMemory& memory, cudaStream_t stream);

  const DeviceGroup* groups() const { return groups_; }

  /// The mask words of all tiles that have none in the tables, by the number in their runs; null if no tile lacks them.
  /// of_queries: a word for each query of a tile, else for each key. They are evaluated on the stream into `memory`
  /// (word_workspace), or only once for a kept plan.
  /// too_many: becomes 1, on the stream, if masks were found on the GPU and there is not room for all words; then there
  /// are none.
  const std::uint64_t* words(bool of_queries, char* memory, std::int32_t* too_many);

 private:
  const Problem& problem_;
  const ExecutionPlan& plan_;
  cudaStream_t stream_;
  std::shared_ptr<void> kept_;
  const DeviceGroup* groups_ = nullptr;
  const unsigned long long* numbered_ = nullptr;  // DeviceMaskArgs::numbered
  RaggedMask ragged_{};
};

/// Could entries of a larger batch have masks of their own?
bool may_differ_in_batch(const Problem& problem);

/// Maximum bytes of such words.
std::int64_t word_bytes(const Problem& problem, const ExecutionPlan& plan, bool of_queries);

/// Is the size of the words linear in the sequences, whatever the rule: at most entry_bytes for each batch entry?
/// changes_bits: the kernels that would be used then round differently. In that case only sizes decide if masks differ
/// in the batch, because results must not depend on other batch entries. For masks found on the GPU, room is made per
/// block, whatever the masks.
bool words_fit(const Problem& problem, const ExecutionPlan& plan, bool of_queries, std::int64_t entry_bytes,
               bool changes_bits);

/// The part of these bytes that a call allocates for itself.
std::int64_t word_workspace(const Problem& problem, const ExecutionPlan& plan, bool of_queries);

/// Bytes that a DevicePlan allocates in each call.
std::size_t device_bytes(const Problem& problem, const ExecutionPlan& plan);

}  // namespace anyflash::cuda
