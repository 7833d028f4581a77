// The backward pass on any NVIDIA GPU from sm_75 up (FlashAttention-2, Dao 2023, algorithm 2, in two walks).
//
// A thread block holds kRows rows of one side, its own side, and walks the plan's runs of the other side's blocks,
// kColumns rows at a time. X are the own rows and Y the other side's rows: X1 and Y1 from q or k, X2 and Y2 from dout
// or v.
//   S = X1 Y1^T and dP = X2 Y2^T (products.cuh); P = exp(S - lse) and dS = P (dP - delta + dlse);
//   (a large lse has a rounding error: backward_lse_remainders.cuh);
//   the own side's gradients:  first += dS Y1, and for keys also second += P Y2.
// So one code computes dq of a query block, and dk and dv of a key block over all queries and query heads that see it.
// Nothing is added across thread blocks: no atomics, no buffer for dq, the same bits in every run and batch. The price
// is seven products instead of five. The bias's gradient is a third kind of task: the sum of dS over all pairs that map
// to a tile of it.
//
// Each warp owns 8 kRowGroups rows, with S, dP and gradients in registers. Tiles are in shared memory. With two stages the
// next step's data is loaded during this step; with one stage other thread blocks hide the latency. Bound by the tensor
// cores and by loads from shared memory.
//
// A hidden row of Y that is not finite would turn its zero P or dS into NaN. So a thread block whose result holds a NaN
// is computed again by the non-finite fallback (not_finite.cuh).
#pragma once

#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {

template <class E, class Sizes>
class GradientBlock {
 public:
  using Shared = GradientShared<E, Sizes>;
  using Products = typename Shared::Products;
  using T = typename Products::Number;
  using OwnTile = typename Shared::OwnTile;
  using OtherTile = typename Shared::OtherTile;
  static constexpr int kRowGroups = Sizes::kRowGroups, kRows = Sizes::kRows, kThreads = Sizes::kThreads;
  static constexpr int kColumns = Sizes::kColumns, kTiles = kColumns / 8;
  static constexpr int kDepth = Sizes::kDepth, kDepthTiles = kDepth / 8;

  __device__ __forceinline__ GradientBlock(const BackwardArgs& args, Shared& shared) : args_(args), shared_(shared) {}

  /// task: its number.
  __device__ __forceinline__ void run(std::int64_t task) {
    if (threadIdx.x == 0) shared_.task.find(args_, task, kRows, key_results(args_));
    __syncthreads();
    role_ = shared_.task.role, own_ = shared_.task.own;
    bool non_finite = false;
    while (!attend(non_finite) && !non_finite) non_finite = true;
    role_ == Role::bias ? store_tile() : store_gradients();
  }

  /// Thread blocks that share the gradients of the same keys.
  __host__ __device__ static int key_results(const BackwardArgs& args) {
    return Sizes::kResident ? 1 : 1 + (args.channels[1] + kDepth - 1) / kDepth;
  }

 protected:
  using Tile = T[kRowGroups][kTiles][2];
  using Stage = typename Shared::Stage;
  struct Step;

  /// One pass over all entries. non_finite: as the non-finite fallback. False if the result holds a NaN, which may come
  /// from a hidden row.
  __device__ __forceinline__ bool attend(bool non_finite) {
#pragma unroll
    for (int n = 0; n < Sizes::kResults; ++n) clear(sums_[n]);
    bool held = false;
    for (std::int64_t entry = 0; entry < shared_.task.entries; ++entry) {
      __syncthreads();
      if (threadIdx.x == 0) describe(entry);
      __syncthreads();
      if (shared_.run_count == 0) continue;
      load_program<kThreads>(group(), shared_.program);
      __syncthreads();
      open_entry(!held || role_ == Role::bias);
      held = true;
      walk_runs([&](const Step& step, const Walk<kColumns>& walk) { visit(step, walk, non_finite); });
    }
    return !__syncthreads_or(not_a_number());
  }

  /// visit(step, its walk) is called for each step of an entry. With two stages each step is loaded during the one
  /// before.
  template <class Visit>
  __device__ __forceinline__ void walk_runs(const Visit& visit) {
    Walk<kColumns> coming(shared_), walk = coming;
    if (!coming.more()) {  // masks found on the GPU: nothing else waits for the own rows here
      copies_commit();
      copies_wait<0>();
      return;
    }
    int stage = 0;
    for (bool loaded = false;;) {
      if (Sizes::kStages == 1 && !coming.more()) break;
      copies_wait<0>();
      __syncthreads();  // all of the step's copies have arrived, and no thread reads the other stage
      if (coming.more()) load_step(coming, stage);
      if (Sizes::kStages == 1) {
        copies_wait<0>();
        __syncthreads();
        walk = coming;
      }
      if (Sizes::kStages == 1 || loaded) {
        const int at = Sizes::kStages == 1 ? stage : stage ^ 1;
        visit({shared_.stages[at], walk.block, walk.first(), walk.kind != TileClass::full}, walk);
      }
      if (!coming.more()) break;
      walk = coming;
      coming.step(shared_);
      if (Sizes::kStages == 2) stage ^= 1, loaded = true;
    }
  }

  // --- Entries -------------------------------------------------------------------------------------------------------

  /// One thread does this for the whole thread block.
  __device__ __forceinline__ void describe(std::int64_t entry) {
    auto& task = shared_.task;
    task.enter(args_, kRows, entry);
    for (int n = 0; n < 2; ++n) {
      const auto head = [&](int side) { return side == queries ? task.h : task.h / args_.group_heads; };
      shared_.own_data[n] = head_data<E>(args_.sides[own_].rows[n], task.b, head(own_));
      shared_.other_data[n] = head_data<E>(args_.sides[1 - own_].rows[n], task.b, head(1 - own_));
    }
    const auto& list = own_ == queries ? group().keys_of_query_block : group().queries_of_key_block;
    const auto* const start = list.start + task.block;
    shared_.runs = list.runs + start[0];
    shared_.run_count = static_cast<std::int32_t>(start[1] - start[0]);
    shared_.word_table = list.words + task.first_row;
    if (task.other_block >= 0) keep_only(task.other_block);
  }

  /// Restricts the runs to one block.
  __device__ __forceinline__ void keep_only(std::int32_t block) {
    std::int32_t first = 0, end = shared_.run_count;  // the last run that begins at the block or before it
    while (first < end) {
      const auto middle = (first + end) / 2;
      const auto& run = shared_.runs[middle];
      const bool fills = run.count == 0;  // runs of a list found on the GPU end with unused entries
      !fills&& run.first <= block ? first = middle + 1 : end = middle;
    }
    if (first > 0) shared_.only = shared_.runs[first - 1];
    const bool visited = first > 0 && block - shared_.only.first < shared_.only.count;
    shared_.only.first = block, shared_.only.count = 1;
    shared_.runs = &shared_.only;
    shared_.run_count = visited ? 1 : 0;
  }

  __device__ __forceinline__ const DeviceGroup& group() const {
    return group_of(args_, shared_.task.b, shared_.task.h);
  }

  /// Loads what all steps need of the own side. It arrives with the first step's tiles.
  __device__ __forceinline__ void open_entry(bool load) {
    const auto& task = shared_.task;
    if constexpr (Sizes::kResident) {
      if (load) load_own(0, 0), load_own(1, 0);
    }
    if (args_.general)
      find_extras<kRows>(args_, shared_.program, own_, task.block, task.first_row, shared_.own_at, shared_.own_bias);
  }

  // --- Tiles ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ BlockRows rows_at(Side which, std::int32_t block, std::int32_t first) const {
    const auto& side = args_.sides[which];
    return {rare_box_of(side.grid, side.plain, block), which == queries ? side.grid.size : shared_.program.k_size(),
            first};
  }

  /// kDepth channels of a block's rows, from channel chunk * kDepth on.
  template <class To, int kCount>
  __device__ __forceinline__ void load(E* to, Side which, int n, const E* data, std::int32_t block, std::int32_t first,
                                       int chunk) {
    const auto& side = args_.sides[which];
    const auto& rows = side.rows[n];
    const int channels = args_.channels[n] - chunk * kDepth;
    data += chunk * kDepth * rows.channel;
    if constexpr (kSharedEvenly<kCount, kDepth, kThreads, E>) {
      const auto at = block * std::int64_t{64} + first;
      if (side.plain && rows.vectors && args_.channels[n] % (16 / sizeof(E)) == 0 && at + kCount <= side.grid.size[2]) {
        load_plain_rows<To, kCount, kDepth, kThreads>(to, data + at * rows.sequence[2], rows.sequence[2], channels);
        return;
      }
    }
    load_any_rows<To, kCount, kDepth, kThreads>(to, Source<E>{rows, data, channels}, rows_at(which, block, first));
  }
  __device__ __forceinline__ void load_own(int n, int chunk) {
    load<OwnTile, kRows>(shared_.own[Sizes::kResident ? n : 0], own_, n, shared_.own_data[n], shared_.task.block,
                         shared_.task.first_row, chunk);
  }
  __device__ __forceinline__ void load_other(Stage& stage, const Walk<kColumns>& walk, int n, int chunk) {
    load<OtherTile, kColumns>(stage.tiles[Sizes::kResident ? n : 0], other(), n, shared_.other_data[n], walk.block,
                              walk.first(), chunk);
  }
  __device__ __forceinline__ Side other() const { return static_cast<Side>(1 - own_); }

  /// Starts the loads of a step: tiles (for large heads they are loaded later), its queries' row terms, mask words.
  __device__ __forceinline__ void load_step(const Walk<kColumns>& walk, int to) {
    auto& stage = shared_.stages[to];
    load_terms(stage, own_ == queries ? shared_.task.block : walk.block);
    if (walk.kind != TileClass::full) load_words(walk, to);
    if (args_.general)
      find_extras<kColumns>(args_, shared_.program, other(), walk.block, walk.first(), stage.at, stage.bias);
    if constexpr (Sizes::kResident) load_other(stage, walk, 0, 0), load_other(stage, walk, 1, 0);
    copies_commit();
  }
  __device__ __forceinline__ void load_terms(Stage& stage, std::int32_t query_block) {
    const auto at =
        (std::int64_t{shared_.task.b} * args_.sides[queries].heads + shared_.task.h) * args_.sides[queries].blocks +
        query_block;
    constexpr int kNumbers = 16 / sizeof(T), kChunks = 64 / kNumbers;
    for (int i = threadIdx.x; i < 4 * kChunks; i += kThreads) {
      const auto* const from = static_cast<const T*>(i < kChunks       ? args_.terms.lse
                                                     : i < 2 * kChunks ? args_.terms.delta
                                                     : i < 3 * kChunks ? args_.terms.dlse
                                                                       : args_.terms.rest);
      copy_16(&stage.terms[0][0] + i * kNumbers, from + at * 64 + i % kChunks * kNumbers);
    }
    if (threadIdx.x == 0) copy_8(&stage.live, args_.terms.live + at);
  }
  /// A thread's own mask word of a partial tile.
  __device__ __forceinline__ void load_words(const Walk<kColumns>& walk, int to) {
    if (threadIdx.x >= kRows) return;
    const int row = static_cast<int>(threadIdx.x);
    auto& word = shared_.stages[to].words[row];
    if (walk.first() > 0) {
      if (Sizes::kStages == 2) word = shared_.stages[to ^ 1].words[row];
    } else {
      word = walk.words < 0 ? ask_word(args_, shared_.program, shared_.task, walk.block, row)
                            : shared_.word_table[walk.words * 64 + row];
    }
  }

  // --- A step --------------------------------------------------------------------------------------------------------

  struct Step {
    Stage& stage;
    std::int32_t block, first;  ///< of the other side
    bool partial;
  };

  __device__ __forceinline__ void visit(const Step& step, const Walk<kColumns>& walk, bool non_finite) {
    Tile s, dp;
    if constexpr (Sizes::kResident) {
      multiply(dp, step, 1, non_finite);
      multiply(s, step, 0, non_finite);
      weigh(s, dp, step);
      if (role_ == Role::bias) add_to_bias(dp, step.first);
      if (wanted(1)) add_product(sums_[1], s, step, 1, 0, non_finite);
      if (wanted(0)) add_product(sums_[0], dp, step, 0, 0, non_finite);
    } else {
      const int chunk = shared_.task.result - 1;  // part of the second gradient; -1: the first gradient
      clear(dp);
      for (int c = 0; chunk < 0 && c * kDepth < args_.channels[1]; ++c) {
        load_own(1, c);
        load_other(step.stage, walk, 1, c);
        arrive();
        multiply(s, step, 1, non_finite);
        c == 0 ? copy(dp, s) : add(dp, s);
        __syncthreads();
      }
      load_own(0, 0);
      load_other(step.stage, walk, 0, 0);
      arrive();
      multiply(s, step, 0, non_finite);
      weigh(s, dp, step);
      if (role_ == Role::bias) add_to_bias(dp, step.first);
      if (chunk >= 0) {
        __syncthreads();
        load_other(step.stage, walk, 1, chunk);
        arrive();
        copy(dp, s);
      }
      if (wanted(chunk >= 0)) add_product(sums_[0], dp, step, chunk >= 0, max(chunk, 0), non_finite);
    }
  }
  __device__ __forceinline__ static void arrive() {
    copies_commit();
    copies_wait<0>();
    __syncthreads();
  }

  /// Does this thread block compute gradient n of the own side?
  __device__ __forceinline__ bool wanted(int n) const {
    return role_ != Role::bias && args_.sides[own_].gradients[n].data != nullptr;
  }

  /// x = X[n] Y[n]^T.
  __device__ __forceinline__ void multiply(Tile& x, const Step& step, int n, bool non_finite) {
    const int at = Sizes::kResident ? n : 0;
    const E* const own = shared_.own[at];
    E* const other = step.stage.tiles[at];
    if (Products::swaps && own_ == keys) {
      Products::template scores<kRows, kDepth, true>(x, own, other, non_finite);
    } else {
      Products::template scores<kRows, kDepth>(x, own, other, non_finite);
    }
    if (!non_finite || Products::exact_infinities) return;
    mark_not_finite<Products, OtherTile, kColumns, kDepth, false>(other, shared_.not_finite[at]);
    recompute_scores<Products, OwnTile, OtherTile, kDepth>(x, own, other, shared_.not_finite[at]);
  }

  /// sum += weights Y[n].
  __device__ __forceinline__ void add_product(T (&sum)[kRowGroups][kDepthTiles][2], const Tile& weights,
                                              const Step& step, int n, int chunk, bool non_finite) {
    E* const tile = step.stage.tiles[Sizes::kResident ? n : 0];
    if (non_finite) {
      auto& not_finite = shared_.not_finite[Sizes::kResident ? n : 0];
      mark_not_finite<Products, OtherTile, kColumns, kDepth, true>(tile, not_finite);
      const auto& rows = args_.sides[other()].rows[n];
      const auto places = rows_at(other(), step.block, step.first);
      const E* const data = shared_.other_data[n];
      const int channels = args_.channels[n] - chunk * kDepth;
      const auto sees = [&](int i, int row) { return word_of(step, i) >> (step.first + row) & 1; };
      const auto row_at = [&](int row) {
        std::int64_t at = 0;
        places.find(rows, row, at);
        return at + chunk * kDepth * rows.channel;
      };
      const auto value = [&](std::int64_t at, int c) {
        return c < channels ? static_cast<T>(data[at + c * rows.channel]) : T(0);
      };
      const bool apart = !bears_all(weights);
      add_not_finite(sum, weights, apart ? ~0ull >> (64 - kColumns) : not_finite, sees, row_at, value);
      if (apart) return;
    }
    if constexpr (sizeof(E) == 8) {
      add_apart(sum, weights, tile, non_finite);
    } else {
      Products::template values<OtherTile>(sum, weights, tile, non_finite);
    }
  }
  /// Whether all numbers are within the range of split bfloat16; dS may not be. (Non-finite numbers show in their own
  /// rows either way.)
  __device__ __forceinline__ static bool bears_all(const Tile& weights) {
    if constexpr (Products::exact_infinities) return true;
    bool all = true;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        const T weight = weights[i][n / 2][n % 2];
        all &= bears<Products>(weight) || !is_finite(weight);
      }
    return __all_sync(0xffffffffu, all);
  }
  /// Adds a step's sums as separate partial sums. One chain over the queries of all heads that share a key would lose
  /// more accuracy. (16-bit types round results more anyway; float32 sums already leave the tensor cores after each
  /// tile.)
  __device__ __forceinline__ static void add_apart(T (&sum)[kRowGroups][kDepthTiles][2], const Tile& weights, E* tile,
                                                   bool non_finite) {
    constexpr int kPart = 2;
#pragma unroll
    for (int j = 0; j < kDepthTiles; j += kPart) {
      T part[kRowGroups][kPart][2];
      clear(part);
      Products::template values<OtherTile>(part, weights, tile + 8 * j, non_finite);
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
        for (int n = 0; n < 2 * kPart; ++n) sum[i][j + n / 2][n % 2] += part[i][n / 2][n % 2];
    }
  }

  /// The entries of the other side's block that slot i of this lane sees and that have a gradient.
  __device__ __forceinline__ Word word_of(const Step& step, int i) const {
    const Word word = step.partial ? step.stage.words[row_of(i)] : rules::all_bits;
    if (own_ == keys) return word & step.stage.live;
    return step.stage.live >> (shared_.task.first_row + row_of(i)) & 1 ? word : 0;
  }

  /// Turns products into scores, except for their scale, where scores need more than a scale. derivatives: of the soft
  /// cap.
  __device__ __forceinline__ void finish(Tile& s, T (&derivatives)[kRowGroups][2 * kTiles], const Step& step) const {
    if (!args_.general) return;
    T scores[kRowGroups][2 * kTiles];
    int rows[kRowGroups];
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      rows[i] = row_of(i);
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) scores[i][n] = s[i][n / 2][n % 2];
    }
    finish_scores<Shared, T, kRowGroups, kTiles>(args_, shared_, step.stage, rows, scores, derivatives);
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) s[i][n / 2][n % 2] = scores[i][n];
  }
  /// The scale that finish() leaves to be applied.
  __device__ __forceinline__ T scale() const { return args_.general ? T(1) : static_cast<T>(args_.scale); }

  /// s becomes P, dp becomes dS. Both become 0 where the mask hides the pair, whatever their values were.
  __device__ __forceinline__ void weigh(Tile& s, Tile& dp, const Step& step) {
    T derivatives[kRowGroups][2 * kTiles];  // in local memory; used with a soft cap only
    finish(s, derivatives, step);
    own_ == queries ? weigh_pairs<true>(s, dp, step) : weigh_pairs<false>(s, dp, step);
    if (args_.softcap > 0 && role_ != Role::bias) {
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
        for (int n = 0; n < 2 * kTiles; ++n) dp[i][n / 2][n % 2] *= derivatives[i][n];
    }
    if (!step.partial && step.stage.live == rules::all_bits) return;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      const Word word = word_of(step, i) >> (step.first + 2 * (lane_number() % 4));
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(word >> (8 * j + e) & 1)) s[i][j][e] = dp[i][j][e] = 0;
    }
  }

  template <bool kOwnQueries>
  __device__ __forceinline__ void weigh_pairs(Tile& s, Tile& dp, const Step& step) const {
    const T scale = this->scale();
    const int first_row = shared_.task.first_row;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n)
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) {
        const int query =
            kOwnQueries ? first_row + row_of(i) : step.first + 8 * (n / 2) + 2 * (lane_number() % 4) + n % 2;
        T &p = s[i][n / 2][n % 2], &ds = dp[i][n / 2][n % 2];
        const T x = rounded_product(p, scale) - step.stage.terms[0][query] - step.stage.terms[3][query];
        // A score exceeds its row's lse only by rounding, which can be a lot for large scores. P is then 1.
        p = exponential(x > T(0) ? T(0) : x);
        ds = p * (ds - step.stage.terms[1][query] + step.stage.terms[2][query]);
      }
  }
  __device__ __forceinline__ static T exponential(T x) {
    if constexpr (sizeof(E) > 2) {
      return exp(x);
    } else {
      return exp2_approximately(x * 1.44269504f);
    }
  }

  /// The sums of a tile of the bias are in the first 64 columns of sums_[0].
  __device__ __forceinline__ void add_to_bias(const Tile& ds, int first) {
#pragma unroll
    for (int part = 0; part < 64 / kColumns; ++part) {
      if (part * kColumns != first) continue;
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) sums_[0][i][part * kTiles + j][e] += ds[i][j][e];
    }
  }

  __device__ __forceinline__ static int row_of(int i) { return Products::template row_of<kRowGroups>(i); }

  // --- The end -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool not_a_number() const {
    T zero = 0;
#pragma unroll
    for (int n = 0; n < Sizes::kResults; ++n)
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
        for (int j = 0; j < kDepthTiles; ++j) zero += T(0) * sums_[n][i][j][0] + T(0) * sums_[n][i][j][1];
    return zero != zero;
  }

  __device__ __forceinline__ void store_gradients() {
    if constexpr (Sizes::kResident) {
      if (wanted(0)) store(sums_[0], 0, 0);
      if (wanted(1)) store(sums_[1], 1, 0);
    } else {
      const int n = shared_.task.result > 0;
      if (wanted(n)) store(sums_[0], n, max(shared_.task.result - 1, 0));
    }
  }

  /// Each warp stores its results through the shared memory of the own rows.
  __device__ __forceinline__ void store(const T (&sum)[kRowGroups][kDepthTiles][2], int n, int chunk) {
    using Result = typename Shared::ResultTile;
    E* const rows = shared_.own[Sizes::kResident ? n : 0];
    const T factor = n == 0 ? static_cast<T>(args_.scale) : T(1);
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int j = 0; j < kDepthTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          rows[Result::at(row_of(i), 8 * j + 2 * (lane_number() % 4) + e)] = rounded<E>(sum[i][j][e] * factor);
    __syncwarp();
    const auto& task = shared_.task;
    const auto& side = args_.sides[own_];
    const auto& to = side.gradients[n];
    const int first_row = static_cast<int>(threadIdx.x / 32 * (8 * kRowGroups));  // of the rows that this warp stores
    const E* const from = rows + Result::at(first_row, 0);
    E* const data =
        head_data<E>(to, task.b, own_ == queries ? task.h : task.h / args_.group_heads) + chunk * kDepth * to.channel;
    const int channels = args_.channels[n] - chunk * kDepth;
    const auto at = task.block * std::int64_t{64} + task.first_row;
    if (side.plain && to.vectors && channels >= kDepth && at + kRows <= side.grid.size[2]) {
      store_plain_rows<8 * kRowGroups, kDepth, Result::kStride>(from, data + (at + first_row) * to.sequence[2],
                                                                to.sequence[2]);
    } else {
      const BlockRows places{rare_box_of(side.grid, side.plain, task.block), side.grid.size, task.first_row};
      store_rows<8 * kRowGroups, kDepth, Result::kStride>(from, to, data, places, first_row, channels);
    }
  }

  __device__ __forceinline__ void store_tile() {
    T* const sum = reinterpret_cast<T*>(shared_.own);
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 16; ++n)
        sum[row_of(i) * 64 + 8 * (n / 2) + 2 * (lane_number() % 4) + n % 2] = sums_[0][i][n / 2][n % 2];
    __syncthreads();
    store_bias<Shared, kRows>(args_, shared_, sum);
  }

  const BackwardArgs& args_;
  Shared& shared_;
  Role role_;
  Side own_;
  T sums_[Sizes::kResults][kRowGroups][kDepthTiles][2];
};

}  // namespace anyflash::cuda
