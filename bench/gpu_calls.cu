// What the host does for a call on tiny input on a GPU, forward and backward, and to launch a kernel that does nothing,
// which no call can do without: seconds, several times, as JSON. The GPU has enough to do meanwhile and nobody waits
// for it; between the times it catches up.
#include <anyflash/anyflash.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

using namespace anyflash;

constexpr std::int64_t s = 8, d = 16;
constexpr int calls = 200, times = 9;

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "bench_gpu_calls: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

struct Arguments {
  char bytes[1024];  // some as many as a call's kernel has
};
__global__ void nothing(const __grid_constant__ Arguments) {}

TensorView array(bool of_rows = false) {
  constexpr Device gpu{DeviceKind::cuda, 0};
  void* data = nullptr;
  must(cudaMalloc(&data, s * d * 4));
  must(cudaMemset(data, 0, s * d * 4));
  return of_rows ? TensorView(data, ElementType::float32, {1, 1, s}, gpu)
                 : TensorView(data, ElementType::float32, {1, 1, s, d}, gpu);
}

template <class Call>
void time(const char* name, const Call& call) {
  std::printf("\"%s\": [", name);
  for (int i = -2; i < times; ++i) {
    const auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < calls; ++n) call();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    must(cudaDeviceSynchronize());
    if (i >= 0) std::printf("%s%.9f", i > 0 ? ", " : "", passed.count() / calls);
  }
  std::printf("]");
}

}  // namespace

int main() {
  const auto q = array(), k = array(), v = array(), dout = array();
  Options options;
  options.rule = causal();
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  options.stream = stream;
  ForwardOutputs outputs;
  outputs.out = array(), outputs.lse = array(true);
  BackwardInputs inputs;
  inputs.dout = dout, inputs.out = outputs.out, inputs.lse = outputs.lse;
  Gradients gradients;
  gradients.dq = array(), gradients.dk = array(), gradients.dv = array();
  std::printf("{");
  time("launch", [&] {
    nothing<<<1, 128, 0, stream>>>(Arguments());
    must(cudaGetLastError());
  });
  std::printf(", ");
  time("forward", [&] { forward(q, k, v, outputs, options); });
  std::printf(", ");
  time("backward", [&] { backward(inputs, q, k, v, gradients, options); });
  std::printf("}\n");
}
