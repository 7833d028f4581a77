// Rung 20: blocks are boxes: a window in two dimensions.
//
// Changed: a pixel sees the pixels within `window` of it in both directions. 64 pixels in a row have such neighbours in
// 2 window - 1 rows, and most of each visited block is hidden. So a block is a box of 8 x 8 pixels, of queries and of
// keys. Only copies and results know it: they gather and scatter a box's rows. A word is two intervals of 8 bits.
// Expected: at window 8 a row of 64 pixels visits 15 or more blocks of 64, a box 9. Queries and keys: width * height.
// Measured (NVIDIA H200): width 64, window 8 45.1 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kBlock = 64, kThreads = 128;  // queries, and keys
constexpr float kLog2e = 1.44269504f;

using Word = unsigned long long;  // a bit for each key of a block of 64
enum class Class { skip, full, partial };

// A block is a box of 8 x 8 pixels: entry n of box (x, y) is pixel (8 x + n % 8, 8 y + n / 8).
struct Image {
  int width, height, window;
  __host__ __device__ int across() const { return blocks_of(width, 8); }
  __host__ __device__ int boxes() const { return across() * blocks_of(height, 8); }
  // Where entry n of a box is in the sequence; -1 if it lies outside the image.
  __device__ int pixel(int box, int n) const {
    const int x = box % across() * 8 + n % 8, y = box / across() * 8 + n / 8;
    return x < width && y < height ? y * width + x : -1;
  }
  // The pixels at from <= x < from + 8 whose distance from `at` is less than the window, as 8 bits.
  __device__ unsigned near(int at, int from, int size) const {
    const int low = max(at - window + 1 - from, 0), high = min(min(at + window, size) - from, 8);
    return low < high ? (0xffu >> (8 - (high - low))) << low : 0;
  }
  // What entry n of the box `of_queries` sees of the box `of_keys`.
  __device__ Word word(int of_queries, int n, int of_keys) const {
    const unsigned in_x = near(of_queries % across() * 8 + n % 8, of_keys % across() * 8, width);
    const unsigned in_y = near(of_queries / across() * 8 + n / 8, of_keys / across() * 8, height);
    Word rows = 0;  // a bit for each visible row of the box, in that row's byte
    for (int y = 0; y < 8; ++y) rows |= Word(in_y >> y & 1) << 8 * y;
    return rows * in_x;
  }
  // Boxes a and b of one dimension: how near and how far two of their pixels are.
  __device__ Class tile(int of_queries, int of_keys) const {
    const int x = abs(of_queries % across() - of_keys % across()), y = abs(of_queries / across() - of_keys / across());
    if (8 * x - 7 >= window || 8 * y - 7 >= window) return Class::skip;
    const bool inside = of_keys % across() * 8 + 8 <= width && of_keys / across() * 8 + 8 <= height;
    return inside && 8 * x + 7 < window && 8 * y + 7 < window ? Class::full : Class::partial;
  }
};

template <int d>
struct Tile {
  // Where the 16 bytes begin that hold this column, a multiple of 8.
  __device__ __forceinline__ half* at(int row, int column) { return numbers + row * d + (column / 8 ^ row % 8) * 8; }
  half numbers[kBlock * d];
};

template <int d>
struct Shared {
  Tile<d> k[2], v[2];
};

// Begins to copy the rows of a box; zeros outside the image.
template <int d>
__device__ __forceinline__ void copy_box(Tile<d>& to, const half* head, const Image& image, int box) {
  for (int n = threadIdx.x; n < kBlock * d / 8; n += kThreads) {
    const int row = n / (d / 8), c = n % (d / 8) * 8, pixel = image.pixel(box, row);
    copy_async(to.at(row, c), head + std::size_t(max(pixel, 0)) * d + c, pixel >= 0);
  }
}

// S = Q K^T. A lane passes the address of one row of one of the four matrices.
template <int d>
__device__ __forceinline__ void scores(float (&s)[kBlock / 8][4], const std::uint32_t (&q)[d / 16][4], Tile<d>& tile) {
  const int row = threadIdx.x % 8, matrix = threadIdx.x / 8 % 4;
  for (int j = 0; j < kBlock / 8; j += 2)
    for (int c = 0; c < d / 16; ++c) {
      std::uint32_t k[4];
      ldmatrix(k, tile.at(8 * (j + matrix / 2) + row, 16 * c + 8 * (matrix % 2)));
      mma(s[j], q[c], k[0], k[1]);
      mma(s[j + 1], q[c], k[2], k[3]);
    }
}

// O += P V.
template <int d>
__device__ __forceinline__ void values(float (&o)[d / 8][4], const float (&s)[kBlock / 8][4], Tile<d>& tile) {
  const int row = threadIdx.x % 8, matrix = threadIdx.x / 8 % 4;
  for (int j = 0; j < kBlock / 16; ++j) {
    const float *left = s[2 * j], *right = s[2 * j + 1];
    const std::uint32_t weights[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                                      pack(right[2], right[3])};
    for (int c = 0; c < d / 8; c += 2) {
      std::uint32_t v[4];
      ldmatrix_trans(v, tile.at(16 * j + 8 * (matrix % 2) + row, 8 * (c + matrix / 2)));
      mma(o[c], weights, v[0], v[1]);
      mma(o[c + 1], weights, v[2], v[3]);
    }
  }
}

// Joins the four lanes of a row.
template <class Join>
__device__ __forceinline__ float reduce_row(float x, const Join& join) {
  x = join(x, __shfl_xor_sync(~0u, x, 1));
  return join(x, __shfl_xor_sync(~0u, x, 2));
}

// row_max and row_sum of a lane's two rows. m is in units of the scores.
struct Rows {
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {};

  // Scores become weights, of a step more keys; o is rescaled.
  template <int tiles>
  __device__ __forceinline__ void step(float (&s)[kBlock / 8][4], float (&o)[tiles][4], float scale_log2) {
    for (int r = 0; r < 2; ++r) {
      float largest = m[r];
      for (int j = 0; j < kBlock / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
      const float shift = largest == -INFINITY ? 0 : largest * scale_log2;  // no key yet: exp2(-infinity - 0) = 0
      const float factor = exp2f(m[r] * scale_log2 - shift);
      m[r] = largest, l[r] *= factor;
      for (int j = 0; j < kBlock / 8; ++j)
        for (int e = 2 * r; e < 2 * r + 2; ++e) l[r] += s[j][e] = exp2f(fmaf(s[j][e], scale_log2, -shift));
      for (int c = 0; c < tiles; ++c) o[c][2 * r] *= factor, o[c][2 * r + 1] *= factor;
    }
  }
};

// pixels: the lane's two, -1 outside the image.
template <int d>
__device__ __forceinline__ void store(const AttentionOf<half>& p, const Rows& rows, const float (&o)[d / 8][4],
                                      const int (&pixels)[2]) {
  for (int r = 0; r < 2; ++r) {
    const float sum = reduce_row(rows.l[r], [](float a, float b) { return a + b; });
    if (pixels[r] < 0) continue;
    const std::size_t row = std::size_t(blockIdx.y) * p.queries + pixels[r];
    const float inverse = sum > 0 ? 1 / sum : 0;
    if (threadIdx.x % 4 == 0) p.lse[row] = sum > 0 ? rows.m[r] * rsqrtf(float(d)) + log2f(sum) / kLog2e : -INFINITY;
    for (int c = 0; c < d / 8; ++c)
      *reinterpret_cast<std::uint32_t*>(p.out + row * d + 8 * c + threadIdx.x % 4 * 2) =
          pack(o[c][2 * r] * inverse, o[c][2 * r + 1] * inverse);
  }
}

template <int d>
__global__ void __launch_bounds__(kThreads) flash(AttentionOf<half> p) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const Image image = {p.width, p.queries / p.width, p.window};
  const int box = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, entry = 16 * warp + lane / 4;
  const std::size_t head = std::size_t(blockIdx.y) * p.queries * d;
  copy_box<d>(shared.k[1], p.q + head, image, box);  // Q passes through K's place
  copies_commit();
  // The first box from `at` on that is not skipped.
  const auto visited = [&](int at) {
    while (at < image.boxes() && image.tile(box, at) == Class::skip) ++at;
    return at;
  };
  const auto copy_keys = [&](int at, int buffer) {
    copy_box<d>(shared.k[buffer], p.k + head, image, at);
    copy_box<d>(shared.v[buffer], p.v + head, image, at);
    copies_commit();
  };
  int next = visited(0), buffer = 0;
  copy_keys(next, 0);
  copies_wait<1>();  // Q is there; the first keys may be on their way
  __syncthreads();
  std::uint32_t q[d / 16][4];
  for (int c = 0; c < d / 16; ++c) ldmatrix(q[c], shared.k[1].at(16 * warp + lane % 16, 16 * c + lane / 16 * 8));

  float o[d / 8][4] = {};
  Rows rows;
  for (int keys = next; keys < image.boxes(); keys = next, buffer ^= 1) {
    next = visited(keys + 1);
    copies_wait<0>();
    __syncthreads();  // of all threads
    if (next < image.boxes()) copy_keys(next, buffer ^ 1);
    float s[kBlock / 8][4] = {};
    scores<d>(s, q, shared.k[buffer]);
    if (image.tile(box, keys) == Class::partial) {
      for (int r = 0; r < 2; ++r) {
        const Word seen = image.word(box, entry + 8 * r, keys) >> 2 * (lane % 4);
        for (int j = 0; j < kBlock / 8; ++j)
          for (int e = 0; e < 2; ++e)
            if (!(seen >> (8 * j + e) & 1)) s[j][2 * r + e] = -INFINITY;
      }
    }
    rows.step(s, o, kLog2e * rsqrtf(float(d)));
    values<d>(o, s, shared.v[buffer]);
  }
  store<d>(p, rows, o, {image.pixel(box, entry), image.pixel(box, entry + 8)});
}

}  // namespace

extern "C" void rung(const AttentionOf<half>* p) {
  const dim3 grid(Image{p->width, p->queries / p->width, p->window}.boxes(), p->heads);
  const int bytes = p->d == 64 ? sizeof(Shared<64>) : sizeof(Shared<128>);
  launch(p->d == 64 ? flash<64> : flash<128>, grid, kThreads, bytes, *p);
}
