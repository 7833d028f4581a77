// Boxes: parts of a sequence. A block (or a cell of 64 entries) has, in each dimension, an origin, an extent and a
// step.
//
// A sequence always has three dimensions here; a 1-dimensional one is (1, 1, n), a 2-dimensional one (1, y, x). An
// entry is its raw coordinate c (not yet aligned); its flat index is row-major in the sequence's size.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ANYFLASH_HD __host__ __device__ __forceinline__
// Called, not inlined: each kernel has one copy, however many calls it contains.
#define ANYFLASH_HD_CALL inline __host__ __device__ __noinline__
#else
#define ANYFLASH_HD inline
#define ANYFLASH_HD_CALL inline
#endif

// Before a loop: unrolled n times, 1: not at all. GPU compilers unroll rarely executed loops far too much.
#if defined(__CUDA_ARCH__)
#define ANYFLASH_PRAGMA(text) _Pragma(#text)
#define ANYFLASH_UNROLL(n) ANYFLASH_PRAGMA(unroll n)
#else
#define ANYFLASH_UNROLL(n)
#endif

namespace anyflash::rules {

struct Int3 {
  std::int32_t v[3];
  ANYFLASH_HD std::int32_t& operator[](int i) { return v[i]; }
  ANYFLASH_HD const std::int32_t& operator[](int i) const { return v[i]; }
  friend bool operator==(const Int3&, const Int3&) = default;
};

ANYFLASH_HD std::int64_t volume(Int3 size) { return std::int64_t(size[0]) * size[1] * size[2]; }

ANYFLASH_HD std::int64_t flat_index(Int3 c, Int3 size) {
  return (std::int64_t(c[0]) * size[1] + c[1]) * size[2] + c[2];
}

ANYFLASH_HD Int3 coordinate_of(std::int64_t flat, Int3 size) {
  const auto plane = std::int64_t(size[1]) * size[2];
  const auto rest = flat % plane;
  return {{std::int32_t(flat / plane), std::int32_t(rest / size[2]), std::int32_t(rest % size[2])}};
}

/// Entry e of a box (0 <= e < volume(extent), row-major in extent) is the coordinate origin + step * e_i in each
/// dimension. Entries beyond the sequence's size do not exist: their bits are 0, their rows are padding.
struct Box {
  Int3 origin, extent, step;

  ANYFLASH_HD Int3 entry(std::int32_t e) const {
    if (e < extent[2]) return {{origin[0], origin[1], origin[2] + step[2] * e}};  // without a division
    const auto e2 = e % extent[2], rest = e / extent[2];
    const auto e1 = rest % extent[1], e0 = rest / extent[1];
    return {{origin[0] + step[0] * e0, origin[1] + step[1] * e1, origin[2] + step[2] * e2}};
  }
};

ANYFLASH_HD bool inside(Int3 c, Int3 size) { return c[0] < size[0] && c[1] < size[1] && c[2] < size[2]; }

/// Entries of residue class r of a dimension.
ANYFLASH_HD std::int32_t class_length(std::int32_t size, std::int32_t residue, std::int32_t step) {
  return residue < size ? (size - residue + step - 1) / step : 0;
}

/// The part of a box that is in the sequence; its origin must be. True if that is less than the box.
ANYFLASH_HD bool clip(Box& box, Int3 size) {
  bool clipped = false;
  for (int i = 0; i < 3; ++i) {
    const auto present = class_length(size[i] - box.origin[i], 0, box.step[i]);
    if (present >= box.extent[i]) continue;
    box.extent[i] = present;
    clipped = true;
  }
  return clipped;
}

/// A sequence divided into equal boxes. In each dimension the entries fall into `step` residue classes, each class into
/// chunks of `extent` entries. The block index along a dimension is residue * chunks + chunk; blocks are numbered
/// row-major over that.
struct Grid {
  Int3 size, extent, step;

  ANYFLASH_HD std::int32_t chunks(int i) const {
    const auto in_class = (size[i] + step[i] - 1) / step[i];  // of residue 0, the longest class
    return (in_class + extent[i] - 1) / extent[i];
  }
  ANYFLASH_HD std::int32_t blocks(int i) const { return step[i] * chunks(i); }
  ANYFLASH_HD std::int64_t count() const { return std::int64_t(blocks(0)) * blocks(1) * blocks(2); }
  ANYFLASH_HD Box box(std::int32_t block) const {
    const Int3 b = coordinate_of(block, {{blocks(0), blocks(1), blocks(2)}});
    Box box{{}, extent, step};
    for (int i = 0; i < 3; ++i) {
      const auto residue = b[i] / chunks(i), chunk = b[i] % chunks(i);
      box.origin[i] = residue + chunk * extent[i] * step[i];
    }
    return box;
  }
};

}  // namespace anyflash::rules
