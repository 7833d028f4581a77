// A call works in the memory it is handed, all of it and no more, and it was told beforehand how much that is.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include <gtest/gtest.h>

#include "backends.h"
#include "backward_support.h"

namespace {

std::size_t allocated = 0;  // by operator new, in this thread's calls; not counted under a sanitizer, which has its own

}  // namespace

#ifndef SANITIZED  // noinline: GCC would warn of a call of free on what new has given
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocated += bytes;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace {

using namespace anyflash;
using backward_test::Tensor;

constexpr char untouched = 0x5b;

/// A call on tensors of its own.
struct Call {
  std::int64_t heads = 2, n = 256, d = 64;
  ElementType type = ElementType::float32;
  Options options;
  Tensor q, k, v, out, lse, dout, dq, dk, dv;

  explicit Call(ElementType type, std::int64_t n, int threads) : n(n), type(type) {
    options.rule = causal();
    options.threads = threads;
    for (Tensor* t : {&q, &k, &v, &out, &dout, &dq, &dk, &dv}) *t = tensor({1, heads, n, d}, type);
    lse = tensor({1, heads, n}, type == ElementType::float64 ? type : ElementType::float32);
  }
  static Tensor tensor(std::initializer_list<std::int64_t> shape, ElementType type) {
    Tensor t = Tensor::plain(shape, type);
    t.set(backward_test::Numbers(t.place.size(), 0.25));
    t.view.data = t.data();
    return t;
  }
  void place() {
    for (Tensor* t : {&q, &k, &v, &out, &lse, &dout, &dq, &dk, &dv}) t->view.data = t->data();
  }
  Problem problem(Direction direction) {
    place();
    if (direction == Direction::forward)
      return forward_problem(q.view, k.view, v.view, {out.view, lse.view, {}, {}}, options);
    return backward_problem({dout.view, out.view, lse.view, {}}, q.view, k.view, v.view,
                            {dq.view, dk.view, dv.view, {}, {}}, options);
  }
};

/// Runs the call in a workspace of just the size it asked for, and returns the part of it that was written. (Room for
/// rows that hold a NaN, for soft caps, for the words of other tiles and the like is not.)
double written(Call& call, Direction direction) {
  constexpr std::size_t guard = 256;
  const auto problem = call.problem(direction);
  const auto& backend = backend_of(problem.device);
  const auto plan = make_plan(problem, backend.menu(problem));
  const auto bytes = static_cast<std::size_t>(workspace_bytes(problem, *plan));
  std::vector<char> memory(bytes + 3 * guard, untouched);
  char* const begin = memory.data() + guard + (guard - reinterpret_cast<std::uintptr_t>(memory.data()) % guard) % guard;
  const auto before = allocated;
  (direction == Direction::forward ? backend.forward : backend.backward)(problem, *plan, begin);
  EXPECT_LT(allocated - before, 4096u + bytes / 50) << "beside the workspace";
  const auto same = [](char c) { return c == untouched; };
  EXPECT_TRUE(std::all_of(memory.data(), begin, same)) << "before the workspace";
  EXPECT_TRUE(std::all_of(begin + bytes, memory.data() + memory.size(), same)) << "behind the workspace";
  const auto left = std::count(begin, begin + bytes, untouched);
  return 1 - double(left) / double(bytes);
}

TEST(Workspace, IsWhatACallWorksIn) {
  for (const auto type : {ElementType::float16, ElementType::bfloat16, ElementType::float32, ElementType::float64}) {
    for (const std::int64_t n : {64, 256, 1000}) {
      Call call(type, n, 1);
      EXPECT_GT(written(call, Direction::forward), 1.0 / 2) << element_name(type) << " " << n;
      EXPECT_GT(written(call, Direction::backward), 1.0 / 2) << element_name(type) << " " << n;
      Call threaded(type, n, 4);
      EXPECT_GT(written(threaded, Direction::forward), 0) << element_name(type) << " " << n;
      EXPECT_GT(written(threaded, Direction::backward), 0) << element_name(type) << " " << n;
    }
  }
}

/// The same bits as without it, all of them in the memory that was given.
TEST(Workspace, MayBeTheCallers) {
  for (const auto type : {ElementType::float16, ElementType::bfloat16, ElementType::float32, ElementType::float64}) {
    Call call(type, 300, 2);
    for (Tensor* t : {&call.q, &call.k, &call.v, &call.dout}) {
      backward_test::Numbers numbers(t->place.size());
      for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::sin(1.7 * double(i));
      t->set(numbers);
    }
    call.place();
    const auto run = [&] {
      forward(call.q.view, call.k.view, call.v.view, {call.out.view, call.lse.view, {}, {}}, call.options);
      backward({call.dout.view, call.out.view, call.lse.view, {}}, call.q.view, call.k.view, call.v.view,
               {call.dq.view, call.dk.view, call.dv.view, {}, {}}, call.options);
    };
    const auto results = [&] {
      return std::vector{call.out.memory, call.lse.memory, call.dq.memory, call.dk.memory, call.dv.memory};
    };
    run();
    const auto expected = results();
    for (Tensor* t : {&call.out, &call.lse, &call.dq, &call.dk, &call.dv})
      std::memset(t->data(), 0x77, t->place.size() * element_size(t->type));
    const auto made = plan(call.q.view, call.k.view, call.v.view, call.options);
    const auto bytes = std::max(made.forward_workspace(), made.backward_workspace());
    std::vector<char> memory(bytes + 512, untouched);
    char* const begin = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256);
    call.options.workspace = TensorView(begin, ElementType::uint8, {bytes});
    const auto before = allocated;
    run();
    EXPECT_LT(allocated - before, 16384u + bytes / 50) << "beside the workspace";
    EXPECT_EQ(results(), expected) << element_name(type);
    const auto same = [](char c) { return c == untouched; };
    EXPECT_TRUE(std::all_of(memory.data(), begin, same)) << "before the workspace";
    EXPECT_TRUE(std::all_of(begin + bytes, memory.data() + memory.size(), same)) << "behind the workspace";
    EXPECT_FALSE(std::all_of(begin, begin + bytes, same)) << "the workspace";
  }
}

TEST(Workspace, IsKnownToThePlanAndToExplain) {
  Call call(ElementType::float32, 1000, 0);
  call.heads = 1;
  for (Tensor* t : {&call.q, &call.k, &call.v, &call.dq, &call.dk, &call.dv, &call.out, &call.dout}) {
    *t = Call::tensor({1, 1, 1000, 64}, ElementType::float32);
  }
  call.lse = Call::tensor({1, 1, 1000}, ElementType::float32);
  call.place();
  const auto made = plan(call.q.view, call.k.view, call.v.view, call.options);
  ExplainOptions options;
  for (const auto direction : {Direction::forward, Direction::backward}) {
    const auto problem = call.problem(direction);
    const auto bytes = workspace_bytes(problem, *make_plan(problem, backend_of(problem.device).menu(problem)));
    EXPECT_EQ(direction == Direction::forward ? made.forward_workspace() : made.backward_workspace(), bytes);
    options.backward = direction == Direction::backward;
    const auto figures = explain(causal(), {1000}, {1000}, options);
    EXPECT_EQ(figures.workspace_bytes, bytes);
    EXPECT_GT(figures.threads, 0);
  }
}

TEST(Workspace, OfBackwardIsThatOfTheGradientsWanted) {
  const TensorView x(nullptr, ElementType::float32, {1, 2, 1000, 64});
  Options options;
  options.rule = causal();
  options.threads = 1;
  const auto all = backward_workspace(x, x, x, {x, x, x, {}, {}}, options);
  EXPECT_EQ(all, plan(x, x, x, options).backward_workspace());
  EXPECT_EQ(backward_workspace(x, x, x, {x, {}, {}, {}, {}}, options), all) << "the sums of dq are in it";
  EXPECT_LE(backward_workspace(x, x, x, {{}, x, x, {}, {}}, options), all - 1000 * 64 * 4) << "without them";
}

TEST(Workspace, GrowsWithWhatIsAskedOfACall) {
  std::vector<float> numbers(1);
  const auto shape = [&](std::int64_t batch, std::int64_t n) {
    return TensorView(nullptr, ElementType::float32, {batch, 2, n, 64});
  };
  const auto made = [&](std::int64_t batch, std::int64_t n, bool bias, int threads) {
    Options options;
    options.threads = threads;
    if (bias) options.bias = TensorView(numbers.data(), ElementType::float32, {1, 1, 1, 1});
    return plan(shape(batch, n), shape(batch, n), shape(batch, n), options);
  };
  EXPECT_GT(made(1, 4096, false, 8).forward_workspace(), made(1, 4096, false, 1).forward_workspace());
  EXPECT_GT(made(1, 4096, false, 8).backward_workspace(), made(1, 4096, false, 1).backward_workspace());
  const auto few = [&](std::int64_t n, std::int64_t keys, int threads, std::int64_t d = 64) {
    const TensorView q(nullptr, ElementType::float32, {1, 1, n, d}), k(nullptr, ElementType::float32, {1, 1, keys, d});
    Options options;
    options.threads = threads;
    return plan(q, k, k, options).forward_workspace();
  };
  EXPECT_GT(few(256, 8192, 4), 3 * few(256, 8192, 1)) << "four threads share 256 queries of one head";
  EXPECT_EQ(few(64, 8192, 4), few(64, 8192, 1)) << "64 queries are one thread's";
  EXPECT_GT(few(256, 8192, 4, 16), 3 * few(256, 8192, 1, 16)) << "the most key blocks that a thread keeps";
  EXPECT_EQ(few(256, 8256, 4, 16), few(256, 8256, 1, 16)) << "more than that";
  EXPECT_GT(made(1, 65536, false, 1).backward_workspace(), made(1, 4096, false, 1).backward_workspace());
  EXPECT_EQ(made(0, 4096, true, 1).backward_workspace(), 0);
  const auto half = made(1, 8192, false, 1).backward_workspace();
  EXPECT_LT(made(1, 16384, false, 1).backward_workspace(), half * 201 / 100) << "linear in the sequence";
}

/// Who keeps tensors in files gives pages back when he is told of a chunk. Rows of a large lse read all their keys, and he
/// is told in between. Chunks of queries and keys that do not meet are counted, not told.
TEST(Workspace, OutOfCoreCallsTellOften) {
  const auto told = [](double lse, const Rule& rule) {
    Call call(ElementType::float32, 1024, 2);
    call.options.rule = rule;
    call.options.num_chunks_q = call.options.num_chunks_kv = 4;
    call.lse.set(backward_test::Numbers(call.lse.place.size(), lse));
    call.place();
    std::vector<std::int64_t> numbers;
    std::int64_t all = 0;
    OutOfCore out_of_core{[&](std::int64_t done, std::int64_t total) { numbers.push_back(done), all = total; }};
    call.options.out_of_core = &out_of_core;
    anyflash::backward({call.dout.view, call.out.view, call.lse.view, {}}, call.q.view, call.k.view, call.v.view,
                       {call.dq.view, call.dk.view, call.dv.view, {}, {}}, call.options);
    EXPECT_TRUE(std::is_sorted(numbers.begin(), numbers.end()));
    EXPECT_EQ(numbers.back(), all);
    EXPECT_EQ(all, 2 * 4 * 4 * 2) << "heads, chunks, passes";
    return std::int64_t(numbers.size());
  };
  EXPECT_EQ(told(5, full()), 64);
  EXPECT_GT(told(100, full()), 64 + 32);
  EXPECT_LE(told(5, causal()), 40 + 1);
  EXPECT_LE(told(5, local(64)), 40 + 1);
}

/// A workspace of just the budget, between guards: the call writes nothing beside it.
TEST(Workspace, BudgetsHold) {
  constexpr std::size_t guard = 4096;
  for (const bool backward : {false, true}) {
    Call call(ElementType::float32, 1024, 2);
    call.place();
    const auto least = least_workspace(call.q.view, call.k.view, call.v.view, call.options, true);
    for (const std::int64_t bytes : {least, 2 * least, 8 * least}) {
      const auto size = static_cast<std::size_t>(bytes);
      std::vector<char> memory(size + 3 * guard, untouched);
      const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % workspace_alignment;
      char* const begin = memory.data() + guard + workspace_alignment - misaligned;
      call.options.memory_budget = bytes;
      call.options.workspace = TensorView(begin, ElementType::uint8, {bytes});
      if (backward) {
        anyflash::backward({call.dout.view, call.out.view, call.lse.view, {}}, call.q.view, call.k.view, call.v.view,
                           {call.dq.view, call.dk.view, call.dv.view, {}, {}}, call.options);
      } else {
        anyflash::forward(call.q.view, call.k.view, call.v.view, {call.out.view, call.lse.view, {}, {}}, call.options);
      }
      const auto clean = [](const char* from, const char* to) {
        return std::all_of(from, to, [](char byte) { return byte == untouched; });
      };
      EXPECT_TRUE(clean(memory.data(), begin));
      EXPECT_TRUE(clean(begin + bytes, memory.data() + memory.size()));
      EXPECT_FALSE(clean(begin, begin + bytes));
    }
    call.options.workspace = {};
    call.options.memory_budget = 1;
    EXPECT_THROW(plan(call.q.view, call.k.view, call.v.view, call.options), Error);
  }
}

}  // namespace
