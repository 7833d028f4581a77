// Rung 21: the backward pass as the formulas say, with P and dS in memory.
//
//   dV = P^T dO,   dP = dO V^T,   dS = P (dP - delta),   dQ = dS K / sqrt(d),   dK = dS^T Q / sqrt(d).
// P is exp(S - lse): the forward pass leaves one number for each query. delta of a row is the sum of dO O over its
// channels. Four kernels, each with a thread for each number of its result.
// Expected: a percent of the peak, as the textbook's forward pass.
// Measured (NVIDIA H200): d64 full 1.05; d64 causal 0.525; d128 full 1.08; d128 causal 0.54 TFLOP/s.
#include "device.h"

namespace {

// A warp for each query.
__global__ void find_delta(Attention p, float* delta) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.heads * p.queries) return;
  float sum = 0;
  for (int c = lane; c < p.d; c += 32) sum += p.dout[std::size_t(row) * p.d + c] * p.out[std::size_t(row) * p.d + c];
  for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
  if (lane == 0) delta[row] = sum;
}

// P and dS: (heads, queries, keys).
__global__ void weigh(Attention p, const float* delta, float* weights, float* ds) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y, h = blockIdx.z;
  if (i >= p.queries || j >= p.keys) return;
  const std::size_t row = std::size_t(h) * p.queries + i, key = (std::size_t(h) * p.keys + j) * p.d;
  const float scale = rsqrtf(float(p.d));
  float s = 0, dp = 0;
  for (int c = 0; c < p.d; ++c) {
    s += p.q[row * p.d + c] * p.k[key + c];
    dp += p.dout[row * p.d + c] * p.v[key + c];
  }
  const float weight = p.causal && j > i ? 0 : expf(s * scale - p.lse[row]);
  weights[row * p.keys + j] = weight;
  ds[row * p.keys + j] = weight * (dp - delta[row]) * scale;
}

__global__ void gradients_of_keys(Attention p, const float* weights, const float* ds) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y * blockDim.y + threadIdx.y, h = blockIdx.z;
  if (j >= p.keys || c >= p.d) return;
  float dk = 0, dv = 0;
  for (int i = 0; i < p.queries; ++i) {
    const std::size_t row = std::size_t(h) * p.queries + i;
    dv += weights[row * p.keys + j] * p.dout[row * p.d + c];
    dk += ds[row * p.keys + j] * p.q[row * p.d + c];
  }
  p.dk[(std::size_t(h) * p.keys + j) * p.d + c] = dk;
  p.dv[(std::size_t(h) * p.keys + j) * p.d + c] = dv;
}

__global__ void gradients_of_queries(Attention p, const float* ds) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y, h = blockIdx.z;
  if (i >= p.queries || c >= p.d) return;
  const std::size_t row = std::size_t(h) * p.queries + i;
  float dq = 0;
  for (int j = 0; j < p.keys; ++j) dq += ds[row * p.keys + j] * p.k[(std::size_t(h) * p.keys + j) * p.d + c];
  p.dq[row * p.d + c] = dq;
}

}  // namespace

extern "C" void rung(const Attention* p) {
  const std::size_t rows = std::size_t(p->heads) * p->queries;
  const DeviceArray<float> delta(rows), weights(rows * p->keys), ds(rows * p->keys);
  const dim3 block(32, 8);
  const int queries = blocks_of(p->queries, 8), keys = blocks_of(p->keys, 8), channels = blocks_of(p->d, 32);
  launch(find_delta, blocks_of(int(rows), 8), 256, 0, *p, delta.data);
  launch(weigh, dim3(blocks_of(p->keys, 32), queries, p->heads), block, 0, *p, delta.data, weights.data, ds.data);
  launch(gradients_of_keys, dim3(channels, keys, p->heads), block, 0, *p, weights.data, ds.data);
  launch(gradients_of_queries, dim3(channels, queries, p->heads), block, 0, *p, ds.data);
}
