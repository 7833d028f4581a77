// The row terms that the backward pass needs, computed once per query row: delta = dO . O, dlse, lse, whether the row
// has a gradient at all, and the row's share of dsink.
//
// A thread block takes one query block of one head. delta is the diagonal of dO O^T, computed by the same products as
// dP = dO V^T. So the two cancel exactly where a query sees one key. Linear in the sequence.
#pragma once

#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {

template <class E, class Sizes>
class RowTermsBlock {
 public:
  using Products = typename ProductsOf<E, Sizes::kTf32>::type;
  using T = typename Products::Number;
  static constexpr int kRowGroups = Sizes::kRowGroups, kRows = Sizes::kRows, kThreads = Sizes::kThreads;
  static constexpr int kColumns = Sizes::kColumns, kTiles = kColumns / 8, kDepth = Sizes::kDepth;
  static_assert(kRows % kColumns == 0);
  using DoutTile = typename Products::template KeyTile<kRows, kDepth>;
  using OutTile = typename Products::template KeyTile<kColumns, kDepth>;

  struct Shared {
    alignas(Products::alignment) E dout[DoutTile::kSize];
    alignas(Products::alignment) E out[OutTile::kSize];
    T delta[64];
    double sink[64];
    unsigned long long live, large_lse;
  };

  __device__ __forceinline__ RowTermsBlock(const BackwardArgs& args, Shared& shared) : args_(args), shared_(shared) {
    const auto& side = args.sides[queries];
    block_ = static_cast<std::int32_t>(blockIdx.x % side.blocks);
    h_ = static_cast<std::int32_t>(blockIdx.x / side.blocks % side.heads);
    b_ = static_cast<std::int32_t>(blockIdx.x / side.blocks / side.heads);
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int first_row = 0; first_row < 64; first_row += kRows)
#pragma unroll 1
      for (int first = 0; first < kRows; first += kColumns) multiply(first_row, first);
    if (threadIdx.x == 0) shared_.live = shared_.large_lse = 0;
    __syncthreads();
    for (int row = threadIdx.x; row < 64; row += kThreads) store(row);
    __syncthreads();
    if (threadIdx.x != 0) return;
    args_.terms.live[blockIdx.x] = shared_.live, args_.terms.large_lse[blockIdx.x] = shared_.large_lse;
    if (!args_.terms.sink) return;
    double sum = 0;
    for (int row = 0; row < 64; ++row) sum += shared_.sink[row];
    args_.terms.sink[blockIdx.x] = sum;
  }

 private:
  /// delta of rows first_row + first .. + kColumns - 1.
  __device__ __forceinline__ void multiply(int first_row, int first) {
    T sum[kRowGroups][kTiles][2];
    for (int chunk = 0; chunk * kDepth < args_.channels[1]; ++chunk) {
      __syncthreads();
      load<DoutTile, kRows>(shared_.dout, args_.sides[queries].rows[1], first_row, chunk);
      load<OutTile, kColumns>(shared_.out, args_.out, first_row + first, chunk);
      copies_commit();
      copies_wait<0>();
      __syncthreads();
      T part[kRowGroups][kTiles][2];
      Products::template scores<kRows, kDepth>(part, shared_.dout, shared_.out);
      if constexpr (!Products::exact_infinities || Sizes::kTf32) {  // the largest numbers need the non-finite fallback
        if (__syncthreads_or(!finite(part))) {
          if constexpr (Sizes::kTf32) Products::template scores<kRows, kDepth>(part, shared_.dout, shared_.out, true);
          else recompute_scores<Products, DoutTile, OutTile, kDepth>(part, shared_.dout, shared_.out, 0);
        }
      }
      chunk == 0 ? copy(sum, part) : add(sum, part);
    }
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        const int row = Products::template row_of<kRowGroups>(i),
                  column = 8 * (n / 2) + 2 * (lane_number() % 4) + n % 2;
        if (row == first + column) shared_.delta[first_row + row] = sum[i][n / 2][n % 2];
      }
  }

  __device__ __forceinline__ static bool finite(const T (&x)[kRowGroups][kTiles][2]) {
    T zero = 0;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) zero += 0 * x[i][n / 2][n % 2];
    return zero == 0;
  }

  template <class To, int kCount>
  __device__ __forceinline__ void load(E* to, const Rows& rows, int first, int chunk) {
    const E* const data = head_data<E>(rows, b_, h_) + chunk * kDepth * rows.channel;
    const auto& side = args_.sides[queries];
    if constexpr (kSharedEvenly<kCount, kDepth, kThreads, E>) {
      const auto at = block_ * std::int64_t{64} + first;
      if (side.plain && rows.vectors && args_.channels[1] % (16 / sizeof(E)) == 0 && at + kCount <= side.grid.size[2]) {
        load_plain_rows<To, kCount, kDepth, kThreads>(to, data + at * rows.sequence[2], rows.sequence[2],
                                                      args_.channels[1] - chunk * kDepth);
        return;
      }
    }
    load_any_rows<To, kCount, kDepth, kThreads>(to, Source<E>{rows, data, args_.channels[1] - chunk * kDepth},
                                                rows_from(first));
  }
  __device__ __forceinline__ BlockRows rows_from(int first) const {
    const auto& side = args_.sides[queries];
    return {box_of(side.grid, side.plain, block_), side.grid.size, first};
  }

  __device__ __forceinline__ void store(int row) {
    Int3 c;
    T lse = 0, dlse = 0;
    const T delta = shared_.delta[row];
    double sink = 0;
    if (rows_from(0).coordinate(row, c)) {
      const auto query = rules::flat_index(c, args_.sides[queries].grid.size);
      const auto read = [&](const Numbers& of) {
        return reinterpret_cast<const T*>(of.data)[b_ * of.batch + h_ * of.head + query * of.query];
      };
      lse = read(args_.lse);
      if (lse == T(-1) / T(0)) {
        lse = 0;
      } else {
        atomicOr(&shared_.live, 1ull << row);
        if (abs(lse) >= T(kLargeLse<E>)) atomicOr(&shared_.large_lse, 1ull << row);
        if (args_.dlse.data) dlse = read(args_.dlse);
        if (args_.terms.sink) {
          const auto logit = read_number<T>(args_.sink, h_ * args_.sink.head);
          sink = exp(double(logit) - double(lse)) * (double(dlse) - double(delta));
        }
      }
    }
    const auto at = blockIdx.x * std::int64_t{64} + row;
    static_cast<T*>(args_.terms.lse)[at] = lse;
    static_cast<T*>(args_.terms.delta)[at] = delta;
    static_cast<T*>(args_.terms.dlse)[at] = dlse;
    static_cast<T*>(args_.terms.rest)[at] = 0;
    shared_.sink[row] = sink;
  }

  const BackwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, h_, block_;
};

}  // namespace anyflash::cuda
