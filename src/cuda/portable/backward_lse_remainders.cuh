// The remainder of a rounded lse. The rounding error of lse is an error of P = exp(S - lse). Where scores are large, P
// of a row may sum to anything between 1 / n and n instead of 1. For such rows (kLargeLse) this kernel first sums P over
// their keys. The logarithm of the sum is the remainder, which is subtracted after lse.
//
// Query blocks with such rows are distributed over the thread blocks of a launch that rarely has work. S is computed as
// in the gradients' kernel, to the bit.
#pragma once

#include "cuda/portable/backward.cuh"
#include "cuda/portable/softmax.cuh"

namespace anyflash::cuda {

template <class E, class Sizes>
class LseRemainderBlock : GradientBlock<E, Sizes> {
  using Base = GradientBlock<E, Sizes>;
  using Base::args_, Base::shared_, Base::kRowGroups, Base::kTiles, Base::kRows, Base::kColumns, Base::kThreads;
  using typename Base::Step, typename Base::Tile;

 public:
  using typename Base::Shared, typename Base::T;

  __device__ __forceinline__ LseRemainderBlock(const BackwardArgs& args, Shared& shared) : Base(args, shared) {
    this->role_ = Role::queries, this->own_ = queries;
  }

  __device__ __forceinline__ void run() {
    const auto& side = args_.sides[queries];
    const auto blocks = std::int64_t{args_.batch} * side.heads * side.blocks;
    // Each thread looks at one query block.
    for (std::int64_t first = blockIdx.x; first < blocks; first += std::int64_t{kThreads} * gridDim.x) {
      const auto own = first + std::int64_t{threadIdx.x} * gridDim.x;
      if (!__syncthreads_or(own < blocks && args_.terms.large_lse[own] != 0)) continue;
      for (std::int64_t n = 0, block = first; n < kThreads && block < blocks; ++n, block += gridDim.x)
        if (const auto large_lse = args_.terms.large_lse[block]) take(block, large_lse);
    }
  }

 private:
  /// number: a query block's, over all heads. large_lse: the rows to compute.
  __device__ __forceinline__ void take(std::int64_t number, Word large_lse) {
    if (threadIdx.x == 0 && args_.terms.any_large_lse) *args_.terms.any_large_lse = 1;
    for (int row = 0; row < 64; row += kRows) {
      if (!(large_lse >> row & (~0ull >> (64 - kRows)))) continue;
      __syncthreads();  // the last task's shared memory is about to be overwritten
      if (threadIdx.x == 0) describe(number, row);
      __syncthreads();
      load_program<kThreads>(this->group(), shared_.program);
      __syncthreads();
      bool non_finite = false;
      while (!attend(non_finite) && !non_finite) non_finite = true;
      store(number, large_lse);
    }
    if (!args_.terms.sink) return;
    __syncthreads();
    if (threadIdx.x == 0) store_sink(number);
  }

  __device__ __forceinline__ void describe(std::int64_t number, int row) {
    const auto& side = args_.sides[queries];
    auto& task = shared_.task;
    task.role = Role::queries, task.own = queries, task.result = 0, task.other_block = -1, task.entries = 1;
    task.first_part = (number % side.blocks * 64 + row) / kRows;
    task.first_h = static_cast<std::int32_t>(number / side.blocks % side.heads);
    task.first_b = static_cast<std::int32_t>(number / side.blocks / side.heads);
    Base::describe(0);
  }

  /// Sums P. non_finite: as the non-finite fallback. False if a sum is NaN, which the products may have caused.
  __device__ __forceinline__ bool attend(bool non_finite) {
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) sums_[i] = behind_[i] = 0;
    if (shared_.run_count > 0) {
      this->open_entry(true);
      this->walk_runs([&](const Step& step, const Walk<kColumns>& walk) { add(step, walk, non_finite); });
    }
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      sums_[i] = quad_sum(sums_[i]);
      nan |= sums_[i] != sums_[i];
    }
    return !__syncthreads_or(nan);
  }

  __device__ __forceinline__ void add(const Step& step, const Walk<kColumns>& walk, bool non_finite) {
    Tile s;
    if constexpr (!Sizes::kResident) {
      this->load_own(0, 0);
      this->load_other(step.stage, walk, 0, 0);
      this->arrive();
    }
    this->multiply(s, step, 0, non_finite);
    T derivatives[kRowGroups][2 * kTiles];
    this->finish(s, derivatives, step);
    const T scale = this->scale();
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      const Word word = this->word_of(step, i) >> (step.first + 2 * (lane_number() % 4));
      const T lse = step.stage.terms[0][shared_.task.first_row + this->row_of(i)];
      T sum = 0;
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        const T p = this->exponential(rounded_product(s[i][n / 2][n % 2], scale) - lse);
        if (word >> (n / 2 * 8 + n % 2) & 1) sum += p;
      }
      const double more = static_cast<double>(sum) + behind_[i], together = sums_[i] + more;
      behind_[i] = more - (together - sums_[i]);
      sums_[i] = together;
    }
  }

  __device__ __forceinline__ void store(std::int64_t number, Word large_lse) const {
    if (lane_number() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      const int row = shared_.task.first_row + this->row_of(i);
      if (!(large_lse >> row & 1)) continue;
      const auto at = number * 64 + row;
      const T lse = static_cast<const T*>(args_.terms.lse)[at];
      double sum = sums_[i];
      if (args_.sink.data) sum += exp(double(sink()) - double(lse));
      static_cast<T*>(args_.terms.rest)[at] = lse_remainder_of(lse, sum);
    }
  }
  __device__ __forceinline__ T sink() const { return read_number<T>(args_.sink, shared_.task.h * args_.sink.head); }

  /// log(sum), if it is small enough to be a rounding error of lse: half a unit in the last place, and a little for the
  /// sum itself. For 16-bit types more is allowed, since the forward pass may add a score's products in another order.
  /// A larger value means that lse covers more keys than this call has. Then lse is right, and the remainder is 0.
  __device__ __forceinline__ static T lse_remainder_of(T lse, double sum) {
    const T distance = nextafter(abs(lse), T(1) / T(0)) - abs(lse);
    const double rest = log(sum);
    return abs(rest) <= (sizeof(E) == 2 ? 2 : 0.75) * double(distance) ? static_cast<T>(rest) : T(0);
  }

  /// The query block's share of dsink, computed again.
  __device__ __forceinline__ void store_sink(std::int64_t number) const {
    const auto live = args_.terms.live[number];
    double sum = 0;
    for (int row = 0; row < 64; ++row) {
      if (!(live >> row & 1)) continue;
      const auto number_of = [&](const void* of) { return double(static_cast<const T*>(of)[number * 64 + row]); };
      const double p = exp(double(sink()) - number_of(args_.terms.lse) - number_of(args_.terms.rest));
      sum += p * (number_of(args_.terms.dlse) - number_of(args_.terms.delta));
    }
    args_.terms.sink[number] = sum;
  }

  double sums_[kRowGroups],
      behind_[kRowGroups];  // behind_: the sum's compensation (Kahan): it must be more accurate than lse
};

}  // namespace anyflash::cuda
