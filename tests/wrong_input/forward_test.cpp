// Malformed calls of forward: one clear line each, nothing written.
#include <cmath>
#include <limits>

#include "call.h"

namespace anyflash::wrong_input {
namespace {

using Kind = Error::Kind;
constexpr std::int64_t huge = std::int64_t{1} << 61;

TEST(WrongInputForward, TheUnspoiltCallIsRight) {
  Call call;
  EXPECT_NO_THROW(call.forward());
  EXPECT_NO_THROW(call.make_plan());
}

TEST(WrongInputForward, QueryKeyValueAsTensors) {
  expect_errors(
      {
        {Kind::value, "query: not given", [](Call& c) { c.q = {}; }},
            {Kind::value, "key: not given", [](Call& c) { c.k = {}; }},
            {Kind::value, "value: not given", [](Call& c) { c.v = {}; }},
            {Kind::value, "query: rank 3, expected 4, 5 or 6 in layout bhsd",
             [](Call& c) { c.q = c.input({4, 8, 16}); }},
            {Kind::value, "query: rank 7, expected 4, 5 or 6 in layout bhsd",
             [](Call& c) { c.q = c.input({2, 4, 1, 1, 1, 8, 16}); }},
            {Kind::value, "query: rank 100, expected 4, 5 or 6 in layout bhsd", [](Call& c) { c.q.rank = 100; }},
            {Kind::value, "key: rank 5, expected 4 as in query", [](Call& c) { c.k = c.input({2, 2, 3, 4, 16}); }},
            {Kind::value, "value: rank 3, expected 4 as in query", [](Call& c) { c.v = c.input({2, 12, 24}); }},
            {Kind::type, "query: type int32, expected float16, bfloat16, float32 or float64",
             [](Call& c) { c.q = c.input({2, 4, 8, 16}, ElementType::int32); }},
            {Kind::type, "key: type float16, expected float32 as in query",
             [](Call& c) { c.k = c.input({2, 2, 12, 16}, ElementType::float16); }},
            {Kind::type, "value: type bfloat16, expected float32 as in query",
             [](Call& c) { c.v = c.input({2, 2, 12, 24}, ElementType::bfloat16); }},
            {Kind::type, "query: type unknown, expected float16, bfloat16, float32 or float64",
             [](Call& c) { c.q.type = static_cast<ElementType>(77); }},
#if defined(ANYFLASH_HAS_CUDA)
            {Kind::device, "key: on cpu, expected cuda:0",
#else
            {Kind::device, "query: on cuda:0, expected cpu, the only device of this build",
#endif
             [](Call& c) { c.q.device = {DeviceKind::cuda, 0}; }},
            {Kind::device, "value: on cuda:1, expected cpu", [](Call& c) { c.v.device = {DeviceKind::cuda, 1}; }},
      },
      &Call::forward, &Call::ask_for_shapes);
}

/// A workspace of 256-byte steps from the beginning of one piece of memory on.
TensorView workspace(Call& call, std::int64_t bytes) {
  auto view = call.input({bytes + 255}, ElementType::uint8);
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  view.data = reinterpret_cast<void*>((address + 255) / 256 * 256);
  view.shape[0] = bytes;
  return view;
}

TEST(WrongInputForward, Workspace) {
  const auto places = std::vector<Case>{
      {Kind::value, "workspace: rank 9, expected at most 8", [](Call& c) { c.options.workspace.rank = 9; }},
      {Kind::value, "workspace: strides (2) for shape (524288), expected memory without gaps, row by row",
       [](Call& c) {
         c.options.workspace = workspace(c, 1 << 20);
         c.options.workspace.shape[0] /= 2, c.options.workspace.strides[0] = 2;
       }},
      {Kind::value, "workspace: data pointer misaligned, expected a multiple of 256 bytes",
       [](Call& c) {
         c.options.workspace = workspace(c, 1 << 20);
         c.options.workspace.data = static_cast<char*>(c.options.workspace.data) + 128,
         c.options.workspace.shape[0] -= 128;
       }},
      {Kind::value, "workspace: data pointer null, expected 256 elements",
       [](Call& c) { c.options.workspace = TensorView(nullptr, ElementType::uint8, {256}); }},
      {Kind::value, "workspace: shape (-1), expected sizes from 0 to 2147483647",
       [](Call& c) {
         c.options.workspace = workspace(c, 256);
         c.options.workspace.shape[0] = -1;
       }},
      {Kind::device, "workspace: on cuda:0, expected cpu",
       [](Call& c) {
         c.options.workspace = workspace(c, 1 << 20);
         c.options.workspace.device.kind = DeviceKind::cuda;
       }},
      {Kind::value, "workspace: shares memory with value, expected memory of its own",
       [](Call& c) {
         c.options.workspace = workspace(c, 1 << 20);
         c.v.data = static_cast<char*>(c.options.workspace.data) + (1 << 19);
       }},
  };
  expect_errors(places, &Call::forward, &Call::backward);
}

TEST(WrongInputForward, AWorkspaceThatIsTooSmall) {
  Call known;
  known.options.threads = 1;
  const auto made = plan(known.q, known.k, known.v, known.options);
  for (const bool forward : {true, false}) {
    const auto bytes = forward ? made.forward_workspace() : made.backward_workspace();
    for (const auto given : {std::int64_t{0}, bytes - 1}) {
      const auto line = "workspace: " + std::to_string(given) + " bytes, expected at least " + std::to_string(bytes);
      expect_errors({{Kind::value, line.c_str(),
                      [&](Call& c) { c.options.threads = 1, c.options.workspace = workspace(c, given); }}},
                    forward ? &Call::forward : &Call::backward);
    }
  }
}

#if defined(ANYFLASH_HAS_CUDA)
/// With a GPU the pointers are looked at, without one the call ends before.
TEST(WrongInputForward, HostMemoryGivenAsThatOfAGpu) {
  Call call;
  for (auto* view :
       {&call.q, &call.k, &call.v, &call.outputs.out, &call.outputs.lse, &call.outputs.row_sum, &call.outputs.row_max})
    view->device = {DeviceKind::cuda, 0};
  try {
    call.forward();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::device);
    const std::string line = error.what();
    if (devices().size() > 1) {
      EXPECT_EQ(line, "query: in host memory, expected memory of cuda:0");
    } else {  // no GPU, or too old a driver (gpu/old_driver_test.cpp)
      EXPECT_TRUE(line.starts_with("query: on cuda:0, but ")) << line;
    }
  }
}
#endif

TEST(WrongInputForward, QueryKeyValueSizes) {
  expect_errors(
      {
          {Kind::value, "key: batch 1, expected 2 as in query", [](Call& c) { c.k = c.input({1, 2, 12, 16}); }},
          {Kind::value, "value: batch 3, expected 2 as in query", [](Call& c) { c.v = c.input({3, 2, 12, 24}); }},
          {Kind::value, "key: head size 72, expected 16 as in query", [](Call& c) { c.k = c.input({2, 2, 12, 72}); }},
          {Kind::value, "query: head size 0, expected 1 to 256", [](Call& c) { c.q = c.input({2, 4, 8, 0}); }},
          {Kind::value, "query: head size 257, expected 1 to 256", [](Call& c) { c.q = c.input({2, 4, 8, 257}); }},
          {Kind::value, "value: head size 513, expected 1 to 512", [](Call& c) { c.v = c.input({2, 2, 12, 513}); }},
          {Kind::value, "value: head size 0, expected 1 to 512", [](Call& c) { c.v = c.input({2, 2, 12, 0}); }},
          {Kind::value, "key: heads 3, expected a divisor of the 4 of query",
           [](Call& c) { c.k = c.input({2, 3, 12, 16}), c.v = c.input({2, 3, 12, 24}); }},
          {Kind::value, "key: heads 8, expected a divisor of the 4 of query",
           [](Call& c) { c.k = c.input({2, 8, 12, 16}), c.v = c.input({2, 8, 12, 24}); }},
          {Kind::value, "key: heads 0, expected a divisor of the 4 of query",
           [](Call& c) { c.k = c.input({2, 0, 12, 16}), c.v = c.input({2, 0, 12, 24}); }},
          {Kind::value, "value: heads 1, expected 2 as in key", [](Call& c) { c.v = c.input({2, 1, 12, 24}); }},
          {Kind::value, "value: keys 11, expected 12 as in key", [](Call& c) { c.v = c.input({2, 2, 11, 24}); }},
          {Kind::value, "value: sequence size 4, expected 3 as in key",
           [](Call& c) { c.use_two_dimensions(), c.v = c.input({2, 2, 4, 4, 24}); }},
      },
      &Call::forward, &Call::ask_for_shapes);
}

TEST(WrongInputForward, Memory) {
  expect_errors(
      {
          {Kind::value, "query: data pointer null, expected 1024 elements", [](Call& c) { c.q.data = nullptr; }},
          {Kind::value, "value: data pointer null, expected 1152 elements", [](Call& c) { c.v.data = nullptr; }},
          {Kind::value, "out: data pointer null, expected 1536 elements",
           [](Call& c) { c.outputs.out.data = nullptr; }},
          {Kind::value, "query: data pointer misaligned, expected a multiple of 4 bytes for float32",
           [](Call& c) { c.q.data = static_cast<char*>(c.q.data) + 2; }},
          {Kind::value, "query: shape (2, 4, -8, 16), expected sizes from 0 to 2147483647",
           [](Call& c) { c.q.shape[2] = -8; }},
          {Kind::value, "key: shape (2, 2, 2147483648, 16), expected sizes from 0 to 2147483647",
           [](Call& c) { c.k.shape[2] = std::int64_t{1} << 31; }},
          {Kind::value, "query: shape (2147483647, 2147483647, 8, 16), expected less than 2^62 bytes",
           [](Call& c) { c.q.shape[0] = c.q.shape[1] = 2147483647, c.q.strides[0] = c.q.strides[1] = 0; }},
          {Kind::value, "query: strides (512, 128, 2305843009213693952, 1), expected elements within the address space",
           [](Call& c) { c.q.strides[2] = huge; }},
          {Kind::value, "key: strides (384, 192, -9223372036854775808, 1), expected elements within the address space",
           [](Call& c) { c.k.strides[2] = std::numeric_limits<std::int64_t>::min(); }},
          {Kind::value, "value: strides (576, -100000000000000, 24, 1), expected elements within the address space",
           [](Call& c) { c.v.strides[1] = -100000000000000; }},
          {Kind::value, "query: shape (2, 4, 65536, 65536, 16), expected a sequence of at most 2147483647 entries",
           [](Call& c) {
             c.use_two_dimensions();
             c.q.shape[2] = c.q.shape[3] = 65536;
             c.q.strides[2] = c.q.strides[3] = 0;
           }},
      },
      &Call::forward);
}

TEST(WrongInputForward, Outputs) {
  expect_errors(
      {
          {Kind::value, "out: not given", [](Call& c) { c.outputs.out = {}; }},
          {Kind::value, "out: rank 3, expected 4", [](Call& c) { c.outputs.out = c.output({2, 4, 8}); }},
          {Kind::value, "out: shape (2, 4, 8, 16), expected (2, 4, 8, 24)",
           [](Call& c) { c.outputs.out = c.output({2, 4, 8, 16}); }},
          {Kind::type, "out: type float64, expected float32 as in query",
           [](Call& c) { c.outputs.out = c.output({2, 4, 8, 24}, ElementType::float64); }},
          {Kind::value, "lse: rank 4, expected 3", [](Call& c) { c.outputs.lse = c.output({2, 4, 8, 1}); }},
          {Kind::value, "lse: shape (2, 8, 4), expected (2, 4, 8)",
           [](Call& c) { c.outputs.lse = c.output({2, 8, 4}); }},
          {Kind::type, "lse: type float16, expected float32",
           [](Call& c) { c.outputs.lse = c.output({2, 4, 8}, ElementType::float16); }},
          {Kind::value, "row_sum: shape (2, 4, 9), expected (2, 4, 8)",
           [](Call& c) { c.outputs.row_sum = c.output({2, 4, 9}); }},
          {Kind::type, "row_max: type float64, expected float32",
           [](Call& c) { c.outputs.row_max = c.output({2, 4, 8}, ElementType::float64); }},
          {Kind::value,
           "out: strides (768, 192, 0, 1) for shape (2, 4, 8, 24), expected a place of its own for each element",
           [](Call& c) { c.outputs.out.strides[2] = 0; }},
          {Kind::value,
           "out: strides (768, 192, 23, 1) for shape (2, 4, 8, 24), expected a place of its own for each element",
           [](Call& c) { c.outputs.out.strides[2] = 23; }},
          {Kind::value,
           "out: strides (1600, 400, 44, 2) for shape (2, 4, 8, 24), expected a place of its own for each element",
           [](Call& c) {
             c.outputs.out = c.output({3200});
             c.outputs.out = TensorView(c.outputs.out.data, ElementType::float32, {2, 4, 8, 24}, {1600, 400, 44, 2});
           }},
          {Kind::value, "lse: strides (32, -7, 1) for shape (2, 4, 8), expected a place of its own for each element",
           [](Call& c) { c.outputs.lse.strides[1] = -7; }},
      },
      &Call::forward);
}

TEST(WrongInputForward, SharedMemory) {
  expect_errors(
      {
          {Kind::value, "out: shares memory with query, expected memory of its own",
           [](Call& c) {
             c.v = c.input({2, 2, 12, 16});
             c.outputs.out = c.q;
           }},
          {Kind::value, "out: shares memory with key, expected memory of its own",
           [](Call& c) { c.put_together(c.k, c.outputs.out, 767); }},
          {Kind::value, "lse: shares memory with value, expected memory of its own",
           [](Call& c) { c.outputs.lse.data = c.v.data; }},
          {Kind::value, "row_max: shares memory with row_sum, expected memory of its own",
           [](Call& c) { c.outputs.row_max.data = c.outputs.row_sum.data; }},
          {Kind::value, "row_sum: shares memory with out, expected memory of its own",
           [](Call& c) { c.put_together(c.outputs.out, c.outputs.row_sum, 1535); }},
          {Kind::value, "lse: shares memory with bias, expected memory of its own",
           [](Call& c) { c.options.bias = c.input({1, 4, 8, 1}), c.put_together(c.options.bias, c.outputs.lse, 0); }},
          {Kind::value, "lse: shares memory with a table of the rule, expected memory of its own",
           [](Call& c) {
             auto mask = c.input({2, 4, 8, 12}, ElementType::uint8);
             c.options.rule = causal() & dense(mask);
             c.outputs.lse.data = mask.data;
           }},
          {Kind::value,
           "out: shares memory with query, expected memory of its own",  // every other row of it, one element off
           [](Call& c) {
             auto both = c.input({2, 4, 8, 2, 24});
             c.q = TensorView(both.data, ElementType::float32, {2, 4, 8, 16}, {1536, 384, 48, 1});
             c.outputs.out = TensorView(static_cast<float*>(both.data) + 15, ElementType::float32, {2, 4, 8, 24},
                                        {1536, 384, 48, 1});
           }},
      },
      &Call::forward);
}

TEST(WrongInputForward, Numbers) {
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  expect_errors(
      {
          {Kind::value, "scale: nan, expected a finite float32", [=](Call& c) { c.options.scale = nan; }},
          {Kind::value, "scale: -inf, expected a finite float32", [=](Call& c) { c.options.scale = -infinity; }},
          {Kind::value, "scale: 1e+300, expected a finite float32", [](Call& c) { c.options.scale = 1e300; }},
          {Kind::value, "softcap: -1, expected 0 (none) or a positive float32",
           [](Call& c) { c.options.softcap = -1; }},
          {Kind::value, "softcap: nan, expected 0 (none) or a positive float32",
           [=](Call& c) { c.options.softcap = nan; }},
          {Kind::value, "softcap: inf, expected 0 (none) or a positive float32",
           [=](Call& c) { c.options.softcap = infinity; }},
          {Kind::value, "softcap: 1e-300, expected 0 (none) or a positive float32",
           [](Call& c) { c.options.softcap = 1e-300; }},
          {Kind::value, "threads: -1, expected 0 (all) to 65536", [](Call& c) { c.options.threads = -1; }},
          {Kind::value, "threads: 2147483648, expected 0 (all) to 65536",
           [](Call& c) { c.options.threads = std::int64_t{1} << 31; }},
          {Kind::value, "num_chunks_q: 3, expected a divisor of 8 queries: 1, 2, 4, 8",
           [](Call& c) { c.options.num_chunks_q = 3; }},
          {Kind::value, "num_chunks_q: 7, expected a divisor of 1000 queries: 1, 2, 4, 5, 8, ...",
           [](Call& c) { c.q = c.input({2, 4, 1000, 16}), c.options.num_chunks_q = 7; }},
          {Kind::value, "num_chunks_kv: 0, expected a divisor of 12 keys: 1, 2, 3, 4, 6, ...",
           [](Call& c) { c.options.num_chunks_kv = 0; }},
          {Kind::value, "num_chunks_kv: -1, expected a divisor of 12 keys: 1, 2, 3, 4, 6, ...",
           [](Call& c) { c.options.num_chunks_kv = -1; }},
          {Kind::value, "memory_budget: -1, expected a number of bytes", [](Call& c) { c.options.memory_budget = -1; }},
          {Kind::value, "threads: 1000000, expected 0 (all) to 65536", [](Call& c) { c.options.threads = 1000000; }},
          {Kind::value, "align: number 4, expected one of Align",
           [](Call& c) { c.options.align = static_cast<Align>(4); }},
          {Kind::value, "layout: number 9, expected one of Layout",
           [](Call& c) { c.options.layout = static_cast<Layout>(9); }},
      },
      &Call::forward, &Call::ask_for_shapes);
}

TEST(WrongInputForward, BiasSlopesSink) {
  expect_errors(
      {
          {Kind::value, "bias: rank 2, expected 4", [](Call& c) { c.options.bias = c.input({8, 12}); }},
          {Kind::value, "bias: shape (2, 4, 8, 11), expected (2, 4, 8, 12), or 1 in place of a size",
           [](Call& c) { c.options.bias = c.input({2, 4, 8, 11}); }},
          {Kind::value, "bias: shape (2, 2, 8, 12), expected (2, 4, 8, 12), or 1 in place of a size",
           [](Call& c) { c.options.bias = c.input({2, 2, 8, 12}); }},
          {Kind::type, "bias: type boolean, expected float16, bfloat16, float32 or float64",
           [](Call& c) { c.options.bias = c.input({1, 1, 8, 12}, ElementType::boolean); }},
          {Kind::value, "bias: data pointer null, expected 96 elements",
           [](Call& c) { c.options.bias = c.input({1, 1, 8, 12}), c.options.bias.data = nullptr; }},
          {Kind::value, "alibi_slopes: shape (3), expected (4)",
           [](Call& c) { c.options.alibi_slopes = c.input({3}); }},
          {Kind::value, "alibi_slopes: shape (1, 4), expected (2, 4)",
           [](Call& c) { c.options.alibi_slopes = c.input({1, 4}); }},
          {Kind::value, "alibi_slopes: rank 3, expected 1 (heads) or 2 (batch, heads)",
           [](Call& c) { c.options.alibi_slopes = c.input({1, 2, 4}); }},
          {Kind::type, "alibi_slopes: type float16, expected float32 or float64",
           [](Call& c) { c.options.alibi_slopes = c.input({4}, ElementType::float16); }},
          {Kind::value, "sink: shape (2), expected (4)", [](Call& c) { c.options.sink = c.input({2}); }},
          {Kind::value, "sink: rank 2, expected 1", [](Call& c) { c.options.sink = c.input({2, 4}); }},
          {Kind::type, "sink: type int64, expected float16, bfloat16, float32 or float64",
           [](Call& c) { c.options.sink = c.input({4}, ElementType::int64); }},
          {Kind::device, "a table of the rule: on cuda:0, expected cpu",
           [](Call& c) {
             auto mask = c.input({8, 12}, ElementType::boolean);
             mask.device.kind = DeviceKind::cuda;
             c.options.rule = dense(mask);
           }},
          {Kind::device, "sink: on cuda:0, expected cpu",
           [](Call& c) { c.options.sink = c.input({4}), c.options.sink.device.kind = DeviceKind::cuda; }},
      },
      &Call::forward);
}

TEST(WrongInputForward, KeyLengths) {
  expect_errors(
      {
          {Kind::value, "key_lengths: 13 for batch entry 1, expected 0 to 12",
           [](Call& c) { c.options.key_lengths = c.integers({12, 13}); }},
          {Kind::value, "key_lengths: -1 for batch entry 0, expected 0 to 12",
           [](Call& c) { c.options.key_lengths = c.integers({-1, 12}, ElementType::int64); }},
          {Kind::value, "key_lengths: shape (3), expected (2)",
           [](Call& c) { c.options.key_lengths = c.integers({1, 2, 3}); }},
          {Kind::type, "key_lengths: type float32, expected int32 or int64",
           [](Call& c) { c.options.key_lengths = c.input({2}); }},
          {Kind::value, "key_lengths: sequence dimensions 2, expected 1",
           [](Call& c) { c.use_two_dimensions(), c.options.key_lengths = c.integers({1, 2}); }},
          {Kind::value, "key_lengths: given with layout thd, expected cu_seqlens_k to tell the lengths",
           [](Call& c) { c.use_layout_thd(), c.options.key_lengths = c.integers({1}); }},
      },
      &Call::forward, &Call::ask_for_shapes);
}

TEST(WrongInputForward, Pages) {
  expect_errors(
      {
          {Kind::value, "key_lengths: not given, expected the lengths that go with page_table",
           [](Call& c) { c.use_pages(), c.options.key_lengths = {}; }},
          {Kind::value, "page_table: page 5 at (1, 0), expected 0 to 4",
           [](Call& c) { c.use_pages(), static_cast<std::int32_t*>(c.options.page_table.data)[3] = 5; }},
          {Kind::value, "page_table: page -1 at (1, 2), expected 0 to 4",
           [](Call& c) { c.use_pages(), static_cast<std::int32_t*>(c.options.key_lengths.data)[1] = 9; }},
          {Kind::value, "page_table: batch 1, expected 2 as in query",
           [](Call& c) { c.use_pages(), c.options.page_table.shape[0] = 1; }},
          {Kind::value, "page_table: rank 1, expected 2",
           [](Call& c) { c.use_pages(), c.options.page_table = c.integers({0, 1, 2}); }},
          {Kind::type, "page_table: type int64, expected int32",
           [](Call& c) { c.use_pages(), c.options.page_table = c.input({2, 3}, ElementType::int64); }},
          {Kind::value, "key: rank 5, expected 4 with a page_table",
           [](Call& c) { c.use_pages(), c.k = c.input({5, 4, 2, 16, 1}); }},
          {Kind::value, "value: page size 3, expected 4 as in key",
           [](Call& c) { c.use_pages(), c.v = c.input({5, 3, 2, 24}); }},
          {Kind::value, "value: pages 6, expected 5 as in key",
           [](Call& c) { c.use_pages(), c.v = c.input({6, 4, 2, 24}); }},
          {Kind::value, "key: page size 0, expected at least 1",
           [](Call& c) { c.use_pages(), c.k = c.input({5, 0, 2, 16}), c.v = c.input({5, 0, 2, 24}); }},
          {Kind::value, "page_table: sequence dimensions 2, expected 1",
           [](Call& c) { c.use_two_dimensions(), c.options.page_table = c.integers({0, 1}); }},
          {Kind::unsupported, "page_table: given with layout thd, expected bhsd, bshd or bhds",
           [](Call& c) { c.use_layout_thd(), c.options.page_table = c.integers({0, 1}); }},
          {Kind::value, "key_lengths: 13 for batch entry 0, expected 0 to 12",
           [](Call& c) { c.use_pages(), c.options.key_lengths = c.integers({13, 0}); }},
      },
      &Call::forward);
}

TEST(WrongInputForward, LayoutsQkvAndThd) {
  expect_errors(
      {
          {Kind::value, "key: given with layout qkv, expected query to hold all three",
           [](Call& c) { c.use_layout_qkv(), c.k = c.input({4, 8, 16}); }},
          {Kind::value, "value: given with layout qkv, expected query to hold all three",
           [](Call& c) { c.use_layout_qkv(), c.v = c.input({4, 8, 16}); }},
          {Kind::value, "page_table: given with layout qkv, expected keys outside query",
           [](Call& c) { c.use_layout_qkv(), c.options.page_table = c.integers({0}); }},
          {Kind::value, "query: first size 2, expected 3 (queries, keys, values)",
           [](Call& c) { c.use_layout_qkv(), c.q = c.input({2, 4, 8, 16}); }},
          {Kind::value, "query: rank 5, expected 4 in layout qkv",
           [](Call& c) { c.use_layout_qkv(), c.q = c.input({3, 4, 2, 4, 16}); }},
          {Kind::value, "out: shape (4, 8, 15), expected (4, 8, 16)",
           [](Call& c) { c.use_layout_qkv(), c.outputs.out = c.output({4, 8, 15}); }},
          {Kind::value, "lse: rank 3, expected 2",
           [](Call& c) { c.use_layout_qkv(), c.outputs.lse = c.output({1, 4, 8}); }},
          {Kind::value, "query: rank 4, expected 3 in layout thd",
           [](Call& c) { c.use_layout_thd(), c.q = c.input({1, 8, 4, 16}); }},
          {Kind::value, "cu_seqlens_q: not given, expected the cumulative lengths of layout thd",
           [](Call& c) { c.use_layout_thd(), c.options.cu_seqlens_q = {}; }},
          {Kind::value, "cu_seqlens_k: not given, expected the cumulative lengths of layout thd",
           [](Call& c) { c.use_layout_thd(), c.options.cu_seqlens_k = {}; }},
          {Kind::value, "cu_seqlens_k: given with layout bhsd, expected only with thd",
           [](Call& c) { c.options.cu_seqlens_k = c.integers({0, 12}); }},
          {Kind::type, "cu_seqlens_q: type float32, expected int32 or int64",
           [](Call& c) { c.use_layout_thd(), c.options.cu_seqlens_q = c.input({3}); }},
          {Kind::value, "cu_seqlens_q: rank 2, expected 1",
           [](Call& c) { c.use_layout_thd(), c.options.cu_seqlens_q = c.input({1, 3}); }},
          {Kind::value, "cu_seqlens_k: size 2, expected 3 as in cu_seqlens_q",
           [](Call& c) { c.use_layout_thd(), c.options.cu_seqlens_k = c.integers({0, 12}); }},
          {Kind::value, "cu_seqlens_q: shape (0), expected documents + 1 numbers",
           [](Call& c) { c.use_layout_thd(), c.options.cu_seqlens_q = c.integers({}); }},
      },
      &Call::forward);
}

}  // namespace
}  // namespace anyflash::wrong_input
