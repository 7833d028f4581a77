// float32 in pieces of bfloat16: what the host has to know of pieces.cuh.
#pragma once

namespace anyflash::cuda {

inline constexpr int kPieces = 3;
inline constexpr float kPieceScale = 65536.0f;  ///< 2^16 times as large the smallest float32 has its pieces to the bit

}  // namespace anyflash::cuda
