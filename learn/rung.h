// The arguments of every rung. A rung is one file with one function, `rung`, which takes one of these structures.
//
// Numbers are float32, tensors are row-major without gaps. learn/climb builds a rung, checks it against float64 and
// times it.
#pragma once

struct Matmul {  // C = A B
  int rows, columns, depth;
  const float *a, *b;  // (rows, depth), (depth, columns)
  float* c;            // (rows, columns)
};

struct Softmax {  // y = exp(x) / sum of exp(x), for each row
  int rows, columns;
  const float* x;
  float* y;
};

// out = softmax(q k^T / sqrt(d)) v, lse = log of the sum of exp of a row's scores. A query that sees no key has out 0
// and lse -infinity. backward: dq, dk, dv of a loss whose gradient with respect to out is dout.
// T: float; half in the GPU's rungs for tensor cores, where d is 64 or 128.
template <class T>
struct AttentionOf {
  int heads, queries, keys, d;
  int causal;          // 1: query i sees the keys up to i, 0: all
  int window;          // mask rungs. 1-D: query i sees the keys j with i - window < j <= i.
  int width;           // 2-D rung: an image so many pixels wide; |x - x'| < window and |y - y'| < window
  const T *q, *k, *v;  // (heads, queries, d), (heads, keys, d), (heads, keys, d)
  T* out;              // (heads, queries, d): result of forward, argument of backward
  float* lse;          // (heads, queries): likewise
  const T* dout;       // backward alone, as q
  T *dq, *dk, *dv;     // as q, k, v
};
using Attention = AttentionOf<float>;
