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

  ANYFLASH_HD const void* address(std::int64_t i) const { return data + i * stride * (wide ? 8 : 4); }
  ANYFLASH_HD std::int64_t at(std::int64_t i) const {
    return wide ? *static_cast<const std::int64_t*>(address(i)) : *static_cast<const std::int32_t*>(address(i));
  }
};

/// A tensor in device memory, if it is given.
Integers integers_of(const TensorView& view);

/// The documents of one side, as in DocumentSide, but writable.
struct DeviceMaskSide {
  std::int32_t *segment_of, *document_of;
  rules::Segment* segments;
};

/// Ids of documents, a row for all batch entries or one for each, and what is found of each row. Segments of both sides
/// are counted together, those of queries first; the keys' count from entries[0] on. A document has the number of its
/// first segment. So numbers have gaps where documents have several segments.
struct DeviceIds {
  Integers of[2];
  std::int64_t batch_stride[2];  // bytes
  std::int32_t rows;             // 0: there are no ids
  bool same;                     // both sides have the same ids: all is found for queries alone
  std::int32_t entries[2], all;  // of a side; of the sides that differ
  std::uint32_t slots;           // of a row's hash table: a power of 2, at least twice `all`
  // All zero at first.
  std::int32_t *counts, *apart;          // (rows, 2): segments. (rows): 1 if a segment has not its document's number
  std::int32_t *slot_segment, *closest;  // (rows, slots): some segment with this id, + 1; `all` - the first one
  std::int32_t* sizes[2];                // (rows, all): entries of a document
  std::int64_t zero_bytes;
  std::int32_t* slot_of;           // (rows, all): of a segment
  rules::DocumentRange* trees[2];  // (rows, 2 * entries)
};

/// A mask that says only that documents are the same, and perhaps which place comes first.
struct RaggedMask {
  enum class Rule { none, full, causal };
  Rule rule;                  ///< none: the mask says something else
  rules::DocumentSide q, k;   ///< for mask words; segment_of null: the program is asked for them
  const std::int32_t* apart;  ///< null, or not 0: documents of several segments, whose words the program has
};

struct DeviceMaskArgs {
  rules::Program program;                                                      // of batch entry 0, head 0, and all keys
  std::int64_t batch_stride[rules::max_atoms], head_stride[rules::max_atoms];  // of the atoms' data, in bytes
  Integers key_lengths, cu_seqlens[2];
  bool same_documents;  // of both sides: the same ids or lengths
  RaggedMask ragged;
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
  DeviceMaskSide documents[2];  // of ids: of the first row
  rules::Axis* axes;
  DeviceIds ids;
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
