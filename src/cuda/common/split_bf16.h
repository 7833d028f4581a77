// Split-bfloat16 float32 (split_bf16.cuh): what the host needs to know.
#pragma once

namespace anyflash::cuda {

inline constexpr int kBf16Terms = 3;            ///< bfloat16 terms of a number
inline constexpr int kTf32Terms = 2;            ///< the same where the caller allows TF32
inline constexpr float kSplitScale = 65536.0f;  ///< so scaled, even the smallest float32 splits exactly

}  // namespace anyflash::cuda
