// The decode kernel for plain calls, the most common ones. In a plain call all queries see the same consecutive keys,
// and scores need only a positive scale. Rows are whole 16-byte vectors, and tiles do not cross pages. decode.cuh
// describes the algorithm. The loop over tiles calls no functions and evaluates no masks, so that all its variables
// stay in registers. Spilled registers would go to the L2 cache, since the tiles occupy the L1.
#pragma once

#include <type_traits>

#include "cuda/portable/decode_narrow.cuh"

namespace anyflash::cuda {

/// The rows of more than 8, or of other types.
template <class E, class Sizes>
class PlainDecodeRows : public DecodeRows<E, Sizes> {
  using Base = DecodeRows<E, Sizes>;

 public:
  using Base::kRowGroups, Base::kKeys, Base::kKeyTiles, Base::kDepth, Base::kRows;
  using typename Base::Products, typename Base::Shared, typename Base::T;
  using Scores = T[kRowGroups][kKeyTiles][2];

 protected:
  __device__ __forceinline__ PlainDecodeRows(const DecodeArgs& args, Shared& shared) : Base(args, shared) {}

  __device__ __forceinline__ void take_queries() {}
  template <class NonFinite>
  __device__ __forceinline__ void find_scores(Scores& s, const E* k, NonFinite non_finite) const {
    Products::template scores<kRows, kDepth>(s, this->own_rows(), k, non_finite);
    if (non_finite && !Products::exact_infinities)
      recompute_scores<Products, typename Shared::QueryTile, typename Shared::KeyTile, kDepth>(
          s, this->own_rows(), k, this->template rows_not_finite<typename Shared::KeyTile>(k));
  }
  __device__ __forceinline__ static void hide(Scores& s, rules::Word word) {
    const auto own = static_cast<std::uint32_t>(word >> (2 * (lane_number() % 4)));
    static_assert(kKeys <= 32);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(own >> (8 * j + e) & 1)) {
#pragma unroll
          for (int i = 0; i < kRowGroups; ++i) s[i][j][e] = -Base::infinity();
        }
  }
  __device__ __forceinline__ void add_values(const Scores& p, const E* v, bool non_finite) {
    Products::template values<typename Shared::ValueTile>(this->o_, p, v, non_finite);
  }
  __device__ __forceinline__ void add_hidden_values(const Scores& p, int first, E* v, rules::Word word) {
    Base::add_hidden_values(p, first, v, [&](int, int key) { return word >> key & 1; });
  }
  __device__ __forceinline__ void join(int free_stage, bool seen) {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) this->seen_[i] = seen;
    Base::join(free_stage);
  }
};

/// DecodeRows, or the transposed variant (decode_narrow.cuh).
template <class E, class Sizes>
using PlainRowsOf =
    std::conditional_t<Sizes::kRowGroups == 1 && sizeof(E) == 2, NarrowDecodeRows<E, Sizes>, PlainDecodeRows<E, Sizes>>;

template <class E, class Sizes>
class PlainDecodeBlock : PlainRowsOf<E, Sizes> {
  using Base = PlainRowsOf<E, Sizes>;
  using Base::args_, Base::call_, Base::shared_, Base::warp_, Base::task_;
  static constexpr int kKeys = Sizes::kKeys, kDepth = Sizes::kDepth, kRows = Sizes::kRows, kWarps = Sizes::kWarps;
  static constexpr int kStages = Sizes::kStages, kNumbers = Base::kNumbers, kChunks = Base::kChunks;
  static constexpr int kStep = Base::kStep, kParts = Base::kParts;
  static_assert(kStages > 1);

 public:
  using typename Base::Shared;

  __device__ __forceinline__ PlainDecodeBlock(const DecodeArgs& args, Shared& shared) : Base(args, shared) {}

  __device__ __forceinline__ void run() {
    wait_for_kernel_before();
    let_next_kernel_begin();
    auto number = static_cast<std::int32_t>(blockIdx.x);
    bool begun = false;
#pragma unroll 1
    while (true) {
      if (!begun) {
        fill(number, false);
        begun = true;
      }
      this->begin(DecodeTask(args_, number, kRows, kDepth));
      if (args_.parts > 1 && !keys_of(task_, 0).more()) {
        this->leave_nothing(kRows);
      } else {
        load_few_queries<typename Shared::QueryTile, kRows, kDepth, Sizes::kThreads>(args_, task_, shared_.q);
        __syncthreads();
        this->take_queries();
        if (!attend(Known<false>(), false)) {
          attend_again(number);
          begun = false;
        }
        this->join(stage_ == 0 ? kStages - 1 : stage_ - 1, seen_);
      }
      number += static_cast<std::int32_t>(gridDim.x);
      if (number >= args_.tasks) break;
    }
  }

 private:
  /// A warp's keys of a task: every kWarps-th tile, so that a thread block reads neighbouring memory at one time.
  struct Keys {
    int key, end;
    __device__ __forceinline__ bool more() const { return key < end; }
    __device__ __forceinline__ void step() { key += kKeys * kWarps; }
  };

  __device__ __forceinline__ Keys keys_of(const DecodeTask& task, int warp) const {
    const auto span = span_of(args_, task);
    return {span.first + warp * kKeys, span.end};
  }

  // --- Keys and values ahead -----------------------------------------------------------------------------------------

  /// Moves on to a task that has keys for the warp.
  __device__ __forceinline__ void open(std::int32_t number) {
    for (; number < args_.tasks; number += static_cast<std::int32_t>(gridDim.x)) {
      const DecodeTask task(args_, number, kRows, kDepth);
      ahead_ = keys_of(task, warp_);
      if (!ahead_.more()) continue;
      k_ = this->lane_rows(call_.k, task, 0), v_ = this->lane_rows(call_.v, task, task.first_value);
      channels_ = call_.d_v - task.first_value;
      pages_ = call_.pages.table + task.b * call_.pages.batch;
      look_up_page();
      break;
    }
    number_ = number;
  }

  /// Called one step early, so that the copies need not wait for the page number.
  __device__ __forceinline__ void look_up_page() {
    if (!call_.paged) return;
    const auto n = static_cast<unsigned>(ahead_.key) / static_cast<unsigned>(call_.pages.page_size);
    page_ = pages_[n * call_.pages.page];
    page_row_ = ahead_.key - static_cast<int>(n) * call_.pages.page_size;
  }

  /// Fills all stages but one, from a task on. Nothing may be in flight before. alone: from no other task.
  __device__ __forceinline__ void fill(std::int32_t number, bool alone) {
    alone_ = alone;
    open(number);
#pragma unroll 1
    for (int n = 0; n + 1 < kStages; ++n) bring(n);
    stage_ = 0;
  }

  __device__ __forceinline__ void bring(int stage) {
    if (number_ < args_.tasks) {
      auto& to = shared_.stages[warp_][stage];
      bring_rows<typename Shared::KeyTile>(to.k, call_.k, k_, call_.d_qk);
      bring_rows<typename Shared::ValueTile>(to.v, call_.v, v_, channels_);
      ahead_.step();
      if (ahead_.more()) {
        look_up_page();
      } else {
        open(alone_ ? args_.tasks : number_ + static_cast<std::int32_t>(gridDim.x));
      }
    }
    copies_commit();
  }

  template <class Tile>
  __device__ __forceinline__ void bring_rows(E* to, const Rows& rows, const E* from, int channels) const {
    const int lane = static_cast<int>(lane_number()), left = ahead_.end - ahead_.key - lane / kChunks;
    if (call_.paged) {
      from += call_.pages.within(page_) * rows.batch + page_row_ * rows.sequence[2];
    } else {
      from += ahead_.key * rows.sequence[2];
    }
    const auto stride = kStep * rows.sequence[2];
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      const int channel = lane % kChunks * kNumbers + 32 * m * kNumbers;
      E* const place = to + Tile::at(lane / kChunks, channel);
      const E* row = from + 32 * m * kNumbers;
      if (channel < channels && ahead_.end - ahead_.key >= kKeys) {
#pragma unroll
        for (int n = 0; n < kKeys / kStep; ++n, row += stride) copy_16(place + n * kStep * Tile::kStride, row);
      } else {  // zeros in rows and channels that do not exist
#pragma unroll
        for (int n = 0; n < kKeys / kStep; ++n, row += stride) {
          if (channel < channels && n * kStep < left) {
            copy_16(place + n * kStep * Tile::kStride, row);
          } else {
            *reinterpret_cast<uint4*>(place + n * kStep * Tile::kStride) = uint4{0, 0, 0, 0};
          }
        }
      }
    }
  }

  // --- A task --------------------------------------------------------------------------------------------------------

  /// One pass over the warp's keys, as in DecodeBlock. False if the results are not finite.
  template <class NonFinite>
  __device__ __forceinline__ bool attend(NonFinite non_finite, bool halved) {
    this->clear_rows(halved);
    seen_ = false;
    const auto size = decode_keys(args_, task_.b);
#pragma unroll 1
    for (Keys now = keys_of(task_, warp_); now.more(); now.step()) {
      copies_wait<kStages - 2>();
      __syncwarp();  // the tile has arrived, and the one before is free
      bring(stage_ == 0 ? kStages - 1 : stage_ - 1);
      auto& tile = shared_.stages[warp_][stage_];
      typename Base::Scores s;
      this->find_scores(s, tile.k, non_finite);
      const auto word = word_of_keys<kKeys>(args_, now.key, size);
      if (word != rules::all_bits) this->hide(s, word);
      seen_ |= word != 0;
      this->softmax(s);
      if (non_finite) {
        this->halve(s);
        this->add_hidden_values(s, now.key, tile.v, word);
      }
      this->add_values(s, tile.v, non_finite);
      stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    }
    return !__any_sync(0xffffffffu, non_finite ? this->any_overflowed() : !this->finite());
  }

  /// The non-finite fallback; copies in flight are lost.
  __device__ __forceinline__ void attend_again(std::int32_t number) {
    bool halved = false;
#pragma unroll 1
    while (true) {
      copies_wait<0>();
      __syncwarp();
      fill(number, true);
      if (attend(Known<true>(), halved) || halved) break;
      halved = true;
    }
    copies_wait<0>();
    __syncwarp();
  }

  // The next tile to load; number_: its task's, or the number of tasks if nothing is left.
  std::int32_t number_;
  bool alone_;  // it does not go on to the next task
  Keys ahead_;
  const E *k_, *v_;
  std::int32_t channels_, page_, page_row_;  // channels_: of v
  const std::int32_t* pages_;
  int stage_;  // of the next tile to compute
  bool seen_;  // does the task's warp see a key?
};

}  // namespace anyflash::cuda
