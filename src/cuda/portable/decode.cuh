// Decoding, the forward pass for few query rows ("Flash-Decoding", Dao et al. 2023), from sm_75 up.
//
// PackGQA: the queries of all heads that share a key head are the rows of one task, so K and V are read once for them.
// Split-KV: the key blocks that they visit are split into parts, each a task. A thread block takes one task after the
// other, and its copies never pause: the next task's tiles are loaded while a task ends. Inside, every warp works
// alone. It takes kKeys keys at a time, loads them into its own tiles some steps ahead, and keeps O, the largest
// product and the sum of all rows in registers (decode_rows.cuh). The warps' results are joined in shared memory, over
// free stages. The parts' results are joined in global memory by a second kernel (decode_join.cuh). A part's first key
// does not depend on the batch, and joins have a fixed order, so results have the same bits in any batch. Bound by
// reading K and V.
//
// Results are divided by their sums wherever they are joined, so that no large numbers are added. A warp whose result
// is not finite repeats its keys by the non-finite fallback (not_finite.cuh), first for hidden values. If results are
// still not finite although their sums are, values near the end of their type may have overflowed. Then those rows are
// repeated with P scaled to sum to a half.
#pragma once

#include "cuda/portable/decode_rows.cuh"

namespace anyflash::cuda {

template <class E, class Sizes>
class DecodeBlock : DecodeRows<E, Sizes> {
  using Base = DecodeRows<E, Sizes>;
  using Base::args_, Base::call_, Base::shared_, Base::warp_, Base::task_, Base::shift_, Base::sum_, Base::seen_;
  using Base::kRowGroups, Base::kKeys, Base::kKeyTiles, Base::kDepth, Base::kValueTiles, Base::kRows, Base::kWarps;
  using Base::kStages, Base::kNumbers, Base::kChunks, Base::kStep, Base::kParts;
  using Base::o_;
  using Base::own_rows, Base::row_of, Base::softmax, Base::finite, Base::infinity;
  static constexpr int kTiles = 64 / kKeys;

 public:
  using typename Base::Products, typename Base::Results, typename Base::Shared, typename Base::Stage, typename Base::T;

  __device__ __forceinline__ DecodeBlock(const DecodeArgs& args, Shared& shared) : Base(args, shared) {}

  __device__ __forceinline__ void run() {
    wait_for_kernel_before();
    let_next_kernel_begin();
    auto number = static_cast<std::int32_t>(blockIdx.x);
    bool begun = false;
#pragma unroll 1
    while (true) {
      if (!begun) open(number, false), fill();
      begun = true;
      this->begin(DecodeTask(args_, number, kRows, kDepth));
      load_few_queries<typename Shared::QueryTile, kRows, kDepth, Sizes::kThreads>(args_, task_, shared_.q);
      __syncthreads();
      if (!attend(Known<false>(), false)) {
        attend_again(number);
        begun = false, stage_ = 0;
      }
      this->join(free_stage());
      number += static_cast<std::int32_t>(gridDim.x);
      if (number >= args_.tasks) break;
    }
  }

 private:
  // --- Keys and values -----------------------------------------------------------------------------------------------

  /// The next tile that the warp will load, over all tasks.
  struct Steps {
    std::int32_t number;  // the task's; the number of tasks: nothing is left
    bool alone;           // it does not go on to the next task
    DecodeTask task;
    BlockWalk<kWarps> walk;
    int tile;                 // in the key block
    std::int32_t size, page;  // the number of keys that exist; the tile's page, where there are pages
    const E *k, *v;           // the lane's first row and channels of the head; with pages, in the first page

    __device__ __forceinline__ bool more() const { return walk.more(); }
    __device__ __forceinline__ int first() const { return walk.block * 64 + tile * kKeys; }
  };

  __device__ __forceinline__ void open(std::int32_t number, bool alone) {
    ahead_.number = number, ahead_.alone = alone;
    if (number >= args_.tasks) return;
    ahead_.task = DecodeTask(args_, number, kRows, kDepth);
    const auto& task = ahead_.task;
    const DeviceRun* runs = &shared_.runs[warp_];
    std::int32_t count = 1;
    ahead_.size = decode_keys(args_, task.b);
    if (args_.by_length) {
      __syncwarp();
      if (lane_number() == 0) shared_.runs[warp_] = {0, (ahead_.size + 63) / 64, rules::TileClass::full, -1};
      __syncwarp();
    } else {
      const auto& runs_of_mask = group_of(call_, task.b, 0).keys_of_query_block;
      runs = runs_of_mask.runs + runs_of_mask.start[0];
      count = static_cast<std::int32_t>(runs_of_mask.start[1] - runs_of_mask.start[0]);
    }
    const bool last = task.part == args_.parts - 1;
    ahead_.walk =
        BlockWalk<kWarps>(runs, count, task.part * args_.part_blocks, last ? 0x7fffffff : args_.part_blocks, warp_);
    ahead_.tile = 0;
    ahead_.k = this->lane_rows(call_.k, task, 0), ahead_.v = this->lane_rows(call_.v, task, task.first_value);
    look_up_page();
  }

  /// Called one step early, so that the copies need not wait for the page number.
  __device__ __forceinline__ void look_up_page() {
    if (!call_.paged || !ahead_.more() || ahead_.first() >= ahead_.size) return;
    const auto n = static_cast<unsigned>(ahead_.first()) / static_cast<unsigned>(call_.pages.page_size);
    ahead_.page = call_.pages.table[ahead_.task.b * call_.pages.batch + n * call_.pages.page];
  }

  /// Fills all stages but one. Nothing may be in flight before.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int n = 0; n + 1 < kStages; ++n) bring(n);
    stage_ = 0;
  }

  __device__ __forceinline__ int free_stage() const { return stage_ == 0 ? kStages - 1 : stage_ - 1; }

  __device__ __forceinline__ void bring(int stage) {
    if (ahead_.number < args_.tasks) {
      DecodeTile tile{0, 0, ahead_.more(), false, false};
      if (tile.exists) {
        const auto left = ahead_.size - ahead_.walk.block * 64;
        tile.first = ahead_.first(), tile.words = args_.by_length ? left : ahead_.walk.words;
        tile.partial = args_.by_length ? left < 64 : ahead_.walk.partial();
        bring_tiles(shared_.stages[warp_][stage]);
        if (++ahead_.tile == kTiles || ahead_.first() >= ahead_.size) ahead_.tile = 0, ahead_.walk.step();
        look_up_page();
      }
      tile.last = !ahead_.more();
      if (lane_number() == 0) shared_.tiles[warp_][stage] = tile;
      if (tile.last) open(ahead_.alone ? args_.tasks : ahead_.number + static_cast<std::int32_t>(gridDim.x), false);
    }
    copies_commit();
  }

  __device__ __forceinline__ void bring_tiles(Stage& to) {
    const int first = ahead_.first(), first_value = ahead_.task.first_value;
    const bool neighbours = first + kKeys <= ahead_.size && (!call_.paged || call_.pages.page_size % kKeys == 0);
    if (call_.k.vectors && call_.v.vectors && neighbours && call_.whole_channels) {
      bring_rows<typename Shared::KeyTile>(to.k, call_.k, ahead_.k, call_.d_qk);
      bring_rows<typename Shared::ValueTile>(to.v, call_.v, ahead_.v, call_.d_v - first_value);
      return;
    }
    aside([&] {
      bring_any_rows<typename Shared::KeyTile, kKeys, kDepth>(call_, call_.k, ahead_.task, to.k, 0, call_.d_qk, first,
                                                              ahead_.size);
      bring_any_rows<typename Shared::ValueTile, kKeys, kDepth>(call_, call_.v, ahead_.task, to.v, first_value,
                                                                call_.d_v - first_value, first, ahead_.size);
    });
  }
  /// from: the lane's address, from lane_rows.
  template <class Tile>
  __device__ __forceinline__ void bring_rows(E* to, const Rows& rows, const E* from, int channels) const {
    const int lane = static_cast<int>(lane_number()), first = ahead_.first();
    if (call_.paged) {
      from += call_.pages.within(ahead_.page) * rows.batch + first % call_.pages.page_size * rows.sequence[2];
    } else {
      from += first * rows.sequence[2];
    }
    const auto stride = kStep * rows.sequence[2];
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      const int channel = lane % kChunks * kNumbers + 32 * m * kNumbers;
      E* const place = to + Tile::at(lane / kChunks, channel);
      if (channel < channels) {
        const E* row = from + 32 * m * kNumbers;
#pragma unroll
        for (int n = 0; n < kKeys / kStep; ++n, row += stride) copy_16(place + n * kStep * Tile::kStride, row);
      } else {
#pragma unroll
        for (int n = 0; n < kKeys / kStep; ++n)
          *reinterpret_cast<uint4*>(place + n * kStep * Tile::kStride) = uint4{0, 0, 0, 0};
      }
    }
  }

  // --- A task --------------------------------------------------------------------------------------------------------

  /// One pass over the warp's keys. non_finite: as the non-finite fallback. halved: P of rows that may have overflowed
  /// is scaled to sum to a half, using the maxima and sums of the pass before. False if the results are not finite.
  template <class NonFinite>
  __device__ __forceinline__ bool attend(NonFinite non_finite, bool halved) {
    this->clear_rows(halved);
    bool last;
    do {
      if constexpr (kStages == 1) {
        bring(0);
        copies_wait<0>();
      } else {
        copies_wait<kStages - 2>();
      }
      __syncwarp();  // the tile has arrived, and the one before is free
      if constexpr (kStages > 1) bring(free_stage());
      const auto tile = shared_.tiles[warp_][stage_];
      if (tile.exists) {
        if (tile.partial && tile.first % 64 == 0) {
          if (args_.by_length) {
            if (lane_number() < kRows) shared_.words[warp_][lane_number()] = rules::low_bits(tile.words);
          } else {
            aside([&] { find_few_words(args_, task_, kRows, tile.first / 64, tile.words, shared_.words[warp_]); });
          }
          __syncwarp();
        }
        take(tile, shared_.stages[warp_][stage_], non_finite);
      }
      stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
      last = tile.last;
      if constexpr (kStages == 1) __syncwarp();  // the tile is no longer read
    } while (!last);
    return !__any_sync(0xffffffffu, non_finite ? this->any_overflowed() : !finite());
  }

  /// The non-finite fallback; copies in flight are lost.
  __device__ __forceinline__ void attend_again(std::int32_t number) {
    bool halved = false;
#pragma unroll 1
    while (true) {
      copies_wait<0>();
      __syncwarp();
      open(number, true);
      fill();
      if (attend(Known<true>(), halved) || halved) break;
      halved = true;
    }
    copies_wait<0>();
    __syncwarp();
  }

  /// Runs a rare function that is called rather than inlined, with the rows' numbers in memory meanwhile. A call
  /// preserves few registers, and without this the loop around it would lack the others in every step.
  template <class Call>
  __device__ __forceinline__ void aside(const Call& call) {
    Results results;
    this->give(results);
    asm volatile("" ::"l"(&results) : "memory");
    call();
    asm volatile("" ::"l"(&results) : "memory");
    this->take_over(results);
  }
  // --- A tile --------------------------------------------------------------------------------------------------------

  template <class NonFinite>
  __device__ __forceinline__ void take(const DecodeTile& tile, Stage& rows, NonFinite non_finite) {
    T s[kRowGroups][kKeyTiles][2];
    Products::template scores<kRows, kDepth>(s, own_rows(), rows.k, non_finite);
    if (non_finite && !Products::exact_infinities)
      recompute_scores<Products, typename Shared::QueryTile, typename Shared::KeyTile, kDepth>(
          s, own_rows(), rows.k, this->template rows_not_finite<typename Shared::KeyTile>(rows.k));
    if (args_.general) finish_scores(s, tile.first);
    if (tile.partial) {
      hide(s, tile.first % 64);
    } else {
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) seen_[i] = true;
    }
    softmax(s);
    if (non_finite) {
      this->halve(s);
      this->add_hidden_values(s, tile.first, rows.v, [&](int i, int key) {
        return !tile.partial || shared_.words[warp_][row_of(i)] >> (tile.first % 64 + key) & 1;
      });
    }
    Products::template values<typename Shared::ValueTile>(o_, s, rows.v, non_finite);
  }

  __device__ __forceinline__ void finish_scores(T (&s)[kRowGroups][kKeyTiles][2], int first_key) {
    T local[kRowGroups][2 * kKeyTiles];
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) local[i][n] = s[i][n / 2][n % 2];
    aside([&] { finish_few_scores(args_, task_, first_key, local); });
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) s[i][n / 2][n % 2] = local[i][n];
  }

  __device__ __forceinline__ void hide(T (&s)[kRowGroups][kKeyTiles][2], int first_key) {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      const rules::Word whole = shared_.words[warp_][row_of(i)] >> first_key, word = whole >> (2 * (lane_number() % 4));
      seen_[i] |= (whole & (~0ull >> (64 - kKeys))) != 0;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(word >> (8 * j + e) & 1)) s[i][j][e] = -infinity();
    }
  }

  Steps ahead_;
  int stage_;  // of the next tile
};

}  // namespace anyflash::cuda
