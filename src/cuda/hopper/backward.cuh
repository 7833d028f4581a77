// The backward pass on Hopper (sm_90a) for 16-bit types (FlashAttention-2, Dao 2023, algorithm 2).
//
// A task is two neighbouring key blocks of one head, 128 keys. A persistent thread block walks the query blocks that
// see them, kQueries queries at a time, for each query head that shares the key head:
//   S^T = K Q^T;  P^T = exp(S^T - lse), hidden pairs 0;  dV += P^T dO;
//   dP^T = V dO^T;  dS^T = P^T (dP^T - delta);  dK += dS^T Q;  dQ += dS K.
// Keys are rows: each of two warpgroups owns a key block, with P^T, dS^T, dK and dV in registers. dS also goes through
// shared memory, because a query's dQ sums over both key blocks. Each warpgroup computes half of dQ, one tile late, so
// that neither waits for the other. The halves are added to float32 sums in global memory, by TMA or (64 channels) from
// registers, in no fixed order. A third warpgroup, the producer, loads two tiles ahead (backward_loader.cuh). If one
// key block sees nothing of a tile, its warpgroup computes only its half of dQ. Bound by the tensor cores, by shared
// memory bandwidth, and by the additions to dQ.
//
// dS of a tile is the bias's gradient there. It is stored from shared memory, or, if the gradient is summed over batch
// entries or heads, added to float32 sums.
//
// A hidden row that is not finite would turn its zero P or dS into NaN. A NaN in a result is reported; the non-finite
// fallback, the portable kernel, then computes all results again.
#pragma once

#include "cuda/hopper/backward_loader.cuh"
#include "cuda/hopper/backward_registers.cuh"

namespace anyflash::cuda {

template <class BlockSizes>
class GroupBackwardBlock {
 public:
  using Sizes = BlockSizes;
  using E = typename Sizes::Element;
  using Shared = GroupBackwardShared<Sizes>;
  static constexpr int kDepth = Sizes::kDepth, kQueries = Sizes::kQueries, kKeys = Sizes::kKeys;
  static constexpr int kStages = Sizes::kStages, kScoreBuffers = Sizes::kScoreBuffers, kCells = Sizes::kCells;
  /// At 64 channels, to save registers, dV's products wait for dS; where scores are general, dP's wait for dV's.
  static constexpr bool kDeferredDv = kDepth == 64 && !Sizes::kGeneral, kEarlyDv = kDepth == 64 && Sizes::kGeneral;
  static constexpr int kQueryTiles = kQueries / 8, kDepthTiles = kDepth / 8, kThreads = Sizes::kThreads;
  /// TMA stores dK and dV. Not where biases use the shared memory that they would be stored from.
  static constexpr bool kByCopies = !Sizes::kGeneral;
  /// In `cells`, shifted right by a warpgroup's number: all pairs of its key block are hidden.
  static constexpr std::uint32_t kAllHidden = kCells == 2 ? 5u << 16 : 1u << 16;

  __device__ __forceinline__ GroupBackwardBlock(const GroupBackwardArgs& args, Shared& shared)
      : args_(args), shared_(shared), group_(uniform(threadIdx.x / 128)) {}

  __device__ __forceinline__ void run() {
    load_and_compute<Sizes>(args_, shared_, [&] { compute(); });
  }

 private:
  __device__ __forceinline__ unsigned group() const { return group_; }
  /// This lane's first key; the second is 8 rows further.
  __device__ __forceinline__ static unsigned row() { return threadIdx.x / 32 * 16 + lane_number() / 4; }

  /// c = this warpgroup's rows of `keys` (K or V) times the rows of `queries` (Q or dO).
  __device__ __forceinline__ static void key_products(float (&c)[kQueryTiles][4], std::uint32_t keys,
                                                      const E* queries) {
    const auto b = describe_tile(queries, 0);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDepth; d += 16)
      wgmma<false, false>(c, keys + columns_from<kKeys>(d), b + columns_from<kQueries>(d), d > 0, E());
    wgmma_commit();
  }

  /// c += a (P^T or dS^T) times the rows of `queries` (dO or Q).
  __device__ __forceinline__ static void query_products(float (&c)[kDepthTiles][4],
                                                        const std::uint32_t (&a)[kQueries / 16][4], const E* queries) {
    const auto b = describe_tile(queries, kQueries * 128);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kQueries / 16; ++m) wgmma<true>(c, a[m], b + rows_from(16 * m), true, E());
    wgmma_commit();
  }

  /// c = this warpgroup's part of dS K.
  __device__ __forceinline__ void query_gradient(float (&c)[8][4], int buffer) const {
    const E* const part = shared_.scores[buffer] + (kCells == 2 ? group() * kKeys * 64 : 0);  // of two panels of keys
    const auto a = describe_tile(part, 0);
    const auto b = describe_tile(shared_.k + (kCells == 2 ? 0 : group() * kKeys * 64), 0);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kKeys / 16; ++m)
      wgmma<false, true>(c, a + columns_from<64>(16 * m), b + rows_from(16 * m), m > 0, E());
    wgmma_commit();
  }

  /// tile, cells: as in shared memory.
  __device__ __forceinline__ void add_query_gradient(const float (&c)[8][4], std::int32_t tile, std::uint32_t cells,
                                                     unsigned parity) const {
    if (Sizes::kStaged) {
      shared_.sums_empty[group()].wait(parity ^ 1);
      float* const to = shared_.sums[group()] + threadIdx.x % 128 * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<float4*>(to + j * 512) = make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
      if (threadIdx.x % 128 == 0) shared_.sums_tile[group()] = tile;
      release(shared_.sums_written[group()]);
      return;
    }
    if (kCells == 2 && !(cells >> group() & 1)) return;
    float* const to = args_.sums + std::int64_t{tile} * (64 * kDepth) + group() * 4096 + threadIdx.x % 128 * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) add_to_memory(to + j * 512, c[j]);
  }

  __device__ __forceinline__ void compute() {
    int stage = 0, buffer = 0, last_buffer = kScoreBuffers - 1;
    unsigned parity = 0, buffer_parity = 0, last_parity = 0, sums_parity = 0;
    const auto k = describe_tile(shared_.k + group() * 64 * 64, 0), v = describe_tile(shared_.v + group() * 64 * 64, 0);
    for (unsigned task = 0;; ++task) {
      shared_.keys_full.wait(task % 2);
      if (uniform(shared_.first_block) < 0) break;
      if (kByCopies && args_.key_gradients_copied && task > 0) shared_.results_read.wait((task - 1) % 2);
      float s[kQueryTiles][4], grad_k[kDepthTiles][4], grad_v[kDepthTiles][4];
#pragma unroll
      for (int j = 0; j < kDepthTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) grad_k[j][e] = grad_v[j][e] = 0;
      shared_.full[stage].wait(parity);
      std::int32_t tile = uniform(shared_.tile[stage]), last_tile = -1;
      std::uint32_t cells = uniform(shared_.cells[stage]), last_cells = 0;
      if (tile >= 0) {
        key_products(s, k, shared_.q[stage]);
        wgmma_wait<0>();
        keep(s);
        do {
          float q_gradient[8][4];
          const int next_stage = stage ^ 1;
          const unsigned next_parity = parity ^ (stage == kStages - 1);
          std::int32_t next_tile;
          std::uint32_t next_cells;
          if ((cells >> group() & kAllHidden) == kAllHidden) {  // dS is 0; all other products are skipped
            shared_.scores_empty[buffer].wait(buffer_parity ^ 1);
            store_no_scores(buffer, tile);
            if (last_tile >= 0) shared_.scores_full[last_buffer].wait(last_parity);
            query_gradient(q_gradient, last_buffer);
            shared_.full[next_stage].wait(next_parity);
            next_tile = uniform(shared_.tile[next_stage]), next_cells = uniform(shared_.cells[next_stage]);
          } else {
            float p_gradient[kQueryTiles][4];
            std::uint32_t p[kQueries / 16][4], ds[kQueries / 16][4];
            if constexpr (Sizes::kGeneral) {  // before any products, because scores need their registers
              weigh_generally(s, p, stage, buffer, tile, cells);
              if constexpr (kEarlyDv) query_products(grad_v, p, shared_.dout[stage]), wgmma_wait<0>();
              key_products(p_gradient, v, shared_.dout[stage]);
            } else {
              key_products(p_gradient, v, shared_.dout[stage]);
              weigh(s, stage, tile, cells);
              pack<E>(p, s);
            }
            if constexpr (kDepth > 64) query_products(grad_v, p, shared_.dout[stage]);
            wgmma_wait<kDepth == 64 ? 0 : 1>();
            keep(p_gradient);
            score_gradients(p_gradient, s, shared_.delta[stage], args_.has_dlse ? shared_.dlse[stage] : nullptr);
            if constexpr (Sizes::kGeneral) {
              if (args_.bias_sums) add_bias_gradient(p_gradient, tile, cells);
            }
            pack<E>(ds, p_gradient);
            shared_.scores_empty[buffer].wait(buffer_parity ^ 1);
            store_scores(ds, buffer, tile);
            if constexpr (kDeferredDv) query_products(grad_v, p, shared_.dout[stage]);
            query_products(grad_k, ds, shared_.q[stage]);

            wgmma_wait<1>();  // dV is done, if not before: its operands' registers are needed
            if (last_tile >= 0) shared_.scores_full[last_buffer].wait(last_parity);
            query_gradient(q_gradient, last_buffer);

            shared_.full[next_stage].wait(next_parity);
            next_tile = uniform(shared_.tile[next_stage]), next_cells = uniform(shared_.cells[next_stage]);
            wgmma_wait<1>();  // dK's operands' registers are needed
          }
          if (next_tile < 0) shared_.values_empty.arrive_for_warp();
          key_products(s, k, shared_.q[next_stage]);  // after the last tile: unused
          wgmma_wait<1>();
          keep(q_gradient);
          release(shared_.empty[stage]);
          if (last_tile >= 0) shared_.scores_empty[last_buffer].arrive_for_warp();
          if (last_tile >= 0) add_query_gradient(q_gradient, last_tile, last_cells, sums_parity), sums_parity ^= 1;
          wgmma_wait<0>();
          keep(s);
          keep(grad_k);
          keep(grad_v);
          last_tile = tile, last_cells = cells, last_buffer = buffer, last_parity = buffer_parity;
          if (++buffer == kScoreBuffers) buffer = 0, buffer_parity ^= 1;
          tile = next_tile, cells = next_cells, stage = next_stage, parity = next_parity;
        } while (tile >= 0);
        float q_gradient[8][4];
        shared_.scores_full[last_buffer].wait(last_parity);
        query_gradient(q_gradient, last_buffer);
        wgmma_wait<0>();
        keep(q_gradient);
        shared_.scores_empty[last_buffer].arrive_for_warp();
        add_query_gradient(q_gradient, last_tile, last_cells, sums_parity), sums_parity ^= 1;
      } else {
        shared_.values_empty.arrive_for_warp();
      }
      const KeyPlace place{shared_.b, shared_.key_head, shared_.first_block + static_cast<std::int32_t>(group()),
                           static_cast<std::int32_t>(row() % 64)};
      release(shared_.keys_empty);
      if (kByCopies && args_.key_gradients_copied) {
        copy_key_gradients(grad_k, grad_v, place, stage, buffer, buffer_parity);
      } else {
        shared_.empty[stage].arrive_for_warp();
        store_key_gradients<E>(grad_k, args_, place, 0, 0, args_.factor);
        store_key_gradients<E>(grad_v, args_, place, 1, 0, 1.0f);
      }
      parity ^= stage == kStages - 1, stage ^= 1;
    }
    if (Sizes::kStaged) {
      shared_.sums_empty[group()].wait(sums_parity ^ 1);
      if (threadIdx.x % 128 == 0) shared_.sums_tile[group()] = -1;
      release(shared_.sums_written[group()]);
    }
    if (threadIdx.x == 0) shared_.done = true;
    release(shared_.scores_written[buffer]);
  }

  /// Turns scores into P.
  __device__ __forceinline__ void weigh(float (&s)[kQueryTiles][4], int stage, std::int32_t tile,
                                        std::uint32_t cells) const {
    probabilities(s, shared_.lse[stage], lse_remainders_of(args_, shared_.any_large_lse, tile, 0), args_.factor);
    cells >>= 8 + group();
    if (!cells) return;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      if (!(cells >> 2 * cell & 1)) continue;
      const bool all = cells >> (8 + 2 * cell) & 1;
      const Word* const words = shared_.words[stage][cell] + row();
      const unsigned first = 2 * (lane_number() % 4);
      hide(reinterpret_cast<float (&)[8][4]>(s[8 * cell]), all ? 0 : words[0] >> first, all ? 0 : words[8] >> first);
    }
  }

  /// The same where scores need more than a scale: s becomes P times the soft cap's derivative, and `p` becomes P.
  __device__ __forceinline__ void weigh_generally(float (&s)[kQueryTiles][4], std::uint32_t (&p)[kQueries / 16][4],
                                                  int stage, int buffer, std::int32_t tile, std::uint32_t cells) const {
    cells >>= group();
    const unsigned first = 2 * (lane_number() % 4);
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      Word a = rules::all_bits, b = a;
      if (cells >> (8 + 2 * cell) & 1) {
        const bool all = cells >> (16 + 2 * cell) & 1;
        const Word* const words = shared_.words[stage][cell] + row();
        a = all ? 0 : words[0] >> first, b = all ? 0 : words[8] >> first;
      }
      const BiasPlace place(args_, tile, cell * 64 + static_cast<int>(first),
                            shared_.first_block * 64 + static_cast<std::int32_t>(row()));
      auto& scores = reinterpret_cast<float (&)[8][4]>(s[8 * cell]);
      auto& packed = reinterpret_cast<std::uint32_t (&)[4][4]>(p[4 * cell]);
      const float* const lse = shared_.lse[stage] + 64 * cell;
      const float* const rest = lse_remainders_of(args_, shared_.any_large_lse, tile, 64 * cell);
      const E* const copied = shared_.scores[buffer] + (2 * cell + group()) * 4096;
      constexpr bool c = Sizes::kCopied;
      args_.cap > 0 ? general_probabilities<E, true, c>(scores, packed, args_, place, copied, 0, lse, rest, a, b)
                    : general_probabilities<E, false, c>(scores, packed, args_, place, copied, 0, lse, rest, a, b);
    }
  }

  __device__ __forceinline__ void store_scores(const std::uint32_t (&x)[kQueries / 16][4], int buffer,
                                               [[maybe_unused]] std::int32_t tile) {
    E* const to = shared_.scores[buffer] + group() * 4096 + score_place();
#pragma unroll
    for (int m = 0; m < kQueries / 16; ++m) store_matrices_transposed(to + m / 4 * (kKeys * 64) + m % 4 * 1024, x[m]);
    if constexpr (Sizes::kGeneral) {
      if (threadIdx.x == 0) shared_.scores_tile[buffer] = tile;
    }
    release(shared_.scores_written[buffer]);
  }
  /// The same with zeros.
  __device__ __forceinline__ void store_no_scores(int buffer, std::int32_t tile) {
    constexpr std::uint32_t zeros[kQueries / 16][4] = {};
    store_scores(zeros, buffer, tile);
  }

  /// ds: of a tile, before rounding.
  __device__ __forceinline__ void add_bias_gradient(const float (&ds)[kQueryTiles][4], std::int32_t tile,
                                                    std::uint32_t cells) const {
    cells >>= 16 + group();
    const auto block = shared_.first_block + static_cast<std::int32_t>(group());
    if (block >= args_.sides[keys].blocks) return;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      if (cells >> 2 * cell & 1) continue;  // all hidden
      float* const to = bias_sums_of(args_, tile, cell, block);
      if (!to) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) add_to_memory(to + threadIdx.x % 128 * 4 + j * 512, ds[8 * cell + j]);
    }
  }

  /// Stores dK and dV by TMA, from shared memory that is free between two tasks. dK uses the stage that signalled the
  /// end, which is released here. dV uses the next score buffer; the second warpgroup's dV uses the one after that.
  __device__ __forceinline__ void copy_key_gradients(const float (&grad_k)[kDepthTiles][4],
                                                     const float (&grad_v)[kDepthTiles][4], const KeyPlace& place,
                                                     int stage, int buffer, unsigned buffer_parity) {
    if (group() == 1 && ++buffer == kScoreBuffers) buffer = 0, buffer_parity ^= 1;
    E* const k = group() == 0 ? shared_.q[stage] : shared_.dout[stage];
    E* const v = shared_.scores[buffer];
    shared_.scores_empty[buffer].wait(buffer_parity ^ 1);
    place_rows(v, grad_v, 1.0f);
    place_rows(k, grad_k, args_.factor);
    fence_proxy_async();
    sync_threads<128>(1 + group());
    if (threadIdx.x % 128 == 0) {
      if (place.block < args_.sides[keys].blocks) {
        const auto origin = origin_of(args_.cuts[keys], place.block);
#pragma unroll
        for (int c = 0; c < kDepth; c += 64) {
          if (c < args_.channels[0] && args_.sides[keys].gradients[0].data)
            store_rows(args_.key_gradient_maps[0], k + c * 64, c, origin, place.key_head, place.b);
          if (c < args_.channels[1] && args_.sides[keys].gradients[1].data)
            store_rows(args_.key_gradient_maps[1], v + c * 64, c, origin, place.key_head, place.b);
        }
        stores_commit();
        stores_read();
      }
      shared_.results_read.arrive();
    }
    release(shared_.empty[stage]);
  }

  /// Writes this warp's rows of a swizzled tile. Reports a NaN or an infinity.
  __device__ __forceinline__ void place_rows(E* to, const float (&x)[kDepthTiles][4], float factor) const {
    const unsigned row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16, half = lane_number() / 16;
    to += row * 64;
    float zero = 0;
#pragma unroll
    for (unsigned m = 0; m < kDepthTiles / 2; ++m) {
      float y[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) zero += 0 * x[2 * m + n][e], y[n][e] = x[2 * m + n][e] * factor;
      std::uint32_t packed[1][4];
      pack<E>(packed, y);
      store_matrices(to + m / 4 * 4096 + ((2 * (m % 4) + half) ^ row % 8) * 8, packed[0]);
    }
    if (zero != zero) *args_.not_finite = 1;
  }

  const GroupBackwardArgs& args_;
  Shared& shared_;
  const unsigned group_;
};

}  // namespace anyflash::cuda
