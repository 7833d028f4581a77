// From a Problem to kernel arguments and launches: shared by forward and backward.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/portable/args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

Rows rows_of(const Problem& problem, const Operand& operand);
Numbers numbers_of(const RowStatistic& statistic);
Numbers numbers_of(const Bias& bias);
Numbers numbers_of(const HeadNumbers& numbers);

/// The padded head size of the problem's kernels: 64, 128 or 256. More channels of v are split over several thread
/// blocks.
int padded_depth(const Problem& problem);

/// Do scores need more than a scale? The scale must be positive in the computation's type, and for 16-bit types in
/// powers of 2 too.
bool is_general(const Problem& problem);

/// May float32 products use fewer bits in this call? Decode calls never do, in either pass.
bool allows_tf32(const Problem& problem);

/// Do the portable kernels compute the call in TF32? Not as the fallback of Hopper's kernels, which are more exact.
bool takes_tf32(const Problem& problem);

/// Are the rows of a grid's blocks consecutive: one dimension, without a step?
bool plain_rows(const Problem& problem, const rules::Grid& grid);

/// Is there no ALiBi, or do the coordinates of a pair differ by query - key + alibi_offset under all masks, exactly in
/// float32? Never by what else is in the batch.
bool alibi_is_linear(const Problem& problem, const ExecutionPlan& plan);
std::int32_t alibi_offset(const ExecutionPlan& plan);

/// Throws Error unless all tensors, and tables declared to be on the device, are on the device.
void check_pointers(const Problem& problem);

/// Throws Error if a call needs more thread blocks than a launch allows.
void check_tasks(double tasks);

/// Allows a kernel its shared memory, once on each device. This also loads the kernel, which may fail: so it comes
/// before a call writes anything.
void allow_shared_memory(const void* function, int bytes, int device);

/// The number of thread blocks for some tasks: one each, or, for a rarely needed launch, as many as run at once.
std::int64_t launched_blocks(std::int64_t tasks, bool rarely_needed, Device device);

/// args: the kernel's argument. early: the kernel may begin before the one before it is done, and waits itself
/// (programmatic dependent launch, from sm_90 on).
void launch(const void* function, std::int64_t blocks, int threads, int shared_bytes, void* args, cudaStream_t stream,
            bool early = false);

}  // namespace anyflash::cuda
