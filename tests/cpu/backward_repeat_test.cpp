// Gradients are bitwise the same for any number of threads, any batch size and caches of any size, with and without
// waiting between tasks.
#include <gtest/gtest.h>

#include "backward_support.h"
#include "cpu/caches.h"

namespace {

using namespace backward_test;

Case base(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv) {
  Case c;
  c.batch = batch, c.heads_q = heads_q, c.heads_kv = heads_kv, c.d_qk = 20, c.d_v = 32;
  c.q_shape = {430}, c.k_shape = {410};
  c.options.rule = anyflash::causal();
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) { return i >= j; };
  c.with_sink = c.with_dlse = true;
  c.bias_size[0] = c.bias_size[3] = 1, c.bias_size[1] = heads_q, c.bias_size[2] = 430;
  return c;
}

void expect_same(const Result& a, const Result& b) {
  EXPECT_TRUE(same_bits(a.dq, b.dq)) << "dq";
  EXPECT_TRUE(same_bits(a.dk, b.dk)) << "dk";
  EXPECT_TRUE(same_bits(a.dv, b.dv)) << "dv";
  EXPECT_TRUE(same_bits(a.dbias, b.dbias)) << "dbias";
  EXPECT_TRUE(same_bits(a.dsink, b.dsink)) << "dsink";
}

TEST(BackwardRepeat, AnyNumberOfThreads) {
  const std::int64_t shapes[][3] = {{1, 1, 1}, {1, 4, 2}, {2, 4, 4}};  // few heads: tasks wait; many: they do not
  for (auto [batch, heads_q, heads_kv] : shapes) {
    SCOPED_TRACE(testing::Message() << batch << " " << heads_q << " " << heads_kv);
    Case c = base(batch, heads_q, heads_kv);
    c.type = batch == 1 ? ElementType::float32 : ElementType::bfloat16;
    c.fill(1);
    const Result forward = reference(c);
    c.options.threads = 1;
    const Result one = gradients(c, forward);
    for (int threads : {2, 3, 7, 7, 2, 1}) {
      SCOPED_TRACE(threads);
      c.options.threads = threads;
      expect_same(gradients(c, forward), one);
    }
  }
}

TEST(BackwardRepeat, CachesOfAnySize) {
  const auto share = anyflash::cpu::cache_share().load();
  for (const auto type : {ElementType::bfloat16, ElementType::float32, ElementType::float64}) {
    Case c = base(1, 4, 2);
    c.type = type;
    c.fill(1);
    const Result forward = reference(c), usual = gradients(c, forward);
    for (const std::int64_t other : {0, 1 << 16, 1 << 20, 1 << 30}) {
      SCOPED_TRACE(other);
      anyflash::cpu::cache_share() = other;
      expect_same(gradients(c, forward), usual);
    }
    anyflash::cpu::cache_share() = share;
  }
}

TEST(BackwardRepeat, AnyBatchSize) {
  Case three = base(3, 4, 2);
  three.fill(2);
  const Result forward = reference(three), together = gradients(three, forward);
  for (std::int64_t b = 0; b < 3; ++b) {
    Case one = three;
    one.batch = 1;
    Result one_forward;
    const auto part = [&](const Numbers& x) {
      const auto size = static_cast<std::ptrdiff_t>(x.size() / 3);
      return Numbers(x.begin() + b * size, x.begin() + (b + 1) * size);
    };
    for (auto member : {&Case::q, &Case::k, &Case::v, &Case::dout, &Case::dlse}) one.*member = part(three.*member);
    one_forward.out = part(forward.out), one_forward.lse = part(forward.lse);
    const Result alone = gradients(one, one_forward);
    EXPECT_TRUE(same_bits(alone.dq, part(together.dq)));
    EXPECT_TRUE(same_bits(alone.dk, part(together.dk)));
    EXPECT_TRUE(same_bits(alone.dv, part(together.dv)));
  }
}

TEST(BackwardRepeat, AnyNumberOfThreadsInBoxes) {
  Case c = base(1, 2, 1);
  c.q_shape = {20, 33}, c.k_shape = {20, 33};
  c.bias_size[0] = 0;
  c.options.rule = anyflash::local(6) | anyflash::sink(3);
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) {
    return j < 3 || (std::abs(i / 33 - j / 33) < 6 && std::abs(i % 33 - j % 33) < 6);
  };
  c.fill(3);
  const Result forward = reference(c);
  c.options.threads = 1;
  const Result one = gradients(c, forward);
  EXPECT_LE(relative_error(one.dq, forward.dq), tolerance(c.type));
  for (int threads : {2, 3, 7}) {
    c.options.threads = threads;
    expect_same(gradients(c, forward), one);
  }
}

}  // namespace
