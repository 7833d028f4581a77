// One variant of src/cuda/hopper/attention.cuh as a shared library, which run.py builds, checks and times. Macros
// choose the variant: TYPE, HEAD_SIZE, KEYS, WARPGROUPS, STAGES, QUERY_STAGES, MASK, ORDERED.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "cuda/common/driver.h"
#include "cuda/hopper/attention.cuh"
#include "cuda/hopper/kernel.cuh"

using namespace anyflash::cuda;

namespace {

using Traits = AttentionTraits<TYPE, HEAD_SIZE, KEYS, WARPGROUPS, STAGES, QUERY_STAGES, MaskKind::MASK, ORDERED != 0>;

/// Of K and V, that thread blocks at work at a time share in the L2.
constexpr long long kSectionBytes = 32 << 20;

template <class T>
class Block : public Attention<T> {
 public:
  using Attention<T>::Attention;
  using Shared = AttentionShared<T>;
  static constexpr int kThreads = T::kThreads;
};

struct Tensor {
  void* data;
  long long rows, heads, batch, row_stride, head_stride, batch_stride;
};

bool encode(CUtensorMap& map, const Tensor& t, int box_rows) {
  static const auto function = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const cuuint64_t sizes[4] = {HEAD_SIZE, cuuint64_t(t.rows), cuuint64_t(t.heads), cuuint64_t(t.batch)};
  const cuuint64_t strides[3] = {cuuint64_t(t.row_stride) * 2, cuuint64_t(t.head_stride) * 2,
                                 cuuint64_t(t.batch_stride) * 2};
  const cuuint32_t box[4] = {64, cuuint32_t(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  return function(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, t.data, sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

/// Contiguous bshd tensors. counter: two int32 that are 0; the second becomes 1 if a result is not finite. Returns 0,
/// or where it failed.
extern "C" int attention(void* q, void* k, void* v, void* out, float* lse, int* counter, int batch, int heads,
                         int heads_kv, int queries, int keys, int diagonal, double scale, void* stream) {
  AttentionArgs args{};
  const auto bshd = [&](void* data, long long rows, long long h) {
    return Tensor{data, rows, h, batch, h * HEAD_SIZE, HEAD_SIZE, rows * h * HEAD_SIZE};
  };
  if (!encode(args.q, bshd(q, queries, heads), 64) || !encode(args.k, bshd(k, keys, heads_kv), KEYS) ||
      !encode(args.v, bshd(v, keys, heads_kv), KEYS))
    return 1;
  args.out = out, args.lse = lse;
  args.out_row = (long long)heads * HEAD_SIZE, args.out_head = HEAD_SIZE, args.out_batch = args.out_row * queries;
  args.heads = heads, args.group = heads / heads_kv, args.queries = queries, args.keys = keys, args.diagonal = diagonal;
  args.tiles = (queries + Traits::kQueries - 1) / Traits::kQueries;
  args.tasks = args.tiles * heads * batch;
  const long long head_bytes = 4ll * keys * HEAD_SIZE;
  // Sections of equally many heads, so that the last one has tasks enough for all thread blocks.
  const long long all_heads = (long long)heads * batch;
  const long long near = std::min(std::max(kSectionBytes / head_bytes, 1ll) * args.group, all_heads);
  const long long sections = std::max(all_heads / near, 1ll);
  args.section_heads = int((all_heads + sections - 1) / sections + args.group - 1) / args.group * args.group;
  args.next_task = counter, args.not_finite = counter + 1;
  args.scale_log2 = float(scale * 1.4426950408889634);
  const auto kernel = group_kernel<Block<Traits>, AttentionArgs>;
  const int bytes = shared_bytes<Block<Traits>>();
  static const auto allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (allowed != cudaSuccess) return 2;
  static const int sms = [] {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  kernel<<<std::min(args.tasks, sms), Traits::kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError() == cudaSuccess ? 0 : 3;
}
