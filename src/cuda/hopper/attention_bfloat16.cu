#include "cuda/hopper/attention_kernels.cuh"

namespace anyflash::cuda {
template AttentionKernel attention_kernel<ElementType::bfloat16>(int, AttentionKind);
}
