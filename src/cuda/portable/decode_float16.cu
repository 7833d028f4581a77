#include "cuda/portable/decode_kernels.cuh"

namespace anyflash::cuda {

DecodeKernels decode_kernels_float16(DecodeKind kind) { return decode_kernels_of<__half>(kind); }

}  // namespace anyflash::cuda
