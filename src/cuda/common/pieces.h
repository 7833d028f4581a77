// float32 in pieces of bfloat16: what the host has to know of pieces.cuh.
#pragma once

namespace anyflash::cuda {

inline constexpr int kPieces = 3;               ///< of a number
inline constexpr int kTf32Pieces = 2;           ///< the same where the caller allows TF32
inline constexpr float kPieceScale = 65536.0f;  ///< 2^16 times as large the smallest float32 has its pieces to the bit

}  // namespace anyflash::cuda
