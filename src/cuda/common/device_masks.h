// Masks whose lengths and tables are in device memory: kernels find them in the call, in
// stream order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/portable/args.h"
#include "plan/plan.h"
#include "problem/problem.h"

namespace anyflash::cuda {

/// An int32 or int64 array of rank 1; data null: not given.
struct Integers {
  const char* data;
  bool wide;
  std::int64_t size, stride;

  ANYFLASH_HD std::int64_t at(std::int64_t i) const {
    return wide ? reinterpret_cast<const std::int64_t*>(data)[i * stride]
                : reinterpret_cast<const std::int32_t*>(data)[i * stride];
  }
};

/// A tensor in device memory, if it is given.
Integers integers_of(const TensorView& view);

/// The documents of one side, as in DocumentSide, but writable.
struct DeviceMaskSide {
  std::int32_t *segment_of, *document_of;
  rules::Segment* segments;
};

struct DeviceMaskArgs {
  rules::Program program;                                                      // of batch entry 0, head 0, and all keys
  std::int64_t batch_stride[rules::max_atoms], head_stride[rules::max_atoms];  // of the atoms' data, in bytes
  Integers key_lengths, cu_seqlens[2];
  rules::Grid grids[2];  // of queries, of keys
  Align align;
  bool backward;
  std::int32_t batch_groups, head_groups;
  std::int32_t blocks[2], most_runs;  // per block; unused sides have no blocks
  // The results.
  DeviceGroup* groups;
  rules::Program* programs;
  std::int64_t* starts[2];
  DeviceRun* runs[2];
  DeviceMaskSide documents[2];
  rules::Axis* axes;
  /// For each side, the number of tiles numbered so far, as in runs made by the host. Null: tiles are not numbered.
  unsigned long long* numbered;
};

/// The number of partial tiles of a side for whose mask words a call of Hopper's kernels has room; 0: they do not
/// support such a plan. Lengths hide pairs of only few tiles: where documents or lengths end, and along the edges of a
/// rule. If there are more such tiles, the portable kernels compute everything.
std::int64_t device_mask_tiles(const Problem& problem, const ExecutionPlan& plan);

/// The arguments for a call's masks. memory: `bytes` of it, or null if only `bytes` is wanted.
DeviceMaskArgs device_mask_args(const Problem& problem, const ExecutionPlan& plan, char* memory, std::int64_t& bytes);

/// Queues the kernels that find the masks.
void find_device_masks(const DeviceMaskArgs& args, cudaStream_t stream);

}  // namespace anyflash::cuda
