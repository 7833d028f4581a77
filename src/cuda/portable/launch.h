// From a Problem to what kernels are given, and to their launch: what forward and backward have in common.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/portable/args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

Rows rows_of(const Problem& problem, const Operand& operand);
Numbers numbers_of(const RowStatistic& statistic);
Numbers numbers_of(const Bias& bias);
Numbers numbers_of(const HeadNumbers& numbers);

/// The head size of the kernels that the problem takes: 64, 128 or 256; more channels of v are the work of several
/// blocks.
int padded_depth(const Problem& problem);

/// May float32 keep fewer bits in this call? The forward pass of few queries keeps all, and so does their backward one.
bool allows_tf32(const Problem& problem);

/// Do the portable kernels take it as TF32? Not beside Hopper's, which are more exact: they make calls again.
bool takes_tf32(const Problem& problem);

/// Are a grid's blocks plain rows: of a sequence of one dimension, without a step?
bool plain_rows(const Problem& problem, const rules::Grid& grid);

/// Throws Error unless all tensors, and tables that are said to be, are on the device.
void check_pointers(const Problem& problem);

/// Throws Error if a call is more blocks than a launch takes.
void check_tasks(double tasks);

/// Lets a kernel have its shared memory; asked for once on each device. That loads the kernel, too, which may fail: so
/// it comes before a call writes anything.
void allow_shared_memory(const void* function, int bytes, int device);

/// Blocks of threads for some tasks: one each, or, of a launch that is rarely needed, as many as run at once.
std::int64_t launched_blocks(std::int64_t tasks, bool rarely_needed, Device device);

/// args: what the kernel is given. early: it may begin before the kernel in front of it is done, and waits itself (from
/// sm_90 on).
void launch(const void* function, std::int64_t blocks, int threads, int shared_bytes, void* args, cudaStream_t stream,
            bool early = false);

}  // namespace anyflash::cuda
