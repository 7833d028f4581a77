// The forward pass on Hopper (sm_90a; FlashAttention-2, Dao 2023, algorithm 1) for split-bfloat16 float32
// (common/split_bf16.cuh), and for 16-bit types where attention.cuh is slower: boxes, and at 64 channels
// query blocks that visit few keys.
//
// A task is two or three neighbouring query blocks of a head, 64 queries each. Each consumer warpgroup takes one of
// them and walks the key blocks, 64 keys, that it visits:
//   S = Q K^T;  score_mod (scale, soft cap, bias), hidden pairs -inf;  P by the online softmax;  O += P V.
// S, P and O are in registers. So is Q, except at head sizes over 128, or at 128 in float32: then it is in shared
// memory. During O += P V the next tile's scores become exponentials, and the warpgroups hide each other's latency. One
// warp of a producer warpgroup loads, also beyond the end of a task (forward_loader.cuh). A row's shift lags behind its
// maximum (portable/softmax.cuh). Bound by the tensor cores, and at 64 channels by the exponentials too.
//
// In float32 the bfloat16 terms of q, k and v are in the workspace, scaled by 2^16 so that even the smallest float32
// has three terms. Those of P, made in registers, are scaled too. The sums of a tile leave the tensor cores, which
// truncate where float32 rounds. There are then no registers for the next tile's scores. Results equal the portable
// kernel's to the bit, unless the caller allows TF32: then two terms are used instead of three.
//
// A hidden V that is not finite would turn its zero P into NaN, and values near the end of their type may overflow in a
// sum that is divided last. A result that is not finite is reported; the non-finite fallback, the portable kernel, then
// computes all again.
#pragma once

#include "cuda/hopper/forward_loader.cuh"
#include "cuda/hopper/registers.cuh"
#include "cuda/portable/scores.cuh"
#include "cuda/portable/softmax.cuh"
#include "cuda/portable/tuning.h"

namespace anyflash::cuda {

template <class BlockSizes>
class GroupForwardBlock {
 public:
  using Sizes = BlockSizes;
  using E = typename Sizes::Element;
  using Operand = typename Sizes::Operand;
  using Shared = GroupForwardShared<Sizes>;
  static constexpr bool kSplit = Sizes::kParts > 1;
  static constexpr int kDepth = Sizes::kDepth, kBlocks = Sizes::kBlocks, kStages = Sizes::kStages;
  static constexpr int kThreads = Sizes::kThreads;
  static constexpr int kTiles = 8;                                 ///< of 8 keys
  static constexpr int kPart = kDepth < 128 || kSplit ? 64 : 128;  ///< channels of one product of values
  static constexpr int kParts = kDepth / kPart, kPartTiles = kPart / 8;
  static constexpr bool kHeld = Sizes::kHeld;
  static constexpr bool kAhead = kDepth <= 128 && !kSplit;  ///< computes the next scores during O += P V
  static constexpr int kTermSize = 64 * kDepth;             ///< numbers of one bfloat16 term of a tile
  static constexpr int kFirstSmall = first_small(Sizes::kParts);

  __device__ __forceinline__ GroupForwardBlock(const GroupForwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) shared_.begin();
    __syncthreads();
    if (threadIdx.x >= 128 * kBlocks) {
      setmaxnreg_dec<Sizes::kLoaderRegisters>();
      if (threadIdx.x < 128 * kBlocks + 32) GroupForwardLoader<Sizes>(args_, shared_).run();
    } else {
      setmaxnreg_inc<Sizes::kRegisters>();
      for (unsigned n = 0;; ++n) {
        shared_.queries_full.wait(n % 2);
        b_ = shared_.b, h_ = shared_.h, block_ = shared_.first_block + static_cast<std::int32_t>(group());
        if (shared_.first_block < 0) break;
        if constexpr (kHeld) load_queries(), release(shared_.queries_empty);
        attend();
        store();
      }
      if (threadIdx.x % 128 == 0) stores_read();
    }
  }

 private:
  using Scores = float[kTiles][4];
  using Weights = std::uint32_t[Sizes::kParts][kTiles / 2][4];

  __device__ __forceinline__ static unsigned group() { return threadIdx.x / 128; }
  /// This lane's first row of its query block; the second is 8 rows further.
  __device__ __forceinline__ static unsigned row() { return threadIdx.x / 32 % 4 * 16 + lane_number() / 4; }
  __device__ __forceinline__ static float infinity() { return cuda::infinity<float>(); }

  __device__ __forceinline__ void load_queries() {
    const unsigned row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16, half = lane_number() / 16;
    const Operand* const from = shared_.q[group()] + row * 64;
#pragma unroll
    for (unsigned m = 0; m < Sizes::kParts * kDepth / 16; ++m)
      load_matrices(q_[m], from + m / 4 * 4096 + ((2 * (m % 4) + half) ^ row % 8) * 8);
  }

  // --- The walk over the keys ----------------------------------------------------------------------------------------

  __device__ __forceinline__ void attend() {
    shift_[0] = shift_[1] = largest_[0] = largest_[1] = -infinity();
    sum_[0] = sum_[1] = 0;
    sees_ = 0;
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[n][j][e] = 0;
    for (;;) {
      shared_.keys_full[stage_].wait(parity_);
      std::int32_t tile = shared_.tile[stage_];
      if (!(tile >> group() & 1)) {
        if constexpr (Sizes::kApart) {
          release(shared_.keys_empty[stage_]);
          shared_.values_full[stage_].wait(parity_);  // so that they are not released twice in one phase
        } else if (tile == Shared::last) {
          shared_.values_full[stage_].wait(parity_);  // synccheck requires a wait for each phase
        }
        release(shared_.values_empty[stage_]);
        step(stage_, parity_);
        if (tile == Shared::last) break;
        continue;
      }
      Scores s;
      Weights p;
      float factor[2];
      score_products(s, stage_);
      if (finish(s, stage_, tile, factor)) rescale(factor);
      pack(p, s);
      if constexpr (kAhead) {
        for (;;) {
          int next = stage_;
          unsigned next_parity = parity_;
          step(next, next_parity);
          shared_.keys_full[next].wait(next_parity);
          tile = shared_.tile[next];
          if (!(tile >> group() & 1)) break;
          shared_.values_full[stage_].wait(parity_);
          issue_scores(s, next);
          issue_values(p, stage_);
          wgmma_wait<1>();
          keep(s);
          const bool raised = finish(s, next, tile, factor);
          wgmma_wait<0>();
          keep_results();
          release(shared_.values_empty[stage_]);
          if (raised) rescale(factor);
          pack(p, s);
          stage_ = next, parity_ = next_parity;
        }
      }
      shared_.values_full[stage_].wait(parity_);
      if constexpr (kSplit) {
        add_values(p, stage_);
      } else {
        issue_values(p, stage_);
        wgmma_wait<0>();
        keep_results();
      }
      release(shared_.values_empty[stage_]);
      step(stage_, parity_);
    }
  }

  __device__ __forceinline__ static void step(int& stage, unsigned& parity) {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void keep_results() {
#pragma unroll
    for (int n = 0; n < kParts; ++n) keep(o_[n]);
  }

  /// Q K^T. Over 128 channels in two chains (portable/products.cuh says why).
  __device__ __forceinline__ void score_products(Scores& s, int stage) {
    if constexpr (kSplit) {
      split_scores(s, stage);
    } else if constexpr (kHeld) {
      issue_scores(s, stage);
      wgmma_wait<0>();
      keep(s);
    } else {
      Scores rest;
      const auto a = describe_tile(shared_.q[group()], 0), b = describe_tile(shared_.k[stage], 0);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < kDepth; d += 16)
        multiply<false, false>(d < 128 ? s : rest, a + columns_from<64>(d), b + columns_from<64>(d), d % 128 > 0, E());
      wgmma_commit();
      wgmma_wait<0>();
      keep(s), keep(rest);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] += rest[j][e];
    }
  }
  __device__ __forceinline__ void issue_scores(Scores& s, int stage) const {
    const auto b = describe_tile(shared_.k[stage], 0);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kDepth / 16; ++m) multiply<false>(s, q_[m], b + columns_from<64>(16 * m), m > 0, E());
    wgmma_commit();
  }

  /// The same for bfloat16 terms, in chains of 64 channels; with three terms to the bit as SplitProducts of the
  /// portable kernels.
  __device__ __forceinline__ void split_scores(Scores& s, int stage) const {
    constexpr int kChains = kDepth / kSplitChain;
    Scores high[kChains], small[kChains];
    const auto b = describe_tile(shared_.k[stage], 0);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kDepth / 16; ++m) {
      const int chain = 16 * m / kSplitChain, place = 16 * m % kSplitChain;
#pragma unroll
      for (int n = kFirstSmall; n < kSmallProducts; ++n)
        multiply_terms(small[chain], first_term(n), second_term(n), m, b, place > 0 || n > kFirstSmall);
      if (place < 16 * kHighChunks) multiply_terms(high[chain], 0, 0, m, b, place > 0);
      if (place + 16 < kSplitChain) continue;
#pragma unroll
      for (int back = kSplitChain / 16 - 1 - kHighChunks; back >= 0; --back)
        multiply_terms(small[chain], 0, 0, m - back, b, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      keep(high[chain]), keep(small[chain]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float sum = high[chain][j][e] + small[chain][j][e];
          s[j][e] = chain == 0 ? sum : s[j][e] + sum;
        }
    }
  }
  /// Channels from 16m on of one bfloat16 term of Q and one of K.
  __device__ __forceinline__ void multiply_terms(Scores& s, int first, int second, int m, std::uint32_t keys,
                                                 bool sum) const {
    const auto b = keys + second * (kTermSize * 2 / 16) + columns_from<64>(16 * m);
    if constexpr (kHeld) {
      multiply<false>(s, q_[first * (kDepth / 16) + m], b, sum, Operand());
    } else {
      const auto a = describe_tile(shared_.q[group()] + first * kTermSize, 0) + columns_from<64>(16 * m);
      multiply<false, false>(s, a, b, sum, Operand());
    }
  }
  /// O += P V for bfloat16 terms.
  __device__ __forceinline__ void add_values(const Weights& p, int stage) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float high[kPartTiles][4], small[kPartTiles][4];
      const auto b = describe_tile(shared_.v[stage] + part * kPart * 64, 64 * 128);
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < kTiles / 2; ++m) {
#pragma unroll
        for (int n = kFirstSmall; n < kSmallProducts; ++n)
          multiply<true>(small, p[first_term(n)][m], b + second_term(n) * (kTermSize * 2 / 16) + rows_from(16 * m),
                         m > 0 || n > kFirstSmall, Operand());
        if (m < kHighChunks) multiply<true>(high, p[0][m], b + rows_from(16 * m), m > 0, Operand());
      }
#pragma unroll
      for (int m = kHighChunks; m < kTiles / 2; ++m)
        multiply<true>(small, p[0][m], b + rows_from(16 * m), true, Operand());
      wgmma_commit();
      wgmma_wait<0>();
      keep(high), keep(small);
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[part][j][e] += high[j][e] + small[j][e];
    }
  }

  __device__ __forceinline__ void issue_values(const Weights& p, int stage) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const auto b = describe_tile(shared_.v[stage] + n * kPart * 64, 64 * 128);
#pragma unroll
      for (int m = 0; m < kTiles / 2; ++m) multiply<true>(o_[n], p[0][m], b + rows_from(16 * m), true, E());
    }
    wgmma_commit();
  }

  /// Turns P into operands.
  __device__ __forceinline__ static void pack(Weights& p, const Scores& s) {
    if constexpr (kSplit) {
#pragma unroll
      for (int m = 0; m < kTiles / 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float* const x = &s[2 * m + n / 2][n % 2 * 2];
          split<Sizes::kParts>(x[0] * kSplitScale, x[1] * kSplitScale,
                               [&](int term) -> std::uint32_t& { return p[term][m][n]; });
        }
    } else {
      cuda::pack<E>(p[0], s);
    }
  }

  // --- From products to P --------------------------------------------------------------------------------------------

  /// True if O has to be rescaled, its two rows by the factors.
  __device__ __forceinline__ bool finish(Scores& s, int stage, std::int32_t tile, float (&factor)[2]) {
    if constexpr (Sizes::kGeneral) finish_scores(s, stage);
    if (tile >> (8 + group()) & 1) {
      hide(s, stage);
    } else {
      sees_ = 3;
    }
    if constexpr (Sizes::kApart) release(shared_.keys_empty[stage]);
    return softmax_step(s, factor);
  }

  __device__ __forceinline__ void hide(Scores& s, int stage) {
    const Word* const words = shared_.words[stage][group()] + row();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Word all = words[8 * r], word = all >> 2 * (lane_number() % 4);
      if (all) sees_ |= 1u << r;
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(word >> (8 * j + e) & 1)) s[j][2 * r + e] = -infinity();
    }
  }

  /// The same as ScoreTerms::finish, to the bit.
  __device__ __forceinline__ void finish_scores(Scores& s, int stage) const {
    const float scale = args_.factor;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = rounded_product(s[j][e], scale);
    if (const float cap = args_.cap; cap > 0) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] = rounded_product(tanh(rounded_product(s[j][e], args_.cap_inverse)), cap);
    }
    if (!args_.bias.data) return;
    const auto add = [&](auto read) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned own = args_.bias.query != 0 ? row() + 8 * r : 0;  // one row for all queries
        const char* const from = shared_.bias[stage][group()] + own * 128;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const float2 x = read(from, own % 8, j);
          s[j][2 * r] += x.x, s[j][2 * r + 1] += x.y;
        }
      }
    };
    const unsigned t = lane_number() % 4;
    const auto half_at = [=](const char* from, unsigned swizzle, int j) { return from + (j ^ swizzle) * 16 + 4 * t; };
    if (args_.bias.type == 0) {
      add([&](const char* from, unsigned swizzle, int j) {
        return __half22float2(*reinterpret_cast<const __half2*>(half_at(from, swizzle, j)));
      });
    } else if (args_.bias.type == 1) {
      add([&](const char* from, unsigned swizzle, int j) {
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(half_at(from, swizzle, j)));
      });
    } else if constexpr (Sizes::kBiasBytes == 4) {
      add([&](const char* from, unsigned swizzle, int j) {
        const unsigned chunk = (2 * (j % 4) + t / 2) ^ swizzle;
        return *reinterpret_cast<const float2*>(from + j / 4 * 8192 + chunk * 16 + t % 2 * 8);
      });
    }
  }

  /// s becomes P; adds it to the rows' sums. The shift, which is subtracted from a row's scores, is their maximum so
  /// far or less by at most the lag: most tiles then need no maximum across lanes.
  __device__ __forceinline__ bool softmax_step(Scores& s, float (&factor)[2]) {
    float largest[2] = {s[0][0], s[0][2]};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], s[j][e]);
    bool high = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      high |= largest[r] > shift_[r] + args_.lag32;
      largest_[r] = fmaxf(largest_[r], largest[r]);
    }
    const bool raised = __any_sync(0xffffffffu, high);
    if (raised) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float tile = quad_largest(largest[r]);
        const bool rise = tile > shift_[r] + args_.lag32;
        factor[r] = rise && shift_[r] != -infinity() ? expf((shift_[r] - tile) * scale()) : 1.0f;
        if (rise) shift_[r] = tile;
        sum_[r] *= factor[r];
      }
    }
    const float unit = args_.unit32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A row without any score above -inf yet: exp(-inf - 0) = 0, and a NaN stays one.
      const float shift = shift_[r] == -infinity() ? 0.0f : shift_[r];
      float sum[2] = {};  // of this tile only: long sums of small numbers then lose less accuracy
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * r + e];
          x = kSplit ? expf((x - shift) * unit) : exp2_approximately((x - shift) * unit);
          sum[e] += x;
        }
      sum_[r] += sum[0] + sum[1];
    }
    return raised;
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[n][j][e] *= factor[e / 2];
  }
  /// The scale of softmax_step()'s input.
  __device__ __forceinline__ float scale() const { return Sizes::kGeneral ? 1.0f : args_.factor; }

  // --- The end of a task ---------------------------------------------------------------------------------------------

  /// The epilogue: the sink, the division, the statistics that the caller asked for. Results leave through shared
  /// memory.
  __device__ __forceinline__ void store() {
    float zero = 0, factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = quad_largest(largest_[r]), sum = quad_sum(sum_[r]), change = 1;
      if (sum != 0 && shift_[r] != largest) change = expf((shift_[r] - largest) * scale()), sum *= change;
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
      if constexpr (kSplit) {
        divide(r, change, sum);
      } else {
        factor[r] = sum == 0 ? 0.0f : __fdividef(change, sum);
      }
      store_statistics(static_cast<int>(row()) + 8 * r, largest, sum);
    }
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) zero += 0 * o_[n][j][e];
    if (zero != zero) *args_.not_finite = 1;
    if constexpr (kSplit) {
      store_plainly();
    } else {
      rescale(factor);
      store_results();
    }
  }

  /// Divides row r of a result in bfloat16 terms.
  __device__ __forceinline__ void divide(int r, float factor, float sum) {
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          float& x = o_[n][j][e];
          x = sum == 0 ? 0.0f : x * (1.0f / (kSplitScale * kSplitScale)) * factor / sum;
        }
  }
  __device__ __forceinline__ void store_plainly() {
    if constexpr (!kHeld) release(shared_.queries_empty);
    if (block_ >= args_.query_blocks) return;
    const auto& rows = args_.out;
    float* const data = reinterpret_cast<float*>(rows.data) + b_ * rows.batch + h_ * rows.head;
    const rules::Box box{origin_of(args_.queries, block_), args_.query_grid.extent, args_.query_grid.step};
#pragma unroll
    for (int n = 0; n < kParts; ++n)
      store_float_rows(o_[n], rows, data + n * kPart * rows.channel, args_.d_v - n * kPart, box, args_.query_grid.size,
                       static_cast<int>(row()), 1.0f, args_.not_finite);
  }

  __device__ __forceinline__ void store_results() {
    E* const results = Sizes::kOwnResults ? shared_.results[group()] : shared_.q[group()];
    const bool asks = threadIdx.x % 128 == 0;
    if (asks) stores_read();  // the last task's
    sync_threads<128>(1 + group());
    const unsigned row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16, half = lane_number() / 16;
    E* const to = results + row * 64;
#pragma unroll
    for (unsigned n = 0; n < kParts; ++n) {
      std::uint32_t x[kPartTiles / 2][4];
      cuda::pack<E, true>(x, o_[n]);  // a mean; non-finite results have been reported
#pragma unroll
      for (unsigned m = 0; m < kPartTiles / 2; ++m)
        store_matrices(to + (n * (kPart / 64) + m / 4) * 4096 + ((2 * (m % 4) + half) ^ row % 8) * 8, x[m]);
    }
    fence_proxy_async();
    sync_threads<128>(1 + group());
    if (asks && block_ < args_.query_blocks) {
      const auto origin = origin_of(args_.queries, block_);
#pragma unroll
      for (int c = 0; c < kDepth; c += 64) store_rows(args_.out_map, results + c * 64, c, origin, h_, b_);
      stores_commit();
      if constexpr (!kHeld) stores_read();
    }
    if constexpr (!kHeld) release(shared_.queries_empty);
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

  const GroupForwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, h_, block_;
  int stage_ = 0;
  unsigned parity_ = 0;
  std::uint32_t q_[kHeld ? Sizes::kParts * kDepth / 16 : 1][4];
  float shift_[2], largest_[2], sum_[2];  // largest_ and sum_ are over this lane's keys only
  unsigned sees_;                         // bit r: row r sees a key
  float o_[kParts][kPartTiles][4];
};

}  // namespace anyflash::cuda
