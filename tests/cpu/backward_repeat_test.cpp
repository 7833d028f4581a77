// Gradients are bitwise the same for any number of threads, any batch size and caches of any size, with and without
// waiting between tasks; also where rules leave holes between the tiles.
#include <cstdlib>
#include <random>
#include <vector>

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

// Where tiles multiply, several key blocks and two query blocks are taken together. Holes leave some of them out: what
// is put off until its neighbour comes must not get lost, nor be joined with what is no neighbour.
void expect_holes_to_change_nothing(Case c, unsigned seed) {
  c.type = ElementType::bfloat16;
  c.fill(seed);
  const Result forward = reference(c);
  c.options.threads = 1;
  const Result one = gradients(c, forward);
  EXPECT_LE(relative_error(one.dq, forward.dq), tolerance(c.type)) << "dq";
  EXPECT_LE(relative_error(one.dk, forward.dk), tolerance(c.type)) << "dk";
  EXPECT_LE(relative_error(one.dv, forward.dv), tolerance(c.type)) << "dv";
  for (int threads : {2, 3, 7}) {
    SCOPED_TRACE(threads);
    c.options.threads = threads;
    expect_same(gradients(c, forward), one);
  }
  const auto share = anyflash::cpu::cache_share().exchange(0);  // the fewest query blocks are kept
  for (int threads : {1, 2, 3}) {
    SCOPED_TRACE(testing::Message() << "small caches, threads " << threads);
    c.options.threads = threads;
    expect_same(gradients(c, forward), one);
  }
  anyflash::cpu::cache_share() = share;
}

Case long_sequence(std::int64_t query_blocks, std::int64_t key_blocks) {
  Case c;
  c.q_shape = {64 * query_blocks}, c.k_shape = {64 * key_blocks};
  return c;
}

/// left_out: (query blocks, key_blocks).
void expect_left_out_blocks_to_change_nothing(std::int64_t key_blocks, std::vector<std::uint8_t> left_out,
                                              unsigned seed) {
  const auto query_blocks = static_cast<std::int64_t>(left_out.size()) / key_blocks;
  Case c = long_sequence(query_blocks, key_blocks);
  c.options.rule =
      ~anyflash::blocks(TensorView(left_out.data(), ElementType::boolean, {query_blocks, key_blocks}), 64, 64);
  c.sees = [&](auto, auto, std::int64_t i, std::int64_t j) { return !left_out[i / 64 * key_blocks + j / 64]; };
  expect_holes_to_change_nothing(c, seed);
}

TEST(BackwardRepeat, BlocksLeftOut) {
  for (const unsigned seed : {1, 2, 3}) {
    SCOPED_TRACE(seed);
    std::vector<std::uint8_t> left_out(9 * 16);
    std::mt19937 random(seed);
    for (auto& block : left_out) block = random() % 3 == 0;
    expect_left_out_blocks_to_change_nothing(16, left_out, seed);
  }
}

// The second four key blocks find the first query block loaded; the second one, beside it, must not take its place.
TEST(BackwardRepeat, QueryBlockThatIsStillLoaded) {
  expect_left_out_blocks_to_change_nothing(8, {0, 0, 0, 0, 0, 0, 0, 0,  //
                                               1, 1, 1, 1, 0, 0, 0, 0,  //
                                               0, 0, 0, 0, 1, 1, 1, 1},
                                           6);
}

TEST(BackwardRepeat, WindowBesideFirstKeys) {
  Case c = long_sequence(11, 11);
  c.options.rule = anyflash::local(100) | anyflash::sink(64);
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) { return j < 64 || std::abs(i - j) < 100; };
  expect_holes_to_change_nothing(c, 4);
}

TEST(BackwardRepeat, Documents) {
  Case c = long_sequence(12, 12);
  std::vector<std::int32_t> document(c.queries());
  for (std::size_t i = 0; i < document.size(); ++i) document[i] = i < 192 ? 1 : i < 576 ? 2 : i < 640 ? 3 : 1;
  const TensorView ids(document.data(), ElementType::int32, {1, c.queries()});
  c.options.rule = anyflash::documents(ids, ids);
  c.sees = [&](auto, auto, std::int64_t i, std::int64_t j) { return document[i] == document[j]; };
  expect_holes_to_change_nothing(c, 5);
}

}  // namespace
