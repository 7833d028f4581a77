// Copies of rows between a tensor's memory (any strides, with or without pages) and shared memory, and accesses to
// single numbers of any type.
#pragma once

#include "cuda/common/instructions.cuh"
#include "cuda/portable/args.h"

namespace anyflash::cuda {

/// The offset of rows that do not exist. (Strides may be negative, and so may offsets.)
inline constexpr std::int64_t nowhere = INT64_MIN;

/// Element i of a tensor of any floating-point type.
template <class T>
__device__ __forceinline__ T read_number(const Numbers& numbers, std::int64_t i) {
  switch (numbers.type) {
    case 0: return static_cast<T>(__half2float(reinterpret_cast<const __half*>(numbers.data)[i]));
    case 1: return static_cast<T>(__bfloat162float(reinterpret_cast<const __nv_bfloat16*>(numbers.data)[i]));
    case 2: return static_cast<T>(reinterpret_cast<const float*>(numbers.data)[i]);
    default: return static_cast<T>(reinterpret_cast<const double*>(numbers.data)[i]);
  }
}

template <class E, class T>
__device__ __forceinline__ E rounded(T x) {
  return static_cast<E>(x);
}
template <>
__device__ __forceinline__ __half rounded(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 rounded(float x) {
  return __float2bfloat16_rn(x);
}
/// Element i of a tensor of any floating-point type becomes x.
template <class T>
__device__ __forceinline__ void write_number(const Numbers& numbers, std::int64_t i, T x) {
  switch (numbers.type) {
    case 0: reinterpret_cast<__half*>(numbers.data)[i] = __float2half_rn(static_cast<float>(x)); break;
    case 1: reinterpret_cast<__nv_bfloat16*>(numbers.data)[i] = __float2bfloat16_rn(static_cast<float>(x)); break;
    case 2: reinterpret_cast<float*>(numbers.data)[i] = static_cast<float>(x); break;
    default: reinterpret_cast<double*>(numbers.data)[i] = static_cast<double>(x);
  }
}
template <class E>
__device__ __forceinline__ E zero() {
  return rounded<E>(0.0f);
}
template <>
__device__ __forceinline__ double zero<double>() {
  return 0.0;
}

/// Entry e of a box whose extents are powers of two, as those of blocks are.
__device__ __forceinline__ rules::Int3 entry_of(const rules::Box& box, int e) {
  const int log_x = 31 - __clz(box.extent[2]), log_y = 31 - __clz(box.extent[1]);
  const int x = e & (box.extent[2] - 1), y = e >> log_x & (box.extent[1] - 1), z = e >> (log_x + log_y);
  return {{box.origin[0] + box.step[0] * z, box.origin[1] + box.step[1] * y, box.origin[2] + box.step[2] * x}};
}

/// A block of a grid. plain: its rows are consecutive, so the box is known without divisions.
__device__ __forceinline__ rules::Box box_of(const rules::Grid& grid, bool rows, std::int32_t block) {
  if (rows) return {{{0, 0, block * grid.extent[2]}}, grid.extent, grid.step};
  return grid.box(block);
}

/// The same, called: inlined, a kernel would contain the divisions many times.
static __device__ __noinline__ rules::Box called_box_of(const rules::Grid& grid, std::int32_t block) {
  return grid.box(block);
}
__device__ __forceinline__ rules::Box rare_box_of(const rules::Grid& grid, bool rows, std::int32_t block) {
  return rows ? box_of(grid, true, block) : called_box_of(grid, block);
}

/// The source of a tile: rows of one head of a tensor.
template <class E>
struct Source {
  const Rows& rows;
  const E* data;  // of (b, h), from the first wanted channel on
  int channels;   // of a row, from that channel on
};

/// Loads the channels of each row into `to` (a Tile), with zeros up to kWidth and in rows that do not exist. All
/// threads take part; the copies are not waited for. It is called, not inlined: the divisions for boxes and pages would
/// halve the speed of a kernel with them in its main loop.
template <class Tile, int kRows, int kWidth, int kThreads, class E, class Places>
__device__ __noinline__ void load_any_rows(E* to, const Source<E>& from, const Places& places) {
  const auto& rows = from.rows;
  constexpr int kNumbers = 16 / sizeof(E), kChunks = kWidth / kNumbers;
  if (rows.vectors) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, channel = i % kChunks * kNumbers;
      std::int64_t at;
      const bool exists = places.find(rows, row, at);
      const int wanted = exists ? min(max(from.channels - channel, 0), kNumbers) : 0;
      copy_16(to + Tile::at(row, channel), wanted > 0 ? from.data + at + channel : from.data, wanted * int(sizeof(E)));
    }
    return;
  }
  const bool along_rows = rows.channel != 1 && rows.sequence[2] == 1;  // neighbouring threads, neighbouring elements
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kWidth; i += kThreads) {
    const int row = along_rows ? i % kRows : i / kWidth, channel = along_rows ? i / kRows : i % kWidth;
    std::int64_t at;
    const bool exists = places.find(rows, row, at) && channel < from.channels;
    to[Tile::at(row, channel)] = exists ? from.data[at + channel * rows.channel] : zero<E>();
  }
}

/// Can a thread block's threads share such a tile evenly? Not the small tiles of the largest rows.
template <int kRows, int kWidth, int kThreads, class E>
inline constexpr bool kSharedEvenly =
    kThreads % (kWidth * sizeof(E) / 16) == 0 &&
    kRows % (kThreads / (kWidth * sizeof(E) / 16) + (kThreads < kWidth * sizeof(E) / 16)) == 0;

/// The same for kRows consecutive rows that all exist, in whole vectors and channels: the common case, in few
/// instructions. at: the first row.
template <class Tile, int kRows, int kWidth, int kThreads, class E>
__device__ __forceinline__ void load_plain_rows(E* to, const E* at, std::int64_t stride, int channels) {
  constexpr unsigned kNumbers = 16 / sizeof(E), kChunks = kWidth / kNumbers;
  // A thread copies the same channels of every kStep-th row.
  constexpr unsigned kStep = kThreads / kChunks;
  static_assert(kSharedEvenly<kRows, kWidth, kThreads, E>);
  const unsigned row = threadIdx.x / kChunks, channel = threadIdx.x % kChunks * kNumbers;
  // The destinations repeat after a period of rows.
  constexpr unsigned kPlaces = Tile::kPeriod > kStep ? Tile::kPeriod / kStep : 1;
  E* places[kPlaces];
#pragma unroll
  for (unsigned n = 0; n < kPlaces; ++n) places[n] = to + Tile::at(row + n * kStep, channel);
  const auto place = [&](unsigned n) { return places[n % kPlaces] + n / kPlaces * kPlaces * kStep * Tile::kRowStep; };
  static_assert(kPlaces * kStep % Tile::kPeriod == 0);
  if (static_cast<int>(channel) < channels) {
    at += row * stride + channel;
#pragma unroll
    for (unsigned n = 0; n < kRows / kStep; ++n, at += kStep * stride) copy_16(place(n), at);
  } else {
#pragma unroll
    for (unsigned n = 0; n < kRows / kStep; ++n) *reinterpret_cast<uint4*>(place(n)) = uint4{0, 0, 0, 0};
  }
}

/// The reverse, by one warp: stores the kRows rows at `from`. Row 0 of them is row `first` of `places`.
template <int kRows, int kWidth, int kStride, class E, class Places>
__device__ __noinline__ void store_rows(const E* from, const Rows& rows, E* data, const Places& places, int first,
                                        int channels) {
  constexpr int kNumbers = 16 / sizeof(E), kChunks = kWidth / kNumbers;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool along_rows = rows.channel != 1 && rows.sequence[2] == 1;
#pragma unroll 1
  for (int i = lane; i < kRows * kChunks; i += 32) {
    const int row = along_rows ? i % kRows : i / kChunks, channel = (along_rows ? i / kRows : i % kChunks) * kNumbers;
    std::int64_t at;
    if (!places.find(rows, first + row, at) || channel >= channels) continue;
    const E* const source = from + row * kStride + channel;
    if (rows.vectors && channel + kNumbers <= channels) {
      *reinterpret_cast<uint4*>(data + at + channel) = *reinterpret_cast<const uint4*>(source);
      continue;
    }
    for (int n = 0; n < kNumbers; ++n)
      if (channel + n < channels) data[at + (channel + n) * rows.channel] = source[n];
  }
}

/// The same for consecutive rows that all exist and have at least kWidth channels, in whole vectors. at: the first row.
template <int kRows, int kWidth, int kStride, class E>
__device__ __forceinline__ void store_plain_rows(const E* from, E* at, std::int64_t stride) {
  constexpr int kNumbers = 16 / sizeof(E), kChunks = kWidth / kNumbers;
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 4
  for (int i = lane; i < kRows * kChunks; i += 32) {
    const int row = i / kChunks, channel = i % kChunks * kNumbers;
    *reinterpret_cast<uint4*>(at + row * stride + channel) =
        *reinterpret_cast<const uint4*>(from + row * kStride + channel);
  }
}

}  // namespace anyflash::cuda
