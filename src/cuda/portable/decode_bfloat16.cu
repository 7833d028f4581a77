#include "cuda/portable/decode_kernels.cuh"

namespace anyflash::cuda {

DecodeKernels decode_kernels_bfloat16(DecodeKind kind) { return decode_kernels_of<__nv_bfloat16>(kind); }

}  // namespace anyflash::cuda
