#include "cuda/hopper/attention_kernels.cuh"

namespace anyflash::cuda {
template AttentionKernel attention_kernel<ElementType::float16>(int, AttentionKind);
}
