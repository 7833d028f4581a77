// What a plan costs, in one thread: from the cache, and made anew for 128k x 128k tokens. One direction at a time.
#include <anyflash/anyflash.h>
#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends.h"
#include "plan/plan.h"

namespace {

using namespace anyflash;

constexpr std::int64_t length = 128 << 10;

/// A random block bitmap, half of whose blocks of 64 x 64 are visible.
std::vector<std::uint8_t>& bitmap() {
  static auto bits = [] {
    std::vector<std::uint8_t> made(length / 64 * (length / 64));
    std::mt19937 random(1);
    for (auto& bit : made) bit = random() & 1;
    return made;
  }();
  return bits;
}

Rule rule_of(const std::string& text) {
  if (text != "bitmap") return parse_rule(text);
  return blocks(TensorView(bitmap().data(), ElementType::uint8, {length / 64, length / 64}), 64, 64);
}

Problem problem_of(const std::string& text, std::int64_t tokens, Direction direction) {
  const TensorView x(nullptr, ElementType::float32, {1, 1, tokens, 64});
  Options options;
  options.rule = rule_of(text);
  options.threads = 1;
  return shape_problem(x, x, x, options, direction);
}

void cached(benchmark::State& state, const std::string& text, Direction direction) {
  const auto problem = problem_of(text, length, direction);
  const auto menu = backend_of(problem.device).menu(problem);
  auto plan = make_plan(problem, menu);
  for (auto _ : state) benchmark::DoNotOptimize(plan = make_plan(problem, menu));
}

/// Sequences of other lengths, one key fewer each: no plan of them is known.
void made(benchmark::State& state, const std::string& text, Direction direction) {
  static std::int32_t fewer = 0;
  auto problem = problem_of(text, length, direction);
  const auto menu = backend_of(problem.device).menu(problem);
  for (auto _ : state) {
    problem.k_size[2] = static_cast<std::int32_t>(text == "bitmap" ? length : length - ++fewer % 4096);
    auto plan = make_plan(problem, menu);
    benchmark::DoNotOptimize(plan);
    state.PauseTiming();
    plan.reset();
    state.ResumeTiming();
  }
}

/// Ids of 12 documents: one after the other; the same under descending ids; in 48 segments, in any order; any id in any
/// place.
std::vector<std::int32_t> ids_of(const std::string& order, std::int64_t tokens, std::mt19937& random) {
  std::vector<std::int32_t> ids(tokens);
  if (order == "in any place") {
    for (auto& id : ids) id = static_cast<std::int32_t>(random() % 12);
    return ids;
  }
  const int segments = order == "in 48 segments" ? 48 : 12;
  for (int cut = 0; cut < segments - 1; ++cut) ids[random() % tokens] += 1;
  for (std::int64_t i = 1; i < tokens; ++i) ids[i] += ids[i - 1];
  if (order == "in 48 segments") {
    std::vector<std::int32_t> document(segments);
    for (auto& one : document) one = static_cast<std::int32_t>(random() % 12);
    for (auto& id : ids) id = document[id];
  }
  if (order == "descending") {
    for (auto& id : ids) id = -id;
  }
  return ids;
}

/// Documents whose ids are new in each call.
void documents_made(benchmark::State& state, const std::string& order, std::int64_t tokens, Direction direction) {
  std::vector<std::vector<std::int32_t>> ids(100);
  std::mt19937 random(1);
  for (auto& own : ids) own = ids_of(order, tokens, random);
  const TensorView x(nullptr, ElementType::bfloat16, {1, 16, tokens, 128});
  std::size_t n = 0;
  for (auto _ : state) {
    const TensorView table(ids[n++ % ids.size()].data(), ElementType::int32, {tokens});
    Options options;
    options.rule = documents(table, table);
    options.threads = 1;
    const auto problem = shape_problem(x, x, x, options, direction);
    const auto plan = make_plan(problem, {{64}, 64, 0.0});
    benchmark::DoNotOptimize(plan.get());
  }
}

const bool registered = [] {
  for (const auto direction : {Direction::forward, Direction::backward}) {
    const std::string name = direction == Direction::forward ? "forward" : "backward";
    const auto add = [&](const std::string& text, auto run, const char* kind) {
      benchmark::RegisterBenchmark(("plan/" + name + "/" + kind + "/" + text).c_str(),
                                   [=](benchmark::State& state) { run(state, text, direction); })
          ->Unit(benchmark::kMicrosecond)
          ->MinTime(0.1);
    };
    add("causal()", cached, "cached");
    for (const char* const rule :
         {"full()", "causal()", "local(256)", "local(64, log2_stride=3)", "local(16, log2_stride=6)",
          "causal() & local(4096)", "local(256) | sink(64)", "tiles(64, 3)"})
      add(rule, made, "made");
    add("bitmap", made, "made");
    for (const std::int64_t tokens : {16, 128}) {
      for (const char* const order : {"in order", "descending", "in 48 segments", "in any place"}) {
        const auto what = "/made/12 documents of " + std::to_string(tokens) + "k tokens, " + order;
        benchmark::RegisterBenchmark(
            ("plan/" + name + what).c_str(),
            [=](benchmark::State& state) { documents_made(state, order, tokens << 10, direction); })
            ->Unit(benchmark::kMicrosecond)
            ->MinTime(0.1);
      }
    }
  }
  return true;
}();

}  // namespace
