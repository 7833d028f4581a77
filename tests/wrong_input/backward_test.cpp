// Malformed calls of backward.
#include "call.h"

namespace anyflash::wrong_input {
namespace {

using Kind = Error::Kind;

TEST(WrongInputBackward, TheUnspoiltCallIsRight) {
  Call call;
  EXPECT_NO_THROW(call.backward());
}

TEST(WrongInputBackward, Inputs) {
  expect_errors(
      {
          {Kind::value, "query: not given", [](Call& c) { c.q = {}; }},
          {Kind::value, "dout: not given", [](Call& c) { c.inputs.dout = {}; }},
          {Kind::value, "out: not given", [](Call& c) { c.inputs.out = {}; }},
          {Kind::value, "lse: not given", [](Call& c) { c.inputs.lse = {}; }},
          {Kind::value, "dout: shape (2, 4, 8, 16), expected (2, 4, 8, 24)",
           [](Call& c) { c.inputs.dout = c.input({2, 4, 8, 16}); }},
          {Kind::type, "dout: type float64, expected float32 as in query",
           [](Call& c) { c.inputs.dout = c.input({2, 4, 8, 24}, ElementType::float64); }},
          {Kind::value, "out: rank 3, expected 4", [](Call& c) { c.inputs.out = c.input({2, 4, 8}); }},
          {Kind::value, "lse: shape (2, 4, 9), expected (2, 4, 8)", [](Call& c) { c.inputs.lse = c.input({2, 4, 9}); }},
          {Kind::type, "lse: type bfloat16, expected float32",
           [](Call& c) { c.inputs.lse = c.input({2, 4, 8}, ElementType::bfloat16); }},
          {Kind::value, "dlse: shape (2, 8, 4), expected (2, 4, 8)",
           [](Call& c) { c.inputs.dlse = c.input({2, 8, 4}); }},
          {Kind::value, "lse: data pointer null, expected 64 elements", [](Call& c) { c.inputs.lse.data = nullptr; }},
          {Kind::device, "dlse: on cuda:0, expected cpu",
           [](Call& c) { c.inputs.dlse = c.inputs.lse, c.inputs.dlse.device.kind = DeviceKind::cuda; }},
          {Kind::unsupported, "page_table: given to backward, expected keys and values without pages",
           [](Call& c) { c.use_pages(); }},
      },
      &Call::backward, &Call::ask_for_no_gradient);
}

TEST(WrongInputBackward, Gradients) {
  expect_errors(
      {
          {Kind::value, "dq: shape (2, 4, 8, 24), expected (2, 4, 8, 16)",
           [](Call& c) { c.gradients.dq = c.output({2, 4, 8, 24}); }},
          {Kind::type, "dq: type float16, expected float32 as in query",
           [](Call& c) { c.gradients.dq = c.output({2, 4, 8, 16}, ElementType::float16); }},
          {Kind::value, "dk: rank 3, expected 4 as in key", [](Call& c) { c.gradients.dk = c.output({2, 12, 16}); }},
          {Kind::value, "dv: shape (2, 2, 13, 24), expected (2, 2, 12, 24)",
           [](Call& c) { c.gradients.dv = c.output({2, 2, 13, 24}); }},
          {Kind::value, "dbias: given without bias", [](Call& c) { c.gradients.dbias = c.output({1, 1, 8, 12}); }},
          {Kind::value, "dbias: shape (1, 4, 8, 12), expected (1, 1, 8, 12)",
           [](Call& c) { c.options.bias = c.input({1, 1, 8, 12}), c.gradients.dbias = c.output({1, 4, 8, 12}); }},
          {Kind::type, "dbias: type float32, expected float64 as in bias",
           [](Call& c) {
             c.options.bias = c.input({1, 1, 8, 12}, ElementType::float64), c.gradients.dbias = c.output({1, 1, 8, 12});
           }},
          {Kind::value, "dsink: given without sink", [](Call& c) { c.gradients.dsink = c.output({4}); }},
          {Kind::value, "dsink: shape (5), expected (4)",
           [](Call& c) { c.options.sink = c.input({4}), c.gradients.dsink = c.output({5}); }},
          {Kind::value,
           "dk: strides (384, 0, 16, 1) for shape (2, 2, 12, 16), expected a place of its own for each element",
           [](Call& c) { c.gradients.dk.strides[1] = 0; }},
          {Kind::value, "dq: shares memory with query, expected memory of its own",
           [](Call& c) { c.gradients.dq = c.q; }},
          {Kind::value, "dq: shares memory with dout, expected memory of its own",
           [](Call& c) { c.gradients.dq.data = c.inputs.dout.data; }},
          {Kind::value, "dv: shares memory with dk, expected memory of its own",
           [](Call& c) { c.put_together(c.gradients.dk, c.gradients.dv, 0); }},
          {Kind::value, "dq: shares memory with lse, expected memory of its own",
           [](Call& c) { c.put_together(c.inputs.lse, c.gradients.dq, -1023); }},
          {Kind::value, "dk: given with layout qkv, expected dq to hold all three",
           [](Call& c) { c.use_layout_qkv(), c.gradients.dk = c.output({4, 8, 16}); }},
          {Kind::value, "dv: given with layout qkv, expected dq to hold all three",
           [](Call& c) { c.use_layout_qkv(), c.gradients.dv = c.output({4, 8, 16}); }},
          {Kind::value, "dq: rank 3, expected 4 as in query",
           [](Call& c) { c.use_layout_qkv(), c.gradients.dq = c.output({4, 8, 16}); }},
      },
      &Call::backward);
}

#if defined(ANYFLASH_HAS_CUDA)
/// With a GPU the pointers are looked at, without one the call ends before, as it does for a GPU that is not there.
TEST(WrongInputBackward, HostMemoryGivenAsThatOfAGpu) {
  const bool gpu = devices().size() > 1;
  for (const int index : {0, 1000, -1}) {
    Call call;
    for (auto* view : {&call.q, &call.k, &call.v, &call.inputs.dout, &call.inputs.out, &call.inputs.lse,
                       &call.gradients.dq, &call.gradients.dk, &call.gradients.dv})
      view->device = {DeviceKind::cuda, index};
    const auto before = call.bytes();
    try {
      call.backward();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Kind::device);
      const std::string line = error.what(), on = "query: on cuda:" + std::to_string(index) + ", ";
      if (!gpu) {
        EXPECT_TRUE(line.starts_with(on + "but ")) << line;  // no GPU, or too old a driver (gpu/old_driver_test.cpp)
      } else if (index == 0) {
        EXPECT_EQ(line, "dout: in host memory, expected memory of cuda:0");
      } else {
        EXPECT_TRUE(line.starts_with(on + "expected cuda:0")) << line;
      }
    }
    EXPECT_TRUE(call.bytes() == before) << "memory was written";
  }
}
#endif

}  // namespace
}  // namespace anyflash::wrong_input
