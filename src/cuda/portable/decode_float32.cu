#include "cuda/portable/decode_kernels.cuh"

namespace anyflash::cuda {

DecodeKernels decode_kernels_float32(DecodeKind kind) { return decode_kernels_of<float>(kind); }

}  // namespace anyflash::cuda
