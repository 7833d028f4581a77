#include "cuda/hopper/decode_kernels.cuh"

namespace anyflash::cuda {
template BulkDecodeKernel bulk_decode_kernel<ElementType::bfloat16>(int, int, bool, bool);
}
