// The forward pass on Hopper (sm_90a; FlashAttention-2, Dao 2023, algorithm 1) for split-bfloat16 float32
// (common/split_bf16.cuh).
//
// A task is two neighbouring query blocks of a head, 64 queries each. Each consumer warpgroup takes one of them and walks
// the key blocks, 64 keys, that it visits:
//   S = Q K^T;  score_mod (scale, soft cap, bias), hidden pairs -inf;  P by the online softmax;  O += P V.
// S, P and O are in registers. So is Q, except at 128 channels: then it is in shared memory. One warp of a producer
// warpgroup loads, also beyond the end of a task. A row's shift lags behind its maximum (portable/softmax.cuh). Bound by
// the tensor cores.
//
// The bfloat16 terms of q, k and v are in the workspace, scaled by 2^16 so that even the smallest float32 has three
// terms. Those of P, made in registers, are scaled too. The sums of a tile leave the tensor cores, which truncate where
// float32 rounds. There are then no registers for the next tile's scores. Results equal the portable kernel's to the
// bit, unless the caller allows TF32: then two terms are used instead of three.
//
// A hidden V that is not finite would turn its zero P into NaN, and values near the end of their type may overflow in a
// sum that is divided last. A result that is not finite is reported; the non-finite fallback, the portable kernel, then
// computes all again.
#pragma once

#include "cuda/hopper/forward_args.h"
#include "cuda/hopper/split_products.cuh"
#include "cuda/portable/scores.cuh"
#include "cuda/portable/softmax.cuh"
#include "cuda/portable/walk.cuh"
#include "cuda/tile/mask_words.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/runs.cuh"
#include "cuda/tile/score_mod.cuh"

namespace anyflash::cuda {

/// terms: bfloat16 terms of a number. general: scores need more than a positive scale.
template <int terms, int depth, bool general, int stages>
struct SplitForwardSizes {
  static constexpr int kTerms = terms, kDepth = depth, kStages = stages;
  static constexpr bool kGeneral = general;
  static constexpr int kBlocks = 2, kThreads = 128 * (kBlocks + 1);  ///< query blocks of a task, a warpgroup each
  static constexpr int kRegisters = 232, kProducerRegisters = 40;
  static constexpr int kBiasBytes = general ? 4 : 0;    ///< of the largest type of a bias
  static constexpr bool kHeld = depth * kTerms <= 192;  ///< Q is in registers
};

template <class Sizes>
struct SplitForwardShared {
  static constexpr int kBlocks = Sizes::kBlocks, kStages = Sizes::kStages;
  static constexpr int kTile = 64 * Sizes::kDepth * Sizes::kTerms;  ///< one term after another
  static constexpr int kBias = 4096 * Sizes::kBiasBytes;
  static constexpr std::int32_t last = 1 << 30;

  alignas(1024) __nv_bfloat16 q[kBlocks][kTile];
  alignas(1024) __nv_bfloat16 k[kStages][kTile];
  alignas(1024) __nv_bfloat16 v[kStages][kTile];
  alignas(kBias > 0 ? 1024 : 16) char bias[kBias > 0 ? kStages : 1][kBias > 0 ? kBlocks : 1][kBias > 0 ? kBias : 16];
  Word words[kStages][kBlocks][64];
  std::int32_t tile[kStages];   ///< bit w: block w of the task visits it; 8 + w: it hides some pairs; or `last`
  alignas(16) std::int32_t b;   ///< the task; aligned, so that it is not read with other barriers' data
  std::int32_t h, first_block;  ///< first_block -1: no more tasks
  Pipeline<1> queries;
  Pipeline<kStages> keys, values;
};

template <class Sizes>
class SplitForwardProducer {
 public:
  using Shared = SplitForwardShared<Sizes>;
  static constexpr int kBlocks = Sizes::kBlocks;
  static constexpr int kBytes = Shared::kTile * 2;  ///< of a tile

  __device__ __forceinline__ SplitForwardProducer(const SplitForwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    std::int32_t task = blockIdx.x;  // first tasks by block number, others from a counter
    for (PipelineState<1> at;; at.advance()) {
      shared_.queries.wait_empty(at);
      if (task >= args_.tasks) {
        if (leads()) shared_.first_block = -1, shared_.queries.full[0].arrive();
        return;
      }
      load_queries(task);
      if (leads()) task = static_cast<std::int32_t>(gridDim.x) + atomicAdd(args_.next_task, 1);
      load_tiles();
      task = uniform(task);
    }
  }

 private:
  __device__ __forceinline__ void load_queries(std::int32_t task) {
    const auto at = place_of_task(args_, task);
    b_ = at.head / args_.heads, h_ = at.head % args_.heads;
    first_block_ = at.part * kBlocks;
    auto& full = shared_.queries.full[0];
    if (leads()) {
      shared_.b = b_, shared_.h = h_, shared_.first_block = first_block_;
      full.arrive_and_expect(sizeof(shared_.q));
    }
    __syncwarp();
    if (const auto w = lane_number(); w < kBlocks) {
      const auto block = min(first_block_ + static_cast<std::int32_t>(w), args_.query_blocks - 1);
      copy_split(shared_.q[w], 0, (std::int64_t{b_} * args_.heads + h_) * args_.query_blocks + block, full);
    }
  }

  __device__ __forceinline__ void load_tiles() {
    const auto key_heads = args_.heads / args_.group_heads, key_head = h_ / args_.group_heads;
    const auto first_key_block = (std::int64_t{b_} * key_heads + key_head) * args_.keys.blocks;
    const auto& list = group_of(args_, b_, h_).keys_of_query_block;
    MergedRuns<kBlocks, 1> runs;
    runs.open(list, first_block_, args_.query_blocks);
    const int bias_copies = Sizes::kGeneral && args_.bias.data ? (args_.bias.type == 2 ? 2 : 1) : 0;
    for (;; at_.advance()) {
      std::int32_t words[1];
      const auto block = runs.find(words);
      const auto visits = __ballot_sync(0xffffffffu, words[0] != runs.hidden);
      const auto partial = __ballot_sync(0xffffffffu, words[0] < runs.hidden);
      auto &keys_full = shared_.keys.full[at_.stage], &values_full = shared_.values.full[at_.stage];
      shared_.keys.wait_empty(at_);
      if (block < 0) break;
      if (leads()) {
        shared_.tile[at_.stage] = static_cast<std::int32_t>(visits | partial << 8);
        keys_full.arrive_and_expect(kBytes + __popc(partial) * 512 + __popc(visits) * bias_copies * 8192);
        copy_split(shared_.k[at_.stage], 1, first_key_block + block, keys_full);
      }
      __syncwarp();
      const auto w = lane_number();
      if (words[0] < runs.hidden)
        copy_bytes(shared_.words[at_.stage][w],
                   words[0] < 0 ? args_.words + std::int64_t{~words[0]} * 64 : list.words + std::int64_t{words[0]} * 64,
                   512, keys_full);
      if constexpr (Sizes::kGeneral) {
        if (bias_copies > 0 && words[0] != runs.hidden) load_bias(w, block, bias_copies, keys_full);
      }
      shared_.values.wait_empty(at_);
      if (leads()) {
        values_full.arrive_and_expect(kBytes);
        copy_split(shared_.v[at_.stage], 2, first_key_block + block, values_full);
      }
    }
    shared_.values.wait_empty(at_);
    if (leads()) {
      shared_.tile[at_.stage] = Shared::last;
      shared_.keys.full[at_.stage].arrive(), shared_.values.full[at_.stage].arrive();
    }
    at_.advance();
  }

  /// Copies a block of q, k or v by its number, laid out as in split_bf16.h.
  __device__ __forceinline__ void copy_split(__nv_bfloat16* to, int n, std::int64_t block, Barrier& full) const {
    copy_bytes(to, args_.bf16_terms[n] + block * kBytes, kBytes, full);
  }
  __device__ __forceinline__ void load_bias(int w, std::int32_t key_block, int copies, Barrier& full) const {
    const auto query = args_.bias.query != 0 ? (first_block_ + w) * 64 : 0;
    for (int n = 0; n < copies; ++n)
      copy_box(shared_.bias[at_.stage][w] + n * 8192, &args_.bias_map, key_block * 64 + n * 32, query,
               args_.bias.head != 0 ? h_ : 0, args_.bias.batch != 0 ? b_ : 0, 0, full);
  }
  __device__ __forceinline__ static bool leads() { return lane_number() == 0; }

  const SplitForwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, h_, first_block_;
  PipelineState<Sizes::kStages> at_;
};

template <class BlockSizes>
class SplitForward {
 public:
  using Sizes = BlockSizes;
  using Shared = SplitForwardShared<Sizes>;
  static constexpr int kDepth = Sizes::kDepth, kTerms = Sizes::kTerms, kThreads = Sizes::kThreads;
  static constexpr int kTiles = 8;            ///< of 8 keys, or of 8 channels of a part
  static constexpr int kParts = kDepth / 64;  ///< of O, by channels
  static constexpr bool kHeld = Sizes::kHeld;
  static constexpr int kTermSize = 64 * kDepth;  ///< numbers of one bfloat16 term of a tile

  __device__ __forceinline__ SplitForward(const SplitForwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    constexpr int kConsumers = 128 * Sizes::kBlocks;
    if (threadIdx.x == 0) {
      shared_.queries.init(kConsumers / 32), shared_.keys.init(kConsumers / 32), shared_.values.init(kConsumers / 32);
      barriers_begun();
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      setmaxnreg_dec<Sizes::kProducerRegisters>();
      if (threadIdx.x < kConsumers + 32) SplitForwardProducer<Sizes>(args_, shared_).run();
      return;
    }
    setmaxnreg_inc<Sizes::kRegisters>();
    for (PipelineState<1> at;; at.advance()) {
      shared_.queries.wait_full(at);
      b_ = shared_.b, h_ = shared_.h, block_ = shared_.first_block + static_cast<std::int32_t>(warpgroup());
      if (shared_.first_block < 0) break;
      if constexpr (kHeld) load_queries(), shared_.queries.release(at);
      attend();
      if constexpr (!kHeld) shared_.queries.release(at);
      store();
    }
  }

 private:
  using Scores = AccumulatorTile<64>;
  using Weights = SplitOperand<kTerms>;

  __device__ __forceinline__ static unsigned warpgroup() { return threadIdx.x / 128; }
  __device__ __forceinline__ static float infinity() { return cuda::infinity<float>(); }

  __device__ __forceinline__ void load_queries() {
    const unsigned row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16, half = lane_number() / 16;
    const __nv_bfloat16* const from = shared_.q[warpgroup()] + row * 64;
#pragma unroll
    for (unsigned m = 0; m < kTerms * kDepth / 16; ++m)
      load_matrices(q_[m], from + m / 4 * 4096 + ((2 * (m % 4) + half) ^ row % 8) * 8);
  }

  // --- The walk over the keys ----------------------------------------------------------------------------------------

  __device__ __forceinline__ void attend() {
    rows_.shift[0] = rows_.shift[1] = rows_.largest[0] = rows_.largest[1] = -infinity();
    rows_.sum[0] = rows_.sum[1] = 0;
    sees_ = 0;
#pragma unroll
    for (int n = 0; n < kParts; ++n) clear(o_[n]);
    for (;; at_.advance()) {
      shared_.keys.wait_full(at_);
      const std::int32_t tile = shared_.tile[at_.stage];
      if (!(tile >> warpgroup() & 1)) {  // not this query block's, or the end
        shared_.keys.release(at_);
        shared_.values.wait_full(at_);  // so that no stage is released twice in one phase
        shared_.values.release(at_);
        if (tile != Shared::last) continue;
        at_.advance();
        return;
      }
      Scores s;
      Weights p;
      score_products(s);
      finish(s, tile);
      split_operand(p, s.x, kSplitScale);
      shared_.values.wait_full(at_);
      add_values(p);
      shared_.values.release(at_);
    }
  }

  /// Q K^T, in chains of 64 channels; with three terms to the bit as SplitProducts of the portable kernels.
  __device__ __forceinline__ void score_products(Scores& s) const {
    constexpr int kChains = kDepth / kSplitChain;
    SplitSums sums[kChains];
    const auto b = describe_tile(shared_.k[at_.stage], 0);
    wgmma_fence();
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain)
      issue_products<kTerms>(sums[chain], [&](SplitSums::Tile& sum, int first, int second, int m, bool adds) {
        multiply_terms(sum, first, second, chain * (kSplitChain / 16) + m, b, adds);
      });
    wgmma_commit();
    wgmma_wait<0>();
    join(s.x, sums[0]);
#pragma unroll
    for (int chain = 1; chain < kChains; ++chain) add(s.x, sums[chain]);
  }
  /// Channels from 16m on of one bfloat16 term of Q and one of K.
  __device__ __forceinline__ void multiply_terms(float (&s)[kTiles][4], int first, int second, int m,
                                                 std::uint32_t keys, bool sum) const {
    const auto b = keys + second * (kTermSize * 2 / 16) + columns_from<64>(16 * m);
    if constexpr (kHeld) {
      wgmma<false>(s, q_[first * (kDepth / 16) + m], b, sum, __nv_bfloat16());
    } else {
      const auto a = describe_tile(shared_.q[warpgroup()] + first * kTermSize, 0) + columns_from<64>(16 * m);
      wgmma<false, false>(s, a, b, sum, __nv_bfloat16());
    }
  }
  /// O += P V.
  __device__ __forceinline__ void add_values(const Weights& p) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      SplitSums sums;
      const auto b = describe_tile(shared_.v[at_.stage] + part * 4096, 64 * 128);
      wgmma_fence();
      issue_products<kTerms>(sums, [&](SplitSums::Tile& sum, int first, int second, int m, bool adds) {
        wgmma<true>(sum, p[first][m], b + second * (kTermSize * 2 / 16) + rows_from(16 * m), adds, __nv_bfloat16());
      });
      wgmma_commit();
      wgmma_wait<0>();
      add(o_[part], sums);
    }
  }

  // --- From products to P --------------------------------------------------------------------------------------------

  __device__ __forceinline__ void finish(Scores& s, std::int32_t tile) {
    const int stage = at_.stage;
    if constexpr (Sizes::kGeneral) {
      apply_score_mod(s, args_.factor, args_.cap, args_.cap_inverse);
      if (args_.bias.data)
        add_bias<Sizes::kBiasBytes>(s, shared_.bias[stage][warpgroup()], args_.bias.type, args_.bias.query == 0,
                                    static_cast<int>(row_of_lane()));
    }
    if (tile >> (8 + warpgroup()) & 1) {
      const Word* const words = shared_.words[stage][warpgroup()] + row_of_lane();
      apply_mask(s, [&](int r, int) {
        if (words[8 * r]) sees_ |= 1u << r;
        return words[8 * r];
      });
    } else {
      sees_ = 3;
    }
    shared_.keys.release(at_);
    softmax_step(s);
  }

  /// S becomes P, and O is rescaled.
  __device__ __forceinline__ void softmax_step(Scores& s) {
    const auto rescale = [&](int r, float factor) {
#pragma unroll
      for (int n = 0; n < kParts; ++n)
#pragma unroll
        for (int j = 0; j < kTiles; ++j) o_[n][j][2 * r] *= factor, o_[n][j][2 * r + 1] *= factor;
    };
    rows_.template step<2 * kTiles>([&](int r, int n) -> float& { return s.at(r, n); }, rescale, SoftmaxTerms{args_});
  }
  struct SoftmaxTerms {
    const SplitForwardArgs& args;
    __device__ __forceinline__ float scale() const { return Sizes::kGeneral ? 1.0f : args.factor; }
    __device__ __forceinline__ float unit() const { return args.unit32; }
    __device__ __forceinline__ float lag() const { return args.lag32; }
  };
  __device__ __forceinline__ float scale() const { return SoftmaxTerms{args_}.scale(); }

  // --- The end of a task ---------------------------------------------------------------------------------------------

  /// The epilogue: the sink, the division, the statistics that the caller asked for.
  __device__ __forceinline__ void store() {
    float zero = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = quad_largest(rows_.largest[r]), sum = quad_sum(rows_.sum[r]), change = 1;
      if (sum != 0 && rows_.shift[r] != largest) change = expf((rows_.shift[r] - largest) * scale()), sum *= change;
      largest *= scale();
      if (args_.sink.data && sees_ >> r & 1) {
        const float sink = read_number<float>(args_.sink, h_ * args_.sink.head), together = fmaxf(largest, sink);
        if (together != -infinity() || sink != sink) {
          const float lower = expf(largest - together);
          change *= lower;
          sum = sum * lower + expf(sink - together);
          largest = together;
        }
      }
      zero += 0 * sum;
      if (sum != sum && largest != infinity()) largest = sum;  // a NaN among the scores, which comparisons ignore
      divide(r, change, sum);
      store_statistics(static_cast<int>(row_of_lane()) + 8 * r, largest, sum);
    }
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) zero += 0 * o_[n][j][e];
    if (zero != zero) *args_.not_finite = 1;
    store_rows();
  }

  /// Divides row r of a result in bfloat16 terms.
  __device__ __forceinline__ void divide(int r, float factor, float sum) {
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          float& x = o_[n][j][e];
          x = sum == 0 ? 0.0f : x * (1.0f / (kSplitScale * kSplitScale)) * factor / sum;
        }
  }
  __device__ __forceinline__ void store_rows() const {
    if (block_ >= args_.query_blocks) return;
    const auto& rows = args_.out;
    float* const data = reinterpret_cast<float*>(rows.data) + b_ * rows.batch + h_ * rows.head;
    const rules::Box box{origin_of(args_.queries, block_), args_.query_grid.extent, args_.query_grid.step};
#pragma unroll
    for (int n = 0; n < kParts; ++n)
      store_float_rows(o_[n], rows, data + n * 64 * rows.channel, args_.d_v - n * 64, box, args_.query_grid.size,
                       static_cast<int>(row_of_lane()), 1.0f, args_.not_finite);
  }

  __device__ __forceinline__ void store_statistics(int row, float largest, float sum) const {
    if (lane_number() % 4 != 0 || block_ >= args_.query_blocks || !args_.wants_statistics()) return;
    const auto& grid = args_.query_grid;
    const auto c = entry_of({origin_of(args_.queries, block_), grid.extent, grid.step}, row);
    if (!rules::inside(c, grid.size)) return;
    const auto at = rules::flat_index(c, grid.size);
    const auto store = [&](const Numbers& to, float x) {
      if (to.data) reinterpret_cast<float*>(to.data)[b_ * to.batch + h_ * to.head + at * to.query] = x;
    };
    const bool empty = sum == 0;  // it sees no key, or only keys with a score of -inf, and has no sink above that
    store(args_.row_max, empty ? -infinity() : largest);
    store(args_.row_sum, sum);
    store(args_.lse, empty ? -infinity() : largest + logf(sum));
  }

  const SplitForwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, h_, block_;
  PipelineState<Sizes::kStages> at_;
  std::uint32_t q_[kHeld ? kTerms * kDepth / 16 : 1][4];
  OnlineSoftmax<float, float, 2> rows_;
  unsigned sees_;  // bit r: row r sees a key
  float o_[kParts][kTiles][4];
};

}  // namespace anyflash::cuda
