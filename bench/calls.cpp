// What a call costs beside the arithmetic: attention on tiny input, forward and backward.
#include <anyflash/anyflash.h>
#include <anyflash/devices.h>
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

struct Tiny {
  static constexpr std::int64_t b = 1, h = 1, s = 8, d = 16;
  std::vector<float> q = std::vector<float>(b * h * s * d, 0.5f), k = q, v = q, out = q, dout = q, dq = q, dk = q,
                     dv = q;
  std::vector<float> lse = std::vector<float>(b * h * s);
  static anyflash::TensorView view(std::vector<float>& x) {
    return {x.data(), anyflash::ElementType::float32, {b, h, s, d}};
  }
  anyflash::TensorView lse_view() { return {lse.data(), anyflash::ElementType::float32, {b, h, s}}; }
  anyflash::ForwardOutputs outputs() {
    anyflash::ForwardOutputs outputs;
    outputs.out = view(out);
    outputs.lse = lse_view();
    return outputs;
  }
};

void tiny_forward(benchmark::State& state) {
  Tiny tiny;
  anyflash::Options options;
  options.rule = anyflash::causal();
  for (auto _ : state) {
    anyflash::forward(tiny.view(tiny.q), tiny.view(tiny.k), tiny.view(tiny.v), tiny.outputs(), options);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(tiny_forward)->Unit(benchmark::kMicrosecond);

void tiny_backward(benchmark::State& state) {
  Tiny tiny;
  anyflash::Options options;
  options.rule = anyflash::causal();
  anyflash::forward(tiny.view(tiny.q), tiny.view(tiny.k), tiny.view(tiny.v), tiny.outputs(), options);
  anyflash::BackwardInputs inputs;
  inputs.dout = tiny.view(tiny.dout);
  inputs.out = tiny.view(tiny.out);
  inputs.lse = tiny.lse_view();
  anyflash::Gradients gradients;
  gradients.dq = tiny.view(tiny.dq);
  gradients.dk = tiny.view(tiny.dk);
  gradients.dv = tiny.view(tiny.dv);
  for (auto _ : state) {
    anyflash::backward(inputs, tiny.view(tiny.q), tiny.view(tiny.k), tiny.view(tiny.v), gradients, options);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(tiny_backward)->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) try {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("instruction_set", anyflash::instruction_set());
  if (benchmark::RunSpecifiedBenchmarks() > 0) return 0;
  std::fprintf(stderr, "bench_calls: no benchmark has such a name\n");
  return 1;
} catch (const anyflash::Error& error) {
  std::fprintf(stderr, "bench_calls: %s\n", error.what());
  return 1;
}
