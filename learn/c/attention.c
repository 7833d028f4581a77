/* FlashAttention-2 in one C99 file without dependencies, forward and backward.
 *
 *   cc -std=c99 -O3 -march=native -shared -fPIC attention.c -lm -o attention.so
 *
 * Tensors are float, row-major: q, out, dout, dq (heads, queries, d); k, v, dk, dv (heads, keys, d); lse (heads, queries).
 * d: 1 to 256. With another both functions return 1 and write nothing, else they return 0.
 * causal: query i sees the keys up to i. A query that sees no key has out 0 and lse -infinity.
 * Everything is as in learn/cpu/09_flash2.cpp and 17_backward_tiles.cpp, with plain loops that a compiler can make
 * vectors of: the innermost one always runs along a row, and its sums do not depend on each other. */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

enum { kBlock = 64, kMostChannels = 256 };

/* s (rows, kBlock) = x y^T of `rows` rows of x and `columns` of y, given transposed as (d, kBlock). */
static void multiply_transposed(int rows, int d, const float* x, const float* yt, float* s) {
  for (int i = 0; i < rows; ++i) {
    float sum[kBlock] = {0};
    for (int c = 0; c < d; ++c)
      for (int j = 0; j < kBlock; ++j) sum[j] += x[i * d + c] * yt[c * kBlock + j];
    memcpy(s + i * kBlock, sum, sizeof sum);
  }
}

/* A block of rows, transposed, with zeros behind the last. */
static void transpose(int rows, int d, const float* from, float* to) {
  for (int c = 0; c < d; ++c)
    for (int j = 0; j < kBlock; ++j) to[c * kBlock + j] = j < rows ? from[j * d + c] : 0;
}

static int at_most(int x, int most) { return x < most ? x : most; }

/* How many keys of a block that begins at j0 query i sees. */
static int seen_keys(int causal, int i, int j0, int count) {
  const int seen = causal ? at_most(i + 1 - j0, count) : count;
  return seen > 0 ? seen : 0;
}

int attention_forward(int heads, int queries, int keys, int d, int causal, const float* q, const float* k,
                      const float* v, float* out, float* lse) {
  if (d < 1 || d > kMostChannels) return 1;
  float kt[kMostChannels * kBlock], s[kBlock * kBlock], o[kBlock * kMostChannels];
  float m[kBlock], l[kBlock];
  const float scale = 1 / sqrtf((float)d);
  for (int h = 0; h < heads; ++h, k += (size_t)keys * d, v += (size_t)keys * d)
    for (int i0 = 0; i0 < queries; i0 += kBlock) {
      const int rows = at_most(kBlock, queries - i0);
      const size_t first = (size_t)h * queries + i0;
      for (int i = 0; i < rows; ++i) m[i] = -FLT_MAX, l[i] = 0;
      memset(o, 0, sizeof(float) * rows * d);
      for (int j0 = 0; j0 < (causal ? at_most(i0 + rows, keys) : keys); j0 += kBlock) {
        const int columns = at_most(kBlock, keys - j0);
        transpose(columns, d, k + (size_t)j0 * d, kt);
        multiply_transposed(rows, d, q + first * d, kt, s);
        for (int i = 0; i < rows; ++i) {
          float *row = s + i * kBlock, largest = m[i];
          const int seen = seen_keys(causal, i0 + i, j0, columns);
          for (int j = 0; j < seen; ++j) row[j] *= scale, largest = row[j] > largest ? row[j] : largest;
          const float factor = expf(m[i] - largest);
          l[i] *= factor, m[i] = largest;
          for (int c = 0; c < d; ++c) o[i * d + c] *= factor;
          for (int j = 0; j < seen; ++j) l[i] += row[j] = expf(row[j] - largest);
          for (int j = 0; j < seen; ++j)
            for (int c = 0; c < d; ++c) o[i * d + c] += row[j] * v[(size_t)(j0 + j) * d + c];
        }
      }
      for (int i = 0; i < rows; ++i) {
        for (int c = 0; c < d; ++c) out[(first + i) * d + c] = l[i] > 0 ? o[i * d + c] / l[i] : 0;
        lse[first + i] = l[i] > 0 ? m[i] + logf(l[i]) : -INFINITY;
      }
    }
  return 0;
}

int attention_backward(int heads, int queries, int keys, int d, int causal, const float* q, const float* k,
                       const float* v, const float* out, const float* lse, const float* dout, float* dq, float* dk,
                       float* dv) {
  if (d < 1 || d > kMostChannels) return 1;
  float kt[kMostChannels * kBlock], vt[kMostChannels * kBlock];
  float p[kBlock * kBlock], ds[kBlock * kBlock];
  const float scale = 1 / sqrtf((float)d);
  memset(dq, 0, sizeof(float) * heads * queries * d);
  memset(dk, 0, sizeof(float) * heads * keys * d);
  memset(dv, 0, sizeof(float) * heads * keys * d);
  for (int h = 0; h < heads; ++h)
    for (int j0 = 0; j0 < keys; j0 += kBlock) {
      const int columns = at_most(kBlock, keys - j0);
      const size_t key = (size_t)h * keys + j0;
      transpose(columns, d, k + key * d, kt);
      transpose(columns, d, v + key * d, vt);
      for (int i0 = causal ? j0 : 0; i0 < queries; i0 += kBlock) {
        const int rows = at_most(kBlock, queries - i0);
        const size_t first = (size_t)h * queries + i0;
        multiply_transposed(rows, d, q + first * d, kt, p);
        multiply_transposed(rows, d, dout + first * d, vt, ds);
        for (int i = 0; i < rows; ++i) {
          const float *x = q + (first + i) * d, *y = dout + (first + i) * d;
          const int seen = seen_keys(causal, i0 + i, j0, columns);
          float delta = 0, *to = dq + (first + i) * d;
          for (int c = 0; c < d; ++c) delta += y[c] * out[(first + i) * d + c];
          for (int j = 0; j < seen; ++j) {
            const float weight = expf(p[i * kBlock + j] * scale - lse[first + i]);
            const float derivative = weight * (ds[i * kBlock + j] - delta) * scale;
            float *to_k = dk + (key + j) * d, *to_v = dv + (key + j) * d;
            for (int c = 0; c < d; ++c) {
              to_v[c] += weight * y[c];
              to_k[c] += derivative * x[c];
              to[c] += derivative * k[(key + j) * d + c];
            }
          }
        }
      }
    }
  return 0;
}
