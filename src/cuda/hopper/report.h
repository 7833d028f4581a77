// What Hopper's kernels count and report in a call's workspace: which task is next, whether all has to be made again.
#pragma once

#include <cstdint>

namespace anyflash::cuda {

inline constexpr std::int64_t report_bytes = 256;  ///< at most, and all that lies behind stays aligned

}  // namespace anyflash::cuda
