#include "cuda/hopper/decode_kernels.cuh"

namespace anyflash::cuda {

BulkDecodeKernel bulk_decode_kernel_bfloat16(int depth, int rows) {
  return bulk_decode_kernel_of<__nv_bfloat16>(depth, rows);
}

}  // namespace anyflash::cuda
