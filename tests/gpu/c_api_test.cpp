// The C API on tensors of a GPU: what it gives on those of the CPU.
#include <anyflash/c_api.h>

#include <algorithm>

#include "twins.h"

namespace anyflash {
namespace {

anyflash_tensor c_tensor(const TensorView& view) {
  anyflash_tensor tensor{view.data,
                         std::int32_t(view.type),
                         view.device.kind == DeviceKind::cuda ? ANYFLASH_CUDA : ANYFLASH_CPU,
                         view.device.index,
                         view.rank,
                         {},
                         {}};
  for (int i = 0; i < view.rank; ++i) tensor.shape[i] = view.shape[i], tensor.strides[i] = view.strides[i];
  return tensor;
}

TEST(GpuCApi, GivesWhatItGivesOnTheCpu) {
  for (const auto type : {ElementType::float16, ElementType::bfloat16, ElementType::float32, ElementType::float64}) {
    SCOPED_TRACE(element_name(type));
    constexpr std::int64_t h = 2, n = 100, d = 64;
    const auto rows = type == ElementType::float64 ? type : ElementType::float32;
    const Twins q(type, {1, h, n, d}, 0), k(type, {1, h, n, d}, 1), v(type, {1, h, n, d}, 2),
        dout(type, {1, h, n, d}, 3);
    const Twins out(type, {1, h, n, d}, -1), lse(rows, {1, h, n}, -1);
    const Twins dq(type, {1, h, n, d}, -1), dk(type, {1, h, n, d}, -1), dv(type, {1, h, n, d}, -1);
    anyflash_rule* rule = nullptr;
    ASSERT_EQ(anyflash_rule_causal(&rule), ANYFLASH_OK);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (auto place : {&Twins::cpu, &Twins::cuda}) {
      const auto of = [&](const Twins& twins) { return c_tensor(twins.*place); };
      const auto tq = of(q), tk = of(k), tv = of(v), tdout = of(dout), tout = of(out), tlse = of(lse), tdq = of(dq),
                 tdk = of(dk), tdv = of(dv);
      anyflash_options options = ANYFLASH_OPTIONS_INIT;
      options.rule = rule;
      options.stream = place == &Twins::cuda ? stream : nullptr;
      anyflash_plan* plan = nullptr;
      std::int64_t forward_bytes = 0, backward_bytes = 0;
      ASSERT_EQ(anyflash_plan_create(&tq, &tk, &tv, &options, &plan), ANYFLASH_OK) << anyflash_last_error();
      ASSERT_EQ(anyflash_plan_workspace(plan, &forward_bytes, &backward_bytes), ANYFLASH_OK);
      options.plan = plan;
      const Tensor memory(ElementType::uint8, {std::max(forward_bytes, backward_bytes)}, 0);
      const auto workspace = c_tensor(memory.view);
      if (place == &Twins::cuda) options.workspace = &workspace;
      const anyflash_outputs outputs{&tout, &tlse, nullptr, nullptr};
      const anyflash_backward_inputs inputs{&tdout, &tout, &tlse, nullptr};
      const anyflash_gradients gradients{&tdq, &tdk, &tdv, nullptr, nullptr};
      EXPECT_EQ(anyflash_forward(&tq, &tk, &tv, &outputs, &options), ANYFLASH_OK) << anyflash_last_error();
      EXPECT_EQ(anyflash_backward(&inputs, &tq, &tk, &tv, &gradients, &options), ANYFLASH_OK) << anyflash_last_error();
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      anyflash_plan_free(plan);
    }
    anyflash_rule_free(rule);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    out.expect_equal("out"), lse.expect_equal("lse");
    dq.expect_equal("dq"), dk.expect_equal("dk"), dv.expect_equal("dv");
  }
}

}  // namespace
}  // namespace anyflash
