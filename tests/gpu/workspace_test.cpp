// A workspace of the caller's on a GPU: the same bits in it as without it, nothing written beside it and no memory of
// the library's own, for every way that a call takes.
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tensor.h"

namespace anyflash {
namespace {

using Results = std::vector<std::vector<unsigned char>>;
using Integers = std::vector<std::int32_t>;

/// A call of both passes, and what else it is given.
struct Call {
  ElementType type;
  std::int64_t queries, keys, d, heads = 2, batch = 1;
  std::function<void(Call&)> add{};  ///< to the options
  bool backward = true;
  Options options{};
  TensorView k_view{}, v_view{};  ///< if not as usual
  TensorView dbias{};             ///< of the last of `more`
  std::vector<Tensor> more{};
  std::vector<Integers> on_host{};

  TensorView device_integers(Integers numbers) {
    more.emplace_back(ElementType::int32, std::initializer_list<std::int64_t>{std::int64_t(numbers.size())}, 0);
    EXPECT_EQ(cudaMemcpy(more.back().view.data, numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // such a copy may end after the call
    return more.back().view;
  }
  TensorView host_integers(Integers numbers) {
    on_host.push_back(std::move(numbers));
    return TensorView(on_host.back().data(), ElementType::int32, {std::int64_t(on_host.back().size())});
  }
};

/// Memory of the GPU with 256 bytes before and behind the workspace that nobody may write.
struct Guarded {
  static constexpr std::int64_t guard = 256;
  static constexpr int pattern = 0xa5;
  std::int64_t bytes;
  Tensor memory;

  explicit Guarded(std::int64_t bytes) : bytes(bytes), memory(ElementType::uint8, {bytes + 2 * guard}, pattern) {}
  TensorView view() const {
    return TensorView(static_cast<char*>(memory.view.data) + guard, ElementType::uint8, {bytes}, gpu);
  }
  void expect_guards() const {
    const auto found = memory.bytes();
    for (std::int64_t i = 0; i < guard; ++i) {
      ASSERT_EQ(found[i], pattern) << i << " before";
      ASSERT_EQ(found[guard + bytes + i], pattern) << i << " behind";
    }
  }
};

const std::map<std::string, std::function<Call()>>& calls() {
  using enum ElementType;
  static const std::map<std::string, std::function<Call()>> all = {
      {"full_float16", [] { return Call{float16, 300, 300, 64}; }},
      {"causal_bfloat16_256",
       [] { return Call{bfloat16, 200, 333, 256, 2, 1, [](Call& c) { c.options.rule = causal(); }}; }},
      {"causal_float32", [] { return Call{float32, 300, 300, 128, 2, 1, [](Call& c) { c.options.rule = causal(); }}; }},
      {"window_float64",
       [] { return Call{float64, 200, 200, 64, 2, 1, [](Call& c) { c.options.rule = window(9, 3); }}; }},
      {"budget_of_some_heads",
       [] { return Call{bfloat16, 600, 600, 64, 4, 2, [](Call& c) { c.options.memory_budget = 400'000; }}; }},
      {"budget_of_portable_kernels",
       [] { return Call{bfloat16, 600, 600, 64, 4, 2, [](Call& c) { c.options.memory_budget = 40'000; }}; }},
      {"budget_of_lengths_on_the_gpu",
       [] {
         return Call{bfloat16, 600, 600, 64, 4, 2, [](Call& c) {
                       c.options.key_lengths = c.device_integers({600, 77}), c.options.memory_budget = 300'000;
                     }};
       }},
      {"decode_in_parts", [] { return Call{bfloat16, 1, 20000, 128}; }},
      {"decode_in_parts_float32", [] { return Call{float32, 1, 20000, 64}; }},
      {"decode_of_many_rows", [] { return Call{bfloat16, 70, 9000, 128}; }},
      {"many_rows_that_decode_leaves", [] { return Call{bfloat16, 70, 9000, 100}; }},
      {"many_rows_not_on_16_bytes",
       [] {
         return Call{bfloat16, 70, 9000, 64, 2, 1, [](Call& c) {
                       c.more.push_back(Tensor::of_sines(bfloat16, {1, 2, 9000, 65}, 1));
                       c.k_view = c.more.back().view;
                       c.k_view.shape[3] = 64;
                     }};
       }},
      {"decode_whose_last_chunk_is_split",  // 14 chunks of 80 batch entries, and one of 66
       [] {
         return Call{bfloat16,
                     1,
                     64,
                     64,
                     1,
                     1186,
                     [](Call& c) {
                       c.more.push_back(Tensor::of_sines(bfloat16, {1, 1, 3840, 64}, 1));
                       c.k_view = c.more.back().view;
                       c.k_view.shape[0] = 1186, c.k_view.strides[0] = 0;
                       c.v_view = c.k_view;
                       c.options.num_chunks_kv = 15;
                     },
                     false};
       }},
      {"bias",
       [] {
         return Call{float16, 130, 150, 64, 2, 1, [](Call& c) {
                       c.more.push_back(Tensor::of_sines(float16, {1, 2, 130, 150}, 4));
                       c.options.bias = c.more.back().view;
                       c.more.push_back(Tensor(float16, {1, 2, 130, 150}, 0));
                       c.dbias = c.more.back().view;
                     }};
       }},
      {"lengths_on_the_gpu",
       [] {
         return Call{bfloat16, 150, 150, 64, 2, 2, [](Call& c) {
                       c.options.rule = causal();
                       c.options.key_lengths = c.device_integers({100, 150});
                     }};
       }},
      {"lengths_on_the_cpu",
       [] {
         return Call{float16, 150, 150, 64, 2, 2, [](Call& c) { c.options.key_lengths = c.host_integers({100, 150}); }};
       }},
      {"pages",
       [] {
         return Call{float16,
                     1,
                     96,
                     64,
                     2,
                     2,
                     [](Call& c) {
                       for (auto* view : {&c.k_view, &c.v_view}) {
                         c.more.push_back(Tensor::of_sines(float16, {6, 32, 2, 64}, view == &c.k_view ? 1 : 2));
                         *view = c.more.back().view;
                       }
                       c.options.page_table = c.host_integers({0, 5, 2, 1, 3, 4});
                       c.options.page_table.rank = 2;
                       c.options.page_table.shape = {2, 3}, c.options.page_table.strides = {3, 1};
                       c.options.key_lengths = c.host_integers({70, 96});
                     },
                     false};
       }},
  };
  return all;
}

class GpuWorkspace : public testing::TestWithParam<std::tuple<std::string, bool>> {};  // a call, `deterministic`

TEST_P(GpuWorkspace, IsAllThatACallWorksIn) {
  const auto& [name, deterministic] = GetParam();
  Call call = calls().at(name)();
  call.on_host.reserve(8), call.more.reserve(8);
  call.options.deterministic = deterministic;
  if (call.add) call.add(call);
  const auto [b, h, n, m, d, type] = std::tuple(call.batch, call.heads, call.queries, call.keys, call.d, call.type);
  const auto q = Tensor::of_sines(type, {b, h, n, d}, 0), dout = Tensor::of_sines(type, {b, h, n, d}, 3);
  const auto own_k = Tensor::of_sines(type, {b, h, m, d}, 1), own_v = Tensor::of_sines(type, {b, h, m, d}, 2);
  const Tensor out(type, {b, h, n, d}, 0);
  const Tensor lse(type == ElementType::float64 ? type : ElementType::float32, {b, h, n}, 0);
  const Tensor dq(type, {b, h, n, d}, 0), dk(type, {b, h, m, d}, 0), dv(type, {b, h, m, d}, 0);
  const auto k = call.k_view.given() ? call.k_view : own_k.view, v = call.v_view.given() ? call.v_view : own_v.view;
  const auto made = plan(q.view, k, v, call.options);
  call.options.plan = &made;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  call.options.stream = stream;
  const auto forward_call = [&] { forward(q.view, k, v, {out.view, lse.view, {}, {}}, call.options); };
  const auto backward_call = [&] {
    backward({dout.view, out.view, lse.view, {}}, q.view, k, v, {dq.view, dk.view, dv.view, call.dbias, {}},
             call.options);
  };
  std::vector<const Tensor*> written{&out, &lse, &dq, &dk, &dv};
  if (call.dbias.given()) written.push_back(&call.more.back());
  const auto results = [&] {
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    Results all;
    for (const auto* tensor : written)
      if (tensor != &dq || deterministic) all.push_back(tensor->bytes());  // else its last bits may differ
    return all;
  };
  const auto clear = [&] {
    for (const auto* tensor : written)
      EXPECT_EQ(cudaMemset(tensor->view.data, 0x55, tensor->bytes().size()), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  clear();
  forward_call();
  if (call.backward) backward_call();
  const auto expected = results();
  clear();
  const auto untouched = results();
  const Guarded forward_memory(made.forward_workspace()), backward_memory(made.backward_workspace());
  call.options.workspace = forward_memory.view();
  forward_call();
  call.options.workspace = backward_memory.view();
  if (call.backward) backward_call();
  EXPECT_EQ(results(), expected);
  forward_memory.expect_guards();
  backward_memory.expect_guards();

  clear();
  for (const auto* memory : {&forward_memory, &backward_memory}) {
    if (memory->bytes == 0 || (memory == &backward_memory && !call.backward)) continue;
    call.options.workspace = memory->view();
    --call.options.workspace.shape[0];
    try {
      memory == &forward_memory ? forward_call() : backward_call();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), "workspace: " + std::to_string(memory->bytes - 1) + " bytes, expected at least " +
                                  std::to_string(memory->bytes));
    }
  }
  std::vector<std::byte> host(512);
  auto* const place = host.data() + (256 - reinterpret_cast<std::uintptr_t>(host.data()) % 256);
  call.options.workspace = TensorView(place, ElementType::uint8, {made.forward_workspace()}, gpu);
  if (made.forward_workspace() > 0) {
    try {
      forward_call();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "workspace: in host memory, expected memory of cuda:0");
    }
  }
  EXPECT_EQ(results(), untouched);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& [name, call] : calls()) all.push_back(name);
  return all;
}

std::string name_of(const testing::TestParamInfo<std::tuple<std::string, bool>>& found) {
  const auto& [name, deterministic] = found.param;
  return name + (deterministic ? "_deterministic" : "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuWorkspace, testing::Combine(testing::ValuesIn(names()), testing::Bool()), name_of);

/// In a graph: without it there is a node that takes memory, with it there is none.
TEST(GpuWorkspace, LeavesNoMemoryToAGraph) {
  const Tensor q(ElementType::bfloat16, {1, 2, 1, 128}, 0x3c), k(ElementType::bfloat16, {1, 2, 20000, 128}, 0x3b);
  const Tensor out(ElementType::bfloat16, {1, 2, 1, 128}, 0);
  const auto made = plan(q.view, k.view, k.view);
  ASSERT_GT(made.forward_workspace(), 0);
  const Tensor memory(ElementType::uint8, {made.forward_workspace()}, 0);
  Options options;
  options.plan = &made;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  options.stream = stream;
  const auto call = [&] { forward(q.view, k.view, k.view, {out.view, {}, {}, {}}, options); };
  call();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  for (const bool own : {true, false}) {
    options.workspace = own ? TensorView() : memory.view;
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    call();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    std::size_t count = 0;
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
    std::vector<cudaGraphNode_t> nodes(count);
    EXPECT_EQ(cudaGraphGetNodes(graph, nodes.data(), &count), cudaSuccess);
    int taken = 0;
    for (const auto node : nodes) {
      cudaGraphNodeType kind;
      EXPECT_EQ(cudaGraphNodeGetType(node, &kind), cudaSuccess);
      taken += kind == cudaGraphNodeTypeMemAlloc;
    }
    EXPECT_EQ(taken > 0, own);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace anyflash
