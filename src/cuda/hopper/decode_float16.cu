#include "cuda/hopper/decode_kernels.cuh"

namespace anyflash::cuda {

BulkDecodeKernel bulk_decode_kernel_float16(int depth, int rows) { return bulk_decode_kernel_of<__half>(depth, rows); }

}  // namespace anyflash::cuda
