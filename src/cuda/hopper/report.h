// Counters and flags of Hopper's kernels in a call's workspace: the next task, and whether the fallback has to compute
// all again.
#pragma once

#include <cstdint>

namespace anyflash::cuda {

inline constexpr std::int64_t report_bytes = 256;  ///< an upper bound that keeps what follows aligned

}  // namespace anyflash::cuda
