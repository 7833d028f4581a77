// The forward pass on any NVIDIA GPU from sm_75 up (FlashAttention-2, Dao 2023, algorithm 1).
//
// A thread block takes kRows queries of one head and walks the plan's runs of key blocks, kKeys keys at a time:
//   S = Q K^T (products.cuh), then score_mod (scale, soft cap, bias, ALiBi); mask words hide pairs in partial tiles;
//   P by the online softmax (Milakov and Gimelshein 2018);  O += P V.
// Each warp owns 8 kRowGroups rows, with S, P and O in registers and nothing exchanged between warps. Shared memory holds Q
// and one tile each of K and V, padded or swizzled without bank conflicts. V is loaded during Q K^T, the next K during
// the softmax and P V. Bound by the tensor cores, and by the exponentials at small head sizes. A row's arithmetic
// depends on its own block only, so results have the same bits in every run and batch.
//
// A hidden row of V that is not finite would turn its zero P into NaN. So a thread block whose result is not finite is
// computed again by the non-finite fallback. It leaves rows of V with such numbers out of the product and adds them
// only to the queries that see them. If results are still not finite, values near the end of their type may have
// overflowed in a sum that is divided last. Then a third pass scales P to sum to a half, and its results replace those
// that are not finite.
#pragma once

#include "cuda/portable/forward_shared.cuh"

namespace anyflash::cuda {

template <class E, class Sizes, bool kGeneral>
class ForwardBlock {
 public:
  using Products = typename ProductsOf<E, Sizes::kTf32>::type;
  using T = typename Products::Number;
  using Shared = ForwardShared<E, T, Sizes, kGeneral>;
  static constexpr int kRowGroups = Sizes::kRowGroups, kKeys = Sizes::kKeys, kKeyTiles = kKeys / 8;
  static constexpr int kValueTiles = Sizes::kValues / 8, kThreads = Sizes::kThreads;

  __device__ __forceinline__ ForwardBlock(const ForwardArgs& args, Shared& shared) : args_(args), shared_(shared) {
    static_assert(Sizes::kRows <= kThreads && kKeys <= kThreads);
  }

  /// task: its number.
  __device__ __forceinline__ void run(std::int32_t task) {
    if (threadIdx.x == 0) describe(task);
    __syncthreads();
    load_program<kThreads>(group(), shared_.program);
    load_queries();
    __syncthreads();
    if constexpr (kGeneral) find_query_extras<Shared, Sizes::kRows>(args_, shared_, shared_.task);
    bool good = false, non_finite = false;
    if constexpr (!kGeneral)  // code of its own, since the rare case would slow down the common one
      good = attend(Known<false>(), false), non_finite = true;
    for (bool halved = false;;) {
      if (!good) {
        if constexpr (kGeneral) {
          good = attend(non_finite, halved);
        } else {
          good = attend(Known<true>(), halved);
        }
      }
      if (halved) return replace_results();
      if (!good && !non_finite) {
        non_finite = true;
        continue;
      }
      store();
      if (good) return;
      __syncthreads();  // results that leave through the queries' memory have left
      load_queries();
      halved = true;
    }
  }

 private:
  /// One pass over the keys. non_finite: as the non-finite fallback. halved: P is scaled to sum to a half, using
  /// the rows' maxima and sums of the pass before. False if the result is not finite although the sum of P is:
  /// because of a hidden value, or of overflow in a sum that is divided last.
  template <class NonFinite>
  __device__ __forceinline__ bool attend(NonFinite non_finite, bool halved) {
    clear(halved);
    Walk<kKeys> walk(shared_);
    if (walk.more()) load_keys(walk, non_finite);
    copies_commit();
    while (walk.more()) {
      const bool partial = walk.kind != TileClass::full;
      const int first_key = walk.first();
      if (partial && first_key == 0 && (non_finite || walk.words < 0))
        find_words<Shared, Sizes::kRows>(args_, shared_, shared_.task, walk.block);
      if constexpr (kGeneral) find_key_extras<Shared, kKeys>(args_, shared_, walk.block, first_key);
      copies_wait<0>();
      Products::show();
      __syncthreads();
      if (non_finite)
        mark_not_finite<Products, typename Shared::KeyTile, kKeys, Sizes::kDepth, false>(shared_.k,
                                                                                         shared_.k_not_finite);
      load_values(walk);
      copies_commit();
      T s[kRowGroups][kKeyTiles][2];
      Products::template scores<Sizes::kRows, Sizes::kDepth>(s, shared_.q, shared_.k, non_finite);
      if (non_finite && !Products::exact_infinities)
        recompute_scores<Products, typename Shared::QueryTile, typename Shared::KeyTile, Sizes::kDepth>(
            s, shared_.q, shared_.k, shared_.k_not_finite);
      if constexpr (kGeneral) finish_scores(s);
      if (partial) hide(s, first_key);
      copies_wait<0>();
      Products::show();
      __syncthreads();
      if (non_finite)
        mark_not_finite<Products, typename Shared::ValueTile, kKeys, Sizes::kValues, true>(shared_.v,
                                                                                           shared_.v_not_finite);
      const auto block = walk.block;
      walk.step(shared_);
      if (walk.more()) load_keys(walk, non_finite);
      copies_commit();
      rows_.step(s, o_, SoftmaxTerms{*this});
      if (non_finite && halved) halve(s);
      if (non_finite) add_hidden_values(s, block, first_key, partial);  // before the products, which need P last
      Products::template values<typename Shared::ValueTile>(o_, s, shared_.v, non_finite);
      if (non_finite) __syncthreads();  // before the words are overwritten
    }
    copies_wait<0>();  // the copies of queries that see no key
    __syncthreads();   // words and tiles are about to be overwritten
    return !__syncthreads_or(non_finite ? overflowed() : !finite());
  }

  /// One thread does this for the whole thread block.
  __device__ __forceinline__ void describe(std::int32_t task) {
    shared_.task.find(args_, task, Sizes::kRows, Sizes::kValues);
    shared_.keys = key_data(args_.k);
    shared_.values = key_data(args_.v) + shared_.task.first_value * args_.v.channel;
    const auto& list = group().keys_of_query_block;
    const auto* const start = list.start + shared_.task.block;
    shared_.runs = list.runs + start[0];
    shared_.run_count = static_cast<std::int32_t>(start[1] - start[0]);
    shared_.word_table = list.words + shared_.task.first_row;
  }

  /// Keys or values of this head; with pages the batch entry is in the page table.
  __device__ __forceinline__ const E* key_data(const Rows& rows) const {
    return data_of(rows, args_.paged ? 0 : shared_.task.b, shared_.task.h / args_.group_heads,
                   static_cast<const E*>(nullptr));
  }

  __device__ __forceinline__ const DeviceGroup& group() const {
    return group_of(args_, shared_.task.b, shared_.task.h);
  }
  /// The scale of the softmax's input.
  __device__ __forceinline__ T scale() const { return kGeneral ? T(1) : static_cast<T>(args_.scale); }
  struct SoftmaxTerms {
    const ForwardBlock& block;
    __device__ __forceinline__ T scale() const { return block.scale(); }
    __device__ __forceinline__ T unit() const {
      return sizeof(T) == 8 ? static_cast<T>(block.args_.unit) : block.args_.unit32;
    }
    __device__ __forceinline__ T lag() const {
      return sizeof(T) == 8 ? static_cast<T>(block.args_.lag) : block.args_.lag32;
    }
  };

  /// The row of the query block that slot i of this lane holds.
  __device__ __forceinline__ int row_of(int i) const { return Products::template row_of<kRowGroups>(i); }

  template <class Pointer>
  __device__ __forceinline__ static auto data_of(const Rows& rows, std::int64_t b, std::int64_t h, Pointer) {
    return reinterpret_cast<Pointer>(rows.data) + b * rows.batch + h * rows.head;
  }

  /// Whether the part's rows are consecutive and all exist; first: the first of them, in the sequence.
  __device__ __forceinline__ bool plain_queries(int& first) const {
    first = shared_.task.block * args_.query_grid.extent[2] + shared_.task.first_row;
    return args_.query_rows && first + Sizes::kRows <= args_.query_grid.size[2];
  }

  __device__ __forceinline__ void load_queries() {
    const E* const data = data_of(args_.q, shared_.task.b, shared_.task.h, static_cast<const E*>(nullptr));
    int first;
    if constexpr (kSharedEvenly<Sizes::kRows, Sizes::kDepth, kThreads, E>) {
      if (plain_queries(first) && args_.q.vectors && args_.whole_channels) {
        load_plain_rows<typename Shared::QueryTile, Sizes::kRows, Sizes::kDepth, kThreads>(
            shared_.q, data + first * args_.q.sequence[2], args_.q.sequence[2], args_.d_qk);
        return;
      }
    }
    load_any_rows<typename Shared::QueryTile, Sizes::kRows, Sizes::kDepth, kThreads>(
        shared_.q, Source<E>{args_.q, data, args_.d_qk}, PartRows{args_, shared_.task});
  }

  __device__ __forceinline__ KeyRows key_rows(std::int32_t block, int first) const {
    return {args_, shared_.task.b, first, shared_.program.k_size(), rare_box_of(args_.key_grid, args_.key_rows, block)};
  }
  template <class Tile, int kWidth>
  __device__ __forceinline__ void load(E* to, const Rows& rows, const E* data, int channels, const Walk<kKeys>& walk) {
    const int first = walk.block * 64 + walk.first();
    // The keys of a full block all exist.
    if constexpr (kSharedEvenly<kKeys, kWidth, kThreads, E>) {
      if (args_.plain_keys && (walk.kind == TileClass::full || first + kKeys <= shared_.program.axis[2].k_size)) {
        load_plain_rows<Tile, kKeys, kWidth, kThreads>(to, data + first * rows.sequence[2], rows.sequence[2], channels);
        return;
      }
    }
    load_any_rows<Tile, kKeys, kWidth, kThreads>(to, Source<E>{rows, data, channels},
                                                 key_rows(walk.block, walk.first()));
  }
  /// Also loads the mask words of a partial tile, if they are in a table. (In the fallback the last tile's words are
  /// still in use.)
  __device__ __forceinline__ void load_keys(const Walk<kKeys>& walk, bool non_finite) {
    if (!non_finite && walk.kind != TileClass::full && walk.words >= 0 && walk.first() == 0) load_words(walk.words);
    load<typename Shared::KeyTile, Sizes::kDepth>(shared_.k, args_.k, shared_.keys, args_.d_qk, walk);
  }
  __device__ __forceinline__ void load_words(std::int32_t tile) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < Sizes::kRows) {
      const auto rows = static_cast<std::int32_t>(rules::volume(args_.query_grid.extent));
      copy_8(shared_.words + row, shared_.word_table + std::int64_t{tile} * rows + row);
    }
  }
  __device__ __forceinline__ void load_values(const Walk<kKeys>& walk) {
    load<typename Shared::ValueTile, Sizes::kValues>(shared_.v, args_.v, shared_.values,
                                                     args_.d_v - shared_.task.first_value, walk);
  }

  __device__ __forceinline__ void hide(T (&s)[kRowGroups][kKeyTiles][2], int first_key) const {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) hide_pairs(s[i], shared_.words[row_of(i)] >> first_key);
  }

  /// From products to scores.
  __device__ __forceinline__ void finish_scores(T (&s)[kRowGroups][kKeyTiles][2]) const {
    if constexpr (kGeneral) {
      const auto& extras = shared_.extras;
      const ScoreTerms<T> terms(args_, shared_.task.b, shared_.task.h);
      T derivative;
#pragma unroll 1  // the code of one slot is long enough
      for (int i = 0; i < kRowGroups; ++i) {
        const int row = row_of(i);
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = 8 * j + 2 * (lane_number() % 4) + e;
            const auto gap = [&](int n) { return static_cast<T>(extras.x[n][row] - extras.y[n][key]); };
            s[0][j][e] = terms.finish(s[0][j][e], extras.bias_row[row], extras.bias_key[key], gap, derivative);
          }
        rotate_slots(s);
      }
    }
  }

  __device__ __forceinline__ void clear(bool halved) {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      rows_.shift[i] = halved ? quad_largest(rows_.largest[i]) : -infinity<T>();
      rows_.largest[i] = -infinity<T>(), rows_.sum[i] = 0;
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) o_[i][j][0] = o_[i][j][1] = 0;
    }
  }

  /// Scales P to sum to a half. (A shift above lse would do the same, but for large scores the next larger number is
  /// much above it.)
  __device__ __forceinline__ void halve(T (&p)[kRowGroups][kKeyTiles][2]) const {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      const T weight = shared_.weights[row_of(i)];
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) p[i][n / 2][n % 2] *= weight;
    }
  }

  /// Is a result not finite although its row's sum is?
  __device__ __forceinline__ bool overflowed() const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      T zero = 0;
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) zero += T(0) * o_[i][j][0] + T(0) * o_[i][j][1];
      const T sum = quad_sum(rows_.sum[i]);
      any |= zero != zero && is_finite(sum);
    }
    return any;
  }

  __device__ __forceinline__ bool finite() const {
    T zero = 0;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      zero += T(0) * rows_.sum[i];
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) zero += T(0) * o_[i][j][0] + T(0) * o_[i][j][1];
    }
    return zero == zero;
  }

  /// O += P V for the rows of V that were left out of the product, for the queries that see them.
  __device__ __forceinline__ void add_hidden_values(const T (&p)[kRowGroups][kKeyTiles][2], std::int32_t block,
                                                    int first, bool partial) {
    const auto places = key_rows(block, first);
    const auto sees = [&](int i, int key) { return !partial || shared_.words[row_of(i)] >> (first + key) & 1; };
    const auto row_at = [&](int key) {
      std::int64_t at = 0;
      places.find(args_.v, key, at);
      return at;
    };
    const auto value = [&](std::int64_t at, int c) {
      return shared_.task.first_value + c < args_.d_v ? static_cast<T>(shared_.values[at + c * args_.v.channel]) : T(0);
    };
    add_not_finite(o_, p, shared_.v_not_finite, sees, row_at, value);
  }

  // --- The end -------------------------------------------------------------------------------------------------------

  /// The epilogue: the sink, the division, the statistics that the caller asked for. Results leave through the queries'
  /// memory.
  __device__ __forceinline__ void store() {
    E* const rows = shared_.q;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      T largest = quad_largest(rows_.largest[i]), sum = quad_sum(rows_.sum[i]);
      T factor = 1, change = 1;  // change: of the sink
      if (sum != T(0) && rows_.shift[i] != largest) factor = exp((rows_.shift[i] - largest) * scale()), sum *= factor;
      largest *= scale();
      if (args_.sink.data && (sum != T(0) || sees_a_key(args_, shared_, shared_.task, row_of(i)))) {
        const T sink = read_number<T>(args_.sink, shared_.task.h * args_.sink.head),
                together = larger_of(largest, sink);
        if (together != -infinity<T>() || sink != sink) {
          change = exp(largest - together);
          factor *= change;
          sum = sum * change + exp(sink - together);
          largest = together;
        }
      }
      const bool empty = sum == T(0);  // it sees no key, or only keys with a score of -inf, and has no sink above that
      if (sum != sum && largest != infinity<T>()) largest = sum;  // a NaN among the scores, which comparisons ignore
      const auto mean = [&](T x) {
        if constexpr (sizeof(E) == 2) return x * __fdividef(factor, sum);  // as Hopper's kernel, to the bit
        else return x * factor / sum;
      };
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          rows[Shared::ResultTile::at(row_of(i), 8 * j + 2 * (lane_number() % 4) + e)] =
              rounded_mean<E>(empty ? T(0) : mean(o_[i][j][e]));
      // For another pass. It begins with the row's maximum as shift, so that `factor` does not apply to it.
      if (lane_number() % 4 == 0) shared_.weights[row_of(i)] = empty ? T(0) : T(0.5) * change / sum;
      store_statistics(row_of(i), empty, largest, sum);
    }
    __syncthreads();
    const int first_row = own_first_row();
    const E* const from = rows + Shared::ResultTile::at(first_row, 0);
    E* const out = out_data();
    const int channels = args_.d_v - shared_.task.first_value;
    int first;
    if (plain_queries(first) && args_.out.vectors && channels >= Sizes::kValues) {
      store_plain_rows<8 * kRowGroups, Sizes::kValues, Shared::ResultTile::kStride>(
          from, out + (first + first_row) * args_.out.sequence[2], args_.out.sequence[2]);
    } else {
      store_rows<8 * kRowGroups, Sizes::kValues, Shared::ResultTile::kStride>(
          from, args_.out, out, PartRows{args_, shared_.task}, first_row, channels);
    }
  }

  /// The first row that this warp stores.
  __device__ __forceinline__ static int own_first_row() {
    return static_cast<int>(threadIdx.x / 32 * (8 * kRowGroups));
  }
  /// Of this head, from the thread block's first channel on.
  __device__ __forceinline__ E* out_data() const {
    return data_of(args_.out, shared_.task.b, shared_.task.h, static_cast<E*>(nullptr)) +
           shared_.task.first_value * args_.out.channel;
  }

  /// Stores the results of a pass whose P sums to a half, only where the pass before overflowed.
  __device__ __forceinline__ void replace_results() {
#pragma unroll 1
    for (int i = 0; i < kRowGroups; ++i) {
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          shared_.q[Shared::ResultTile::at(row_of(i), 8 * j + 2 * (lane_number() % 4) + e)] =
              rounded_mean<E>(finite_mean(T(2) * o_[0][j][e], [&] { return is_finite(o_[0][j][e]); }));
      rotate_slots(o_);
    }
    __syncthreads();
    const int first_row = own_first_row();
    replace_not_finite<8 * kRowGroups, Sizes::kValues, Shared::ResultTile::kStride, T>(
        shared_.q + Shared::ResultTile::at(first_row, 0), args_.out, out_data(), PartRows{args_, shared_.task},
        first_row, args_.d_v - shared_.task.first_value);
  }

  __device__ __forceinline__ void store_statistics(int row, bool empty, T largest, T sum) const {
    if (lane_number() % 4 != 0 || shared_.task.first_value != 0 || !args_.wants_statistics()) return;
    const auto at = place_of(args_, shared_.task, row);
    if (at < 0) return;
    const auto store = [&](const Numbers& to, T x) {
      if (to.data)
        reinterpret_cast<T*>(to.data)[shared_.task.b * to.batch + shared_.task.h * to.head + at * to.query] = x;
    };
    store(args_.row_max, empty ? -infinity<T>() : largest);
    store(args_.row_sum, sum);
    store(args_.lse, empty ? -infinity<T>() : largest + log(sum));
  }

  const ForwardArgs& args_;
  Shared& shared_;
  OnlineSoftmax<E, T, kRowGroups> rows_;
  T o_[kRowGroups][kValueTiles][2];
};

}  // namespace anyflash::cuda
