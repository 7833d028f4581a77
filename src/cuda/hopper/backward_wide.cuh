// The backward pass on Hopper (sm_90a) for 16-bit types and head sizes up to 256; backward.cuh describes the algorithm.
//
// The gradients of 64 keys fill the registers of two warpgroups: each owns 128 channels of dK and dV, and so needs all
// of P and dS. Each computes half of them, from the scores of 32 queries, and they exchange the halves through shared
// memory, which holds two tiles of them. So the warpgroups run in step. To keep the tensor cores busy, the next tile's
// scores are issued before this tile's gradients are done. A third warpgroup is the producer (backward_loader.cuh).
// Bound by the additions to dQ's sums, twice as many per operation as at smaller head sizes, and by shared memory.
#pragma once

#include "cuda/hopper/backward_loader.cuh"
#include "cuda/hopper/backward_registers.cuh"

namespace anyflash::cuda {

template <class BlockSizes>
class WideBackwardBlock {
 public:
  using Sizes = BlockSizes;
  using E = typename Sizes::Element;
  using Shared = GroupBackwardShared<Sizes>;
  static constexpr int kDepth = Sizes::kDepth, kQueries = Sizes::kQueries, kKeys = Sizes::kKeys;
  static constexpr int kThreads = Sizes::kThreads;
  static constexpr int kTiles = 4;          ///< of 8 queries, of half a tile's scores
  static constexpr int kChannelTiles = 16;  ///< of 8 channels, of half the head size

  __device__ __forceinline__ WideBackwardBlock(const GroupBackwardArgs& args, Shared& shared)
      : args_(args), shared_(shared), group_(uniform(threadIdx.x / 128)) {}

  __device__ __forceinline__ void run() {
    load_and_compute<Sizes>(args_, shared_, [&] { compute(); });
  }

 private:
  using Scores = float[kTiles][4];
  using Packed = std::uint32_t[kTiles / 2][4];
  using Gradient = float[kChannelTiles][4];

  __device__ __forceinline__ unsigned group() const { return group_; }

  __device__ __forceinline__ void compute() {
    unsigned count = 0, made = 0;  // stages and score buffers so far; the end of a task takes a stage too
    for (unsigned task = 0;; ++task) {
      shared_.keys_full.wait(task % 2);
      if (uniform(shared_.first_block) < 0) break;
      Scores p, ds;
      Packed packed;  // P, if p holds more than that
      Gradient grad_k, grad_v;
      clear(grad_k);
      clear(grad_v);
      shared_.full[count % 2].wait(count / 2 % 2);
      std::int32_t tile = uniform(shared_.tile[count % 2]);
      if (tile >= 0) {
        Scores more_p, more_ds;
        score_products(p, more_p, shared_.k, shared_.q[count % 2]);
        score_products(ds, more_ds, shared_.v, shared_.dout[count % 2]);
        wgmma_wait<0>();
        add(p, more_p), add(ds, more_ds);
        weigh(p, packed, count % 2, made % 2, tile);
        for (; tile >= 0; ++count, ++made) {
          const unsigned stage = count % 2, next = stage ^ 1, buffer = made % 2;
          score_gradients(ds, p, stage);
          if constexpr (Sizes::kGeneral) {
            if (args_.bias_sums) add_bias_gradient(ds, tile);
            if (threadIdx.x == 0) shared_.scores_tile[buffer] = tile;
          }
          if constexpr (!Sizes::kGeneral) pack<E>(packed, p);
          store_weights(shared_.scores[buffer], packed);
          pack<E>(packed, ds);
          store_gradients(shared_.scores[buffer] + Sizes::kGradients, packed);
          release(shared_.scores_written[buffer]);
          shared_.scores_full[buffer].wait(made / 2 % 2);
          Gradient grad_q;
          query_gradient(grad_q, buffer);
          key_gradient<false>(grad_v, shared_.scores[buffer], shared_.dout[stage]);
          key_gradient<true>(grad_k, shared_.scores[buffer] + Sizes::kGradients, shared_.q[stage]);
          wgmma_wait<2>();
          keep(grad_q);
          add_query_gradient(grad_q, tile);
          shared_.full[next].wait((count + 1) / 2 % 2);
          tile = uniform(shared_.tile[next]);
          // After the last tile this multiplies stale data, and the result is not used.
          score_products(p, more_p, shared_.k, shared_.q[next]);
          score_products(ds, more_ds, shared_.v, shared_.dout[next]);
          wgmma_wait<2>();
          keep(grad_v), keep(grad_k);
          shared_.empty[stage].arrive_for_warp();
          // The producer, which loads a bias there, waits for it.
          if (Sizes::kCopied && args_.bias_copied) shared_.scores_empty[buffer].arrive_for_warp();
          wgmma_wait<1>();
          add(p, more_p);
          weigh(p, packed, next, buffer ^ 1, tile);
          wgmma_wait<0>();
          add(ds, more_ds);
        }
      }
      const KeyPlace place{shared_.b, shared_.key_head, shared_.first_block, static_cast<std::int32_t>(row_of_lane())};
      release(shared_.empty[count % 2]), shared_.keys_empty.arrive_for_warp();
      ++count;
      store_key_gradients<E>(grad_k, args_, place, 0, group() * 128, args_.factor);
      store_key_gradients<E>(grad_v, args_, place, 1, group() * 128, 1.0f);
    }
    if (threadIdx.x == 0) shared_.done = true;
    release(shared_.scores_written[made % 2]);
  }

  /// c + rest = K or V times this warpgroup's 32 rows of Q or dO. In two chains, as in the forward pass (products.cuh).
  __device__ __forceinline__ void score_products(Scores& c, Scores& rest, const E* keys, const E* queries) const {
    const auto a = describe_tile(keys, 0), b = describe_tile(queries + group() * 32 * 64, 0);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDepth; d += 16)
      wgmma<false, false>(d < kDepth / 2 ? c : rest, a + columns_from<kKeys>(d), b + columns_from<kQueries>(d),
                          d % (kDepth / 2) > 0, E());
    wgmma_commit();
  }
  __device__ __forceinline__ static void add(Scores& c, Scores& rest) {
    keep(c), keep(rest);
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[j][e] += rest[j][e];
  }

  /// c += P^T times this warpgroup's channels of dO, or dS (not transposed in shared memory) transposed times those of
  /// Q.
  template <bool kTransposed>
  __device__ __forceinline__ void key_gradient(Gradient& c, const E* scores, const E* queries) const {
    const auto a = describe_tile(scores, 0), b = describe_tile(queries + group() * 2 * kQueries * 64, kQueries * 128);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kQueries; m += 16)
      wgmma<kTransposed, true>(c, a + (kTransposed ? rows_from(m) : columns_from<kKeys>(m)), b + rows_from(m), true,
                               E());
    wgmma_commit();
  }

  /// c = dS times this warpgroup's channels of K.
  __device__ __forceinline__ void query_gradient(Gradient& c, unsigned buffer) const {
    const auto a = describe_tile(shared_.scores[buffer] + Sizes::kGradients, 0);
    const auto b = describe_tile(shared_.k + group() * 2 * kKeys * 64, kKeys * 128);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kKeys; m += 16)
      wgmma<false, true>(c, a + columns_from<kQueries>(m), b + rows_from(m), m > 0, E());
    wgmma_commit();
  }

  __device__ __forceinline__ void add_query_gradient(const Gradient& c, std::int32_t tile) const {
    float* const to = args_.sums + std::int64_t{tile} * (64 * kDepth) + group() * 8192 + threadIdx.x % 128 * 4;
#pragma unroll
    for (int j = 0; j < kChannelTiles; ++j) add_to_memory(to + j * 512, c[j]);
  }

  /// Turns scores into P; where they need more than a scale, into P times the soft cap's derivative, and `packed` into
  /// P.
  __device__ __forceinline__ void weigh(Scores& s, [[maybe_unused]] Packed& packed, unsigned stage,
                                        [[maybe_unused]] unsigned buffer, [[maybe_unused]] std::int32_t tile) {
    const bool partial = shared_.cells[stage] >> 8;  // a tile with one key block is never visited if all is hidden
    const Word* const words = shared_.words[stage][0] + row_of_lane();
    const unsigned first = group() * 32 + 2 * (lane_number() % 4);
    const float* const lse = shared_.lse[stage] + group() * 32;
    if constexpr (Sizes::kGeneral) {
      if (tile < 0) return;
      const BiasPlace place(args_, tile, static_cast<int>(first),
                            shared_.first_block * 64 + static_cast<std::int32_t>(row_of_lane()));
      const E* const copied = shared_.scores[buffer] + Sizes::kGradients;
      const auto first_query = static_cast<int>(group() * 32);
      const Word a = partial ? words[0] >> first : rules::all_bits, b = partial ? words[8] >> first : rules::all_bits;
      constexpr bool c = Sizes::kCopied;
      const float* const rest = lse_remainders_of(args_, shared_.any_large_lse, tile, first_query);
      args_.cap > 0 ? general_probabilities<E, true, c>(s, packed, args_, place, copied, first_query, lse, rest, a, b)
                    : general_probabilities<E, false, c>(s, packed, args_, place, copied, first_query, lse, rest, a, b);
    } else {
      probabilities(s, lse, lse_remainders_of(args_, shared_.any_large_lse, max(tile, 0), group() * 32), args_.factor);
      if (partial) hide(s, words[0] >> first, words[8] >> first);
    }
  }
  /// Turns dP into dS.
  __device__ __forceinline__ void score_gradients(Scores& x, const Scores& p, unsigned stage) const {
    cuda::score_gradients(x, p, shared_.delta[stage] + group() * 32,
                          args_.has_dlse ? shared_.dlse[stage] + group() * 32 : nullptr);
  }

  /// This warpgroup's half of P^T.
  __device__ __forceinline__ void store_weights(E* to, const Packed& a) const {
    const unsigned row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16, half = lane_number() / 16;
#pragma unroll
    for (unsigned m = 0; m < kTiles / 2; ++m)
      store_matrices(to + row * 64 + ((4 * group() + 2 * m + half) ^ row % 8) * 8, a[m]);
  }
  /// This warpgroup's half of dS.
  __device__ __forceinline__ void store_gradients(E* to, const Packed& a) const {
    to += group() * 2048 + score_place();
#pragma unroll
    for (unsigned m = 0; m < kTiles / 2; ++m) store_matrices_transposed(to + m * 1024, a[m]);
  }

  /// ds: of a tile, before rounding.
  __device__ __forceinline__ void add_bias_gradient(const Scores& ds, std::int32_t tile) const {
    float* const to = bias_sums_of(args_, tile, 0, shared_.first_block) + group() * 2048 + threadIdx.x % 128 * 4;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) add_to_memory(to + j * 512, ds[j]);
  }

  const GroupBackwardArgs& args_;
  Shared& shared_;
  const unsigned group_;
};

}  // namespace anyflash::cuda
