// Splits float32 rows into bfloat16 terms. Bound by memory: 4 bytes are read and 6 (or 4) written for each number.
#include "cuda/common/errors.h"
#include "cuda/common/split_bf16.cuh"
#include "cuda/hopper/split_bf16.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/rows.cuh"

namespace anyflash::cuda {
namespace {

constexpr int threads = 256;
constexpr float limit = 0x1p40f;  // sums of products of scaled numbers below it do not overflow

/// Numbers that are too large become NaN, so that they are noticed.
[[maybe_unused]] __device__ __forceinline__ float scaled(float x) {
  return fabsf(x) < limit ? x * kSplitScale : __int_as_float(0x7fc00000);
}

/// One thread block for each block of rows.
__global__ void __launch_bounds__(threads) split_rows_kernel(const __grid_constant__ SplitArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  int n = 0;
  while (blockIdx.x >= args.first_block[n + 1]) ++n;
  const auto& tensor = args.tensors[n];
  const auto& rows = tensor.rows;
  const auto at = static_cast<std::int64_t>(blockIdx.x) - args.first_block[n], head = at / tensor.blocks;
  const auto box = box_of(tensor.grid, tensor.plain, static_cast<std::int32_t>(at % tensor.blocks));
  const float* const data =
      reinterpret_cast<const float*>(rows.data) + head / tensor.heads * rows.batch + head % tensor.heads * rows.head;
  const int chunks = args.depth / 8, term = args.depth * 128;  // of 8 channels; bytes of one bfloat16 term of a tile
  char* const to = tensor.to + at * (args.bf16_terms * term);
  const bool along_rows = rows.channel != 1 && rows.sequence[2] == 1;  // neighbouring threads read neighbours
  for (int i = threadIdx.x; i < 64 * chunks; i += threads) {
    const int row = along_rows ? i % 64 : i / chunks, chunk = along_rows ? i / 64 : i % chunks;
    const auto c = entry_of(box, row);
    const auto* const from = data + c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2];
    const int left = rules::inside(c, tensor.grid.size) ? tensor.channels - 8 * chunk : 0;
    float x[8];
    if (rows.vectors && left >= 8) {
      *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(from + 8 * chunk);
      *reinterpret_cast<float4*>(x + 4) = *reinterpret_cast<const float4*>(from + 8 * chunk + 4);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = e < left ? from[(8 * chunk + e) * rows.channel] : 0.0f;
    }
    uint4 bf16_terms[kBf16Terms];
    std::uint32_t (&words)[kBf16Terms][4] = reinterpret_cast<std::uint32_t (&)[kBf16Terms][4]>(bf16_terms);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      split<kBf16Terms>(scaled(x[2 * e]), scaled(x[2 * e + 1]), [&](int p) -> std::uint32_t& { return words[p][e]; });
    char* const place = to + chunk / 8 * 8192 + row * 128 + (chunk % 8 ^ row % 8) * 16;
#pragma unroll
    for (int p = 0; p < kBf16Terms; ++p)
      if (p < args.bf16_terms) *reinterpret_cast<uint4*>(place + p * term) = bf16_terms[p];
  }
#else
  __trap();  // never launched: the host asks no other GPU for it
#endif
}

}  // namespace

SplitArgs split_of(const Problem& problem, const ExecutionPlan& plan, char* memory) {
  SplitArgs args{};
  args.depth = padded_depth(problem), args.bf16_terms = bf16_term_count(problem);
  int n = 0;
  const auto add = [&](const Operand& operand, const Grid& grid, std::int64_t heads, std::int64_t channels) {
    auto& tensor = args.tensors[n];
    tensor.rows = rows_of(problem, operand), tensor.grid = grid, tensor.plain = plain_rows(problem, grid);
    tensor.blocks = static_cast<std::int32_t>(grid.count()), tensor.heads = static_cast<std::int32_t>(heads);
    tensor.channels = static_cast<std::int32_t>(channels);
    if (memory) tensor.to = memory + args.first_block[n] * args.block_bytes();
    args.first_block[n + 1] = args.first_block[n] + problem.batch * heads * tensor.blocks;
    ++n;
  };
  add(problem.q, plan.query_grid, problem.heads_q, problem.d_qk);
  if (problem.direction == Direction::backward) add(problem.dout, plan.query_grid, problem.heads_q, problem.d_v);
  add(problem.k, plan.key_grid, problem.heads_kv, problem.d_qk);
  add(problem.v, plan.key_grid, problem.heads_kv, problem.d_v);
  for (; n < kMostSplitRows; ++n) args.first_block[n + 1] = args.first_block[n];
  return args;
}

void split_rows(SplitArgs args, cudaStream_t stream) {
  const auto blocks = args.first_block[kMostSplitRows];
  if (blocks > 0) launch(reinterpret_cast<const void*>(&split_rows_kernel), blocks, threads, 0, &args, stream);
}

}  // namespace anyflash::cuda
