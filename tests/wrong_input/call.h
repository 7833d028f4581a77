// A call whose tensors lie in memory of its own, right in every respect until a test spoils it.
#pragma once

#include <anyflash/anyflash.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace anyflash::wrong_input {

using Shape = std::initializer_list<std::int64_t>;

struct Call {
  static constexpr std::byte pattern{0xA5};

  std::vector<std::pair<std::unique_ptr<std::byte[]>, std::size_t>> memory;
  TensorView q, k, v;
  ForwardOutputs outputs;
  BackwardInputs inputs;
  Gradients gradients;
  Options options;
  std::optional<Plan> plan;

  /// Batch 2, 4 query heads, 2 key heads, 8 queries, 12 keys, 16 channels of q and k, 24 of v.
  Call() {
    q = input({2, 4, 8, 16});
    k = input({2, 2, 12, 16});
    v = input({2, 2, 12, 24});
    outputs.out = output({2, 4, 8, 24});
    outputs.lse = output({2, 4, 8});
    outputs.row_sum = output({2, 4, 8});
    outputs.row_max = output({2, 4, 8});
    inputs.dout = input({2, 4, 8, 24});
    inputs.out = input({2, 4, 8, 24});
    inputs.lse = input({2, 4, 8});
    gradients.dq = output({2, 4, 8, 16});
    gradients.dk = output({2, 2, 12, 16});
    gradients.dv = output({2, 2, 12, 24});
  }

  TensorView tensor(Shape shape, ElementType type, std::byte fill) {
    TensorView view(nullptr, type, shape);
    const auto bytes = std::size_t(view.elements()) * element_size(type);
    memory.emplace_back(std::make_unique<std::byte[]>(bytes), bytes);
    view.data = memory.back().first.get();
    std::memset(view.data, int(fill), bytes);
    return view;
  }
  TensorView input(Shape shape, ElementType type = ElementType::float32) { return tensor(shape, type, std::byte{0}); }
  TensorView output(Shape shape, ElementType type = ElementType::float32) { return tensor(shape, type, pattern); }

  /// Two tensors of one piece of memory: the second begins `offset` elements after the first, or before it if negative.
  void put_together(TensorView& first, TensorView& second, std::int64_t offset) {
    const auto both = input({2 * (first.elements() + second.elements())});
    first.data = static_cast<float*>(both.data) + (offset < 0 ? -offset : 0);
    second.data = static_cast<float*>(first.data) + offset;
  }

  TensorView integers(std::initializer_list<std::int64_t> numbers, ElementType type = ElementType::int32) {
    auto view = input({std::int64_t(numbers.size())}, type);
    std::int64_t i = 0;
    for (const auto number : numbers) {
      if (type == ElementType::int64) {
        static_cast<std::int64_t*>(view.data)[i++] = number;
      } else {
        static_cast<std::int32_t*>(view.data)[i++] = std::int32_t(number);
      }
    }
    return view;
  }

  /// All bytes of all tensors, in order.
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all;
    for (const auto& [data, count] : memory) all.insert(all.end(), data.get(), data.get() + count);
    return all;
  }

  void use_layout_qkv() {
    options.layout = Layout::qkv;
    q = input({3, 4, 8, 16});
    k = v = {};
    outputs = {};
    outputs.out = output({4, 8, 16});
    outputs.lse = output({4, 8});
    inputs.dout = input({4, 8, 16});
    inputs.out = input({4, 8, 16});
    inputs.lse = input({4, 8});
    gradients = {};
    gradients.dq = output({3, 4, 8, 16});
  }

  void use_layout_thd() {
    options.layout = Layout::thd;
    q = input({8, 4, 16});
    k = input({12, 2, 16});
    v = input({12, 2, 24});
    options.cu_seqlens_q = integers({0, 3, 8});
    options.cu_seqlens_k = integers({0, 6, 12});
    outputs = {};
    outputs.out = output({8, 4, 24});
    outputs.lse = output({4, 8});
    inputs.dout = input({8, 4, 24});
    inputs.out = input({8, 4, 24});
    inputs.lse = input({4, 8});
    gradients = {};
  }

  /// 5 pages of 4 keys; each batch entry has 3 of them.
  void use_pages() {
    k = input({5, 4, 2, 16});
    v = input({5, 4, 2, 24});
    options.page_table = integers({0, 1, 2, 3, 4, -1});
    options.page_table.rank = 2;
    options.page_table.shape = {2, 3};
    options.page_table.strides = {3, 1};
    options.key_lengths = integers({12, 7});
  }

  void use_two_dimensions() {
    q = input({2, 4, 2, 4, 16});
    k = input({2, 2, 3, 4, 16});
    v = input({2, 2, 3, 4, 24});
    outputs.out = output({2, 4, 2, 4, 24});
    inputs.dout = input({2, 4, 2, 4, 24});
    inputs.out = input({2, 4, 2, 4, 24});
    gradients = {};
  }

  void forward() { anyflash::forward(q, k, v, outputs, options); }
  void backward() { anyflash::backward(inputs, q, k, v, gradients, options); }
  void make_plan() { anyflash::plan(q, k, v, options); }
  void ask_for_shapes() { anyflash::result_shapes(q, k, v, options); }
  void ask_for_no_gradient() { anyflash::backward(inputs, q, k, v, {}, options); }
};

struct Case {
  Error::Kind kind;
  const char* line;  ///< of the Error, whole
  std::function<void(Call&)> spoil;
};

/// Each case must throw exactly its Error and leave every byte as it was. `also`: another call that must.
inline void expect_errors(const std::vector<Case>& cases, void (Call::*run)(), void (Call::*also)() = nullptr) {
  if (also) expect_errors(cases, also);
  for (const auto& wrong : cases) {
    SCOPED_TRACE(wrong.line);
    Call call;
    wrong.spoil(call);
    const auto before = call.bytes();
    try {
      (call.*run)();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), wrong.line);
      EXPECT_EQ(std::strchr(error.what(), '\n'), nullptr);
      EXPECT_EQ(int(error.kind()), int(wrong.kind));
    } catch (const std::exception& other) {
      ADD_FAILURE() << "not an anyflash::Error: " << other.what();
    }
    EXPECT_TRUE(call.bytes() == before) << "memory was written";
  }
}

}  // namespace anyflash::wrong_input
