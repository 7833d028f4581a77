// Masks whose lengths and tables are in device memory: found by kernels, in the order of the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/portable/args.h"
#include "plan/plan.h"
#include "problem/problem.h"

namespace anyflash::cuda {

/// An int32 or int64 array of rank 1; data null: none.
struct Integers {
  const char* data;
  bool wide;
  std::int64_t size, stride;

  ANYFLASH_HD std::int64_t at(std::int64_t i) const {
    return wide ? reinterpret_cast<const std::int64_t*>(data)[i * stride]
                : reinterpret_cast<const std::int32_t*>(data)[i * stride];
  }
};

/// Of a tensor in device memory, if it is given.
Integers integers_of(const TensorView& view);

/// The documents of one side, as DocumentSide has them, but for writing.
struct LateSide {
  std::int32_t *segment_of, *document_of;
  rules::Segment* segments;
};

struct LateArgs {
  rules::Program program;                                                      // of batch entry 0, head 0, and all keys
  std::int64_t batch_stride[rules::max_atoms], head_stride[rules::max_atoms];  // of the atoms' data, in bytes
  Integers key_lengths, cu_seqlens[2];
  rules::Grid grids[2];  // of queries, of keys
  Align align;
  bool backward;
  std::int32_t batch_groups, head_groups;
  std::int32_t blocks[2], most_runs;  // of each block; those that are not used have no blocks
  // What is made.
  DeviceGroup* groups;
  rules::Program* programs;
  std::int64_t* starts[2];
  DeviceRun* runs[2];
  LateSide documents[2];
  rules::Axis* axes;
  /// Of each side, how many tiles have been given numbers, as the runs of plans that the host makes have them. Null:
  /// none are.
  unsigned long long* numbered;
};

/// Partial tiles of a side that a call of Hopper's kernels has room for words of; 0: they do not serve such a plan.
/// What lengths alone say hides pairs of few tiles: where documents or lengths end, and along the edges of a rule. If
/// there are more in the end, the portable kernels make all.
std::int64_t late_word_tiles(const Problem& problem, const ExecutionPlan& plan);

/// Describes a call's masks; memory: `bytes` of it, or null where only those are asked for.
LateArgs late_args(const Problem& problem, const ExecutionPlan& plan, char* memory, std::int64_t& bytes);

/// Queues what finds them.
void find_late_masks(const LateArgs& args, cudaStream_t stream);

}  // namespace anyflash::cuda
