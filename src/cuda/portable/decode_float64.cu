#include "cuda/portable/decode_kernels.cuh"

namespace anyflash::cuda {

DecodeKernels decode_kernels_float64(DecodeKind kind) { return decode_kernels_of<double>(kind); }

}  // namespace anyflash::cuda
