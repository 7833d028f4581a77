// The backward pass on Hopper (sm_90a) for 16-bit types (FlashAttention-2, Dao 2023, algorithm 2).
//
// A block of threads takes two neighbouring key blocks of one head, 128 keys, and walks the query blocks that see them,
// kQueries queries at a time, of each query head that shares the key head:
//   S^T = K Q^T;  P^T = exp(S^T - lse), hidden pairs 0;  dV += P^T dO;
//   dP^T = V dO^T;  dS^T = P^T (dP^T - delta);  dK += dS^T Q;  dQ += dS K.
// Keys are rows: each of two warpgroups owns a key block, and P^T and dS^T are operands from its registers. dS goes through
// shared memory too, because a query's dQ is a sum over both: each warpgroup makes half of dQ, one tile late, so that none
// waits for the other, and adds it to float32 sums in global memory, laid out so that a warp adds 512 bytes at a time, in
// no order. A third warpgroup loads, two tiles deep (backward_loader.cuh). Bound by the tensor cores and by shared memory,
// which feeds them.
//
// A hidden row that is not finite makes NaN of its zero P or dS. A result that holds a NaN is reported; the portable kernel
// then makes all of them again, with care.
#pragma once

#include <type_traits>

#include "cuda/hopper/backward_loader.cuh"
#include "cuda/hopper/transposed_products.cuh"

namespace anyflash::cuda {

#ifndef LATE64
#define LATE64 1
#endif
#ifndef LATE128
#define LATE128 0
#endif
#ifndef CR
#define CR 240
#endif
#define PR (504 - 2 * CR)
#ifndef NO_AHEAD
#define NO_AHEAD 1
#endif
template <class Sizes>
class GroupBackwardBlock {
 public:
  using E = typename Sizes::Element;
  using Shared = GroupBackwardShared<Sizes>;
  static constexpr int kDepth = Sizes::kDepth, kQueries = Sizes::kQueries, kKeys = Sizes::kKeys;
  static constexpr int kStages = Sizes::kStages, kScoreBuffers = Sizes::kScoreBuffers, kCells = Sizes::kCells;
  static constexpr bool kLate = kDepth == 64 ? LATE64 : LATE128;
  static constexpr int kQueryTiles = kQueries / 8, kDepthTiles = kDepth / 8;

  __device__ __forceinline__ GroupBackwardBlock(const GroupBackwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {
    const auto& side = args.sides[keys];
    const auto task = static_cast<std::int32_t>(blockIdx.x), pairs = (side.blocks + 1) / 2, head = task / pairs;
    first_block_ = task % pairs * 2;  // under causal rules the first blocks are the longest
    b_ = head / side.heads, key_head_ = head % side.heads;
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) begin_barriers();
    __syncthreads();
    if (threadIdx.x >= 256) {
      give_registers<PR>();
      GroupLoader<Sizes>(args_, shared_, b_, key_head_, first_block_).run();
    } else {
      take_registers<CR>();
      compute();
    }
  }

 private:
  __device__ __forceinline__ void begin_barriers() {
    shared_.keys.begin(128);
    for (int i = 0; i < kStages; ++i) shared_.full[i].begin(128), shared_.empty[i].begin(8);
    for (int i = 0; i < kScoreBuffers; ++i) shared_.scores_full[i].begin(8), shared_.scores_empty[i].begin(8);
    barriers_begun();
  }

  __device__ __forceinline__ static unsigned group() { return threadIdx.x / 128; }
  __device__ __forceinline__ static unsigned lane() { return threadIdx.x % 32; }
  /// This lane's first key; the second is 8 behind it.
  __device__ __forceinline__ static unsigned row() { return threadIdx.x / 32 * 16 + lane() / 4; }

  /// Where 16 columns from c on, c a multiple of 16, of a swizzled tile begin, in the 16 bytes that descriptors count.
  template <int kRows>
  __device__ __forceinline__ static constexpr std::uint64_t columns(int c) {
    return c / 64 * (kRows * 128 / 16) + c % 64 * 2 / 16;
  }
  /// The same of 16 rows.
  __device__ __forceinline__ static constexpr std::uint64_t rows(int r) { return r * 128 / 16; }

  /// c = this warpgroup's rows of `keys` (K or V) times the rows of `queries` (Q or dO).
  __device__ __forceinline__ static void key_products(float (&c)[kQueryTiles][4], std::uint64_t keys, const E* queries) {
    const auto b = describe_tile(queries, 0);
    products_begin();
#pragma unroll
    for (int d = 0; d < kDepth; d += 16)
      multiply<false, false>(c, keys + columns<kKeys>(d), b + columns<kQueries>(d), d > 0, E());
    products_commit();
  }

  /// c += a (P^T or dS^T) times the rows of `queries` (dO or Q).
  __device__ __forceinline__ static void query_products(float (&c)[kDepthTiles][4],
                                                        const std::uint32_t (&a)[kQueries / 16][4], const E* queries) {
    const auto b = describe_tile(queries, kQueries * 128);
    products_begin();
#pragma unroll
    for (int m = 0; m < kQueries / 16; ++m) multiply<true>(c, a[m], b + rows(16 * m), E());
    products_commit();
  }

  /// c = this warpgroup's part of dS K.
  __device__ __forceinline__ void query_gradient(float (&c)[8][4], int buffer) const {
    const E* const part = shared_.ds[buffer] + (kCells == 2 ? group() * kKeys * 64 : 0);
    const auto a = describe_tile(part, 0);
    const auto b = describe_tile(shared_.k + (kCells == 2 ? 0 : group() * kKeys * 64), 0);
    products_begin();
#pragma unroll
    for (int m = 0; m < kKeys / 16; ++m) multiply<true, true>(c, a + rows(16 * m), b + rows(16 * m), m > 0, E());
    products_commit();
  }

  /// tile, cells: as in shared memory.
  __device__ __forceinline__ void add_query_gradient(const float (&c)[8][4], std::int32_t tile,
                                                     std::uint32_t cells) const {
    if (kCells == 2 && !(cells >> group() & 1)) return;
    float* const to = args_.sums + std::int64_t{tile} * (64 * kDepth) + group() * 4096 + threadIdx.x % 128 * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) add_to_memory(to + j * 512, c[j]);
  }

  __device__ __forceinline__ void compute() {
    float s[kQueryTiles][4], grad_k[kDepthTiles][4], grad_v[kDepthTiles][4];
#pragma unroll
    for (int j = 0; j < kDepthTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) grad_k[j][e] = grad_v[j][e] = 0;
    const auto k = describe_tile(shared_.k + group() * 64 * 64, 0), v = describe_tile(shared_.v + group() * 64 * 64, 0);
    shared_.keys.wait(0);
    shared_.full[0].wait(0);
    std::int32_t tile = shared_.tile[0], last_tile = -1;
    std::uint32_t last_cells = 0;
    int stage = 0, buffer = 0, last_buffer = kScoreBuffers - 1;
    unsigned parity = 0, buffer_parity = 0, last_parity = 0;
    if (tile >= 0) {
    key_products(s, k, shared_.q[0]);
    products_wait_for<0>();
    keep(s);
    do {
      float p_gradient[kQueryTiles][4];
      std::uint32_t p[kQueries / 16][4], ds[kQueries / 16][4];
      key_products(p_gradient, v, shared_.dout[stage]);
      probabilities(s, stage);
      pack(p, s);
      if constexpr (!kLate) query_products(grad_v, p, shared_.dout[stage]);
      products_wait_for<kLate ? 0 : 1>();
      keep(p_gradient);
      score_gradients(p_gradient, s, stage);
      pack(ds, p_gradient);
      shared_.scores_empty[buffer].wait(buffer_parity ^ 1);
      store_scores(ds, buffer);
      if constexpr (kLate) query_products(grad_v, p, shared_.dout[stage]);
      query_products(grad_k, ds, shared_.q[stage]);

      float q_gradient[8][4];
#if !NO_WAIT
      products_wait_for<1>();  // dV: its operands' registers are needed
#endif
      if (last_tile >= 0) shared_.scores_full[last_buffer].wait(last_parity);
      query_gradient(q_gradient, last_buffer);

      const std::uint32_t cells = shared_.cells[stage];
      const int next_stage = stage ^ 1;
      const unsigned next_parity = parity ^ (stage == kStages - 1);
      shared_.full[next_stage].wait(next_parity);
      const std::int32_t next_tile = shared_.tile[next_stage];
#if !NO_AHEAD
      products_wait_for<1>();  // dK's operands' registers are needed
      key_products(s, k, shared_.q[next_stage]);  // behind the last tile: of what lies there, for nothing
#endif
      products_wait_for<NO_AHEAD ? 0 : 1>();
      keep(q_gradient);
      if (lane() == 0) {
        shared_.empty[stage].arrive();
        if (last_tile >= 0) shared_.scores_empty[last_buffer].arrive();
      }
      if (last_tile >= 0) add_query_gradient(q_gradient, last_tile, last_cells);
#if NO_AHEAD
      key_products(s, k, shared_.q[next_stage]);  // behind the last tile: of what lies there, for nothing
#endif
      products_wait_for<0>();
      keep(s);
      keep(grad_k);
      keep(grad_v);
      last_tile = tile, last_cells = cells, last_buffer = buffer, last_parity = buffer_parity;
      if (++buffer == kScoreBuffers) buffer = 0, buffer_parity ^= 1;
      tile = next_tile, stage = next_stage, parity = next_parity;
    } while (tile >= 0);
      float q_gradient[8][4];
      shared_.scores_full[last_buffer].wait(last_parity);
      query_gradient(q_gradient, last_buffer);
      products_wait_for<0>();
      keep(q_gradient);
      add_query_gradient(q_gradient, last_tile, last_cells);
    }
    store(grad_k, 0, static_cast<float>(args_.scale));
    store(grad_v, 1, 1.0f);
  }

  /// A score lies above its row's lse by a rounding at most. Where scores are large that may be much: P is 1 then.
  __device__ __forceinline__ static float probability(float x) { return exp2_approximately(x > 0 ? 0.0f : x); }

  /// Scores become P.
  __device__ __forceinline__ void probabilities(float (&s)[kQueryTiles][4], int stage) const {
    const float unit = static_cast<float>(args_.scale) * 1.44269504f;
    const float* const shift = shared_.shift[stage] + 2 * (lane() % 4);
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(shift + 8 * j);
      s[j][0] = probability(fmaf(s[j][0], unit, x.x));
      s[j][1] = probability(fmaf(s[j][1], unit, x.y));
      s[j][2] = probability(fmaf(s[j][2], unit, x.x));
      s[j][3] = probability(fmaf(s[j][3], unit, x.y));
    }
    const std::uint32_t cells = shared_.cells[stage] >> (8 + group());
    if (!cells) return;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      if (!(cells >> 2 * cell & 1)) continue;
      const Word* const words = shared_.words[stage][cell] + row();
      const Word a = words[0] >> (2 * (lane() % 4)), b = words[8] >> (2 * (lane() % 4));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        auto& x = s[8 * cell + j];
        if (!(a >> (8 * j) & 1)) x[0] = 0;
        if (!(a >> (8 * j + 1) & 1)) x[1] = 0;
        if (!(b >> (8 * j) & 1)) x[2] = 0;
        if (!(b >> (8 * j + 1) & 1)) x[3] = 0;
      }
    }
  }

  /// dP becomes dS.
  __device__ __forceinline__ void score_gradients(float (&x)[kQueryTiles][4], const float (&p)[kQueryTiles][4],
                                                  int stage) const {
    const float* const delta = shared_.delta[stage] + 2 * (lane() % 4);
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
      const float2 y = *reinterpret_cast<const float2*>(delta + 8 * j);
      x[j][0] = p[j][0] * (x[j][0] - y.x);
      x[j][1] = p[j][1] * (x[j][1] - y.y);
      x[j][2] = p[j][2] * (x[j][2] - y.x);
      x[j][3] = p[j][3] * (x[j][3] - y.y);
    }
  }

  __device__ __forceinline__ static std::uint32_t pair(float a, float b) {
    if constexpr (std::is_same_v<E, __half>) {
      const __half2 x = __floats2half2_rn(a, b);
      return *reinterpret_cast<const std::uint32_t*>(&x);
    } else {
      const __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
      return *reinterpret_cast<const std::uint32_t*>(&x);
    }
  }

  /// From results of products to operands.
  __device__ __forceinline__ static void pack(std::uint32_t (&to)[kQueries / 16][4], const float (&x)[kQueryTiles][4]) {
#pragma unroll
    for (int m = 0; m < kQueries / 16; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) to[m][n] = pair(x[2 * m + n / 2][n % 2 * 2], x[2 * m + n / 2][n % 2 * 2 + 1]);
  }

  __device__ __forceinline__ void store_scores(const std::uint32_t (&x)[kQueries / 16][4], int buffer) {
    const unsigned row = threadIdx.x / 32 * 16 + lane() % 16, half = lane() / 16;
    E* const to = shared_.ds[buffer] + row * 64;
#pragma unroll
    for (int m = 0; m < kQueries / 16; ++m)
      store_matrices(to + m / 4 * (kKeys * 64) + ((2 * (m % 4) + half) ^ row % 8) * 8, x[m]);
    show_to_products();
    __syncwarp();
    if (lane() == 0) shared_.scores_full[buffer].arrive();
  }

  /// This warpgroup's rows of dK (n = 0) or dV.
  __device__ __forceinline__ void store(const float (&x)[kDepthTiles][4], int n, float factor) const {
    const auto& side = args_.sides[keys];
    const auto block = first_block_ + static_cast<std::int32_t>(group());
    const auto& rows = side.gradients[n];
    if (!rows.data || block >= side.blocks) return;
    float zero = 0;
#pragma unroll
    for (int j = 0; j < kDepthTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) zero += 0 * x[j][e];
    if (zero != zero) *args_.careful = 1;
    E* const data = head_data<E>(rows, b_, key_head_);
    const auto box = box_of(side.grid, side.plain, block);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto c = entry_of(box, row() % 64 + half * 8);
      if (!rules::inside(c, side.grid.size)) continue;
      E* const to = data + c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2];
#pragma unroll
      for (int j = 0; j < kDepthTiles; ++j) {
        const int channel = 8 * j + 2 * (lane() % 4);
        if (channel < args_.channels[n])
          *reinterpret_cast<std::uint32_t*>(to + channel) =
              pair(x[j][2 * half] * factor, x[j][2 * half + 1] * factor);
      }
    }
  }

  const GroupBackwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, key_head_, first_block_;
};

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, 1)
    group_backward_kernel(const __grid_constant__ GroupBackwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  GroupBackwardBlock<Sizes>(args, *reinterpret_cast<GroupBackwardShared<Sizes>*>(memory)).run();
#else
  __trap();  // the host asks no other GPU for it
#endif
}

}  // namespace anyflash::cuda
