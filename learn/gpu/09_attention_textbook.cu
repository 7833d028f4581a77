// Rung 9: textbook attention in three kernels: S = Q K^T, P = softmax(S), O = P V.
//
// Each kernel is one of the rungs before: a naive product, a softmax, a naive product. S and P are heads x queries x
// keys numbers in global memory, written and read twice: at 16 heads of 8192 tokens 4 GiB.
// Expected: a percent or two of the peak.
// Measured (NVIDIA H200): d64 full 0.855; d64 causal 0.428; d128 full 0.912; d128 causal 0.456 TFLOP/s.
#include "device.h"

namespace {

// S and P: (heads, queries, keys). Hidden pairs get -infinity.
__global__ void scores(Attention p, float* s) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y, h = blockIdx.z;
  if (i >= p.queries || j >= p.keys) return;
  const float *q = p.q + (std::size_t(h) * p.queries + i) * p.d, *k = p.k + (std::size_t(h) * p.keys + j) * p.d;
  float sum = 0;
  for (int c = 0; c < p.d; ++c) sum += q[c] * k[c];
  s[(std::size_t(h) * p.queries + i) * p.keys + j] = p.causal && j > i ? -INFINITY : sum * rsqrtf(float(p.d));
}

// A warp for each row.
__global__ void softmax(Attention p, float* s) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.heads * p.queries) return;
  float* x = s + std::size_t(row) * p.keys;
  float largest = -INFINITY, sum = 0;
  for (int j = lane; j < p.keys; j += 32) largest = fmaxf(largest, x[j]);
  for (int with = 16; with > 0; with /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, with));
  for (int j = lane; j < p.keys; j += 32) sum += x[j] = expf(x[j] - largest);
  for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
  for (int j = lane; j < p.keys; j += 32) x[j] /= sum;
  if (lane == 0) p.lse[row] = sum > 0 ? largest + logf(sum) : -INFINITY;
}

__global__ void values(Attention p, const float* s) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y, h = blockIdx.z;
  if (i >= p.queries || c >= p.d) return;
  const std::size_t row = std::size_t(h) * p.queries + i;
  const float* v = p.v + std::size_t(h) * p.keys * p.d + c;
  float sum = 0;
  for (int j = 0; j < p.keys; ++j) sum += s[row * p.keys + j] * v[std::size_t(j) * p.d];
  p.out[row * p.d + c] = sum;
}

}  // namespace

extern "C" void rung(const Attention* p) {
  const DeviceArray<float> s(std::size_t(p->heads) * p->queries * p->keys);
  const dim3 block(32, 8);
  const int rows = blocks_of(p->queries, 8);
  launch(scores, dim3(blocks_of(p->keys, 32), rows, p->heads), block, 0, *p, s.data);
  launch(softmax, blocks_of(p->heads * p->queries, 8), 256, 0, *p, s.data);
  launch(values, dim3(blocks_of(p->d, 32), rows, p->heads), block, 0, *p, s.data);
}
