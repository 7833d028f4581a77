// The simulator against the CPU's float64: random calls on small machines with little memory.
#include <gtest/gtest.h>

#include <cstring>

#include "../random.h"
#include "backends.h"
#include "calls.h"
#include "tile_machine/planner.h"

namespace anyflash::testing {
namespace {

TileMachine small_machine(std::int64_t tiles, std::int64_t memory) {
  TileMachine machine;
  machine.name = "small";
  machine.tiles = tiles, machine.memory_per_tile = memory;
  machine.sync_cycles = 20;
  return machine;
}

Rule any_rule(std::mt19937& random, int dimensions) {
  switch (random() % (dimensions == 1 ? 8 : 5)) {
    case 0: return full();
    case 1: return causal();
    case 2: return local(1 + random() % 9, random() % 2, false);
    case 3: return causal() & local(1 + random() % 20);
    case 4: return ~(prefix(random() % 9)) | local(2);
    case 5: return window(random() % 30, random() % 5);
    case 6: return prefix(random() % 40) | causal();
    default: return sink(3) | local(4);
  }
}

TileCall any_call(std::mt19937& random) {
  TileCall call;
  const auto up_to = [&](std::int64_t most) { return 1 + std::int64_t(random() % most); };
  call.type = random() % 2 ? ElementType::float32 : ElementType::float16;
  call.batch = up_to(3), call.kv_heads = up_to(2), call.heads = call.kv_heads * up_to(3);
  call.d_qk = up_to(40), call.d_v = up_to(40);
  const int dimensions = random() % 4 ? 1 : 2;
  call.queries.clear(), call.keys.clear();
  for (int i = 0; i < dimensions; ++i) {
    call.queries.push_back(up_to(dimensions == 1 ? 200 : 18));
    call.keys.push_back(up_to(dimensions == 1 ? 200 : 18));
  }
  call.rule = any_rule(random, dimensions);
  call.align = Align(random() % 4);
  call.softcap = random() % 4 ? 0 : 3;
  call.bias = random() % 4 == 0, call.sink = random() % 4 == 0;
  call.alibi = random() % 4 == 0, call.dlse = random() % 2 == 0;
  if (dimensions == 1 && random() % 4 == 0)
    for (std::int64_t b = 0; b < call.batch; ++b)
      call.key_lengths.push_back(std::int64_t(random()) % (call.keys[0] + 1));
  call.seed = unsigned(random());
  return call;
}

void expect_close(const TileCall& call, const char* what, const Numbers& numbers) {
  if (!numbers.given()) return;
  EXPECT_LT(numbers.error(), call.type == ElementType::float16 ? 4e-3 : 1e-5) << what << ": " << call.text();
}

/// Neither the planner nor the arenas let a tile exceed its memory; the count is the planner's.
void expect_report(const TileCall& call, const TileMachine& machine) {
  const auto& report = last_tile_report();
  EXPECT_LE(report.peak_bytes, machine.memory_per_tile - machine.reserved_per_tile) << call.text();
  EXPECT_NEAR(report.predicted_cycles, report.cycles, 0.05 * report.cycles) << call.text();
  double phases = 0;
  for (const auto& phase : report.phases) phases += phase.compute_cycles + phase.exchange_cycles + phase.sync_cycles;
  if (!machine.overlap) {
    EXPECT_NEAR(phases, report.cycles, 1e-6 * phases);
  }
}

void run_both(TileCall& call, const TileMachine& machine) {
  call.draw();
  call.forward(true);
  call.forward(false);
  for (const auto& [what, numbers] : {std::pair{"out", &call.out}, {"lse", &call.lse}, {"row_max", &call.row_max}})
    expect_close(call, what, *numbers);
  expect_report(call, machine);
  call.backward(true);
  call.backward(false);
  for (const auto& [what, numbers] :
       {std::pair{"dq", &call.dq}, {"dk", &call.dk}, {"dv", &call.dv}, {"dbias", &call.db}, {"dsink", &call.ds}})
    expect_close(call, what, *numbers);
  expect_report(call, machine);
}

class Simulator : public ::testing::TestWithParam<std::int64_t> {
 protected:
  ~Simulator() override { use_tile_machine(TileMachine{}); }
};
INSTANTIATE_TEST_SUITE_P(Tiles, Simulator, ::testing::Values(1, 4, 16, 60));

TEST_P(Simulator, RandomCalls) {
  std::mt19937 random(seed_of(unsigned(GetParam())));
  for (int i = 0; i < repeats(60); ++i) {
    auto machine = small_machine(GetParam(), (4 << 20) / GetParam());
    if (i % 3 == 1) machine.memory_bytes_per_cycle = 50;
    if (i % 3 == 2) machine.overlap = true;
    if (i % 4 == 3) machine.mesh_rows = 1, machine.mesh_columns = GetParam(), machine.hop_cycles = 2;
    use_tile_machine(machine);
    auto call = any_call(random);
    run_both(call, machine);
    if (HasFailure()) return;
  }
}

/// Machines of all kinds, and every option that changes what is computed: the count is the planner's.
TEST_P(Simulator, AnyMachine) {
  std::mt19937 random(seed_of(unsigned(20 + GetParam())));
  const auto among = [&](std::initializer_list<double> numbers) { return numbers.begin()[random() % numbers.size()]; };
  for (int i = 0; i < repeats(40); ++i) {
    auto machine = small_machine(GetParam(), (16 << 20) / GetParam());
    machine.separate_vector = random() % 2, machine.overlap = random() % 3 == 0;
    machine.workers = std::int64_t(among({1, 2, 6})), machine.sync_cycles = among({0, 50, 600});
    machine.multiply_adds_float16 = among({8, 64, 2048}), machine.multiply_adds_float32 = among({4, 16, 512});
    machine.exp_per_cycle = among({0.25, 1, 16}), machine.vector_per_cycle = among({1, 4, 128});
    machine.exp_per_cycle_float32 = among({0.25, 1, 8}), machine.vector_per_cycle_float32 = among({1, 2, 64});
    machine.unit_load_cycles = among({0, 16}), machine.unit_start_cycles = among({0, 40});
    machine.exchange_bytes_per_cycle = among({1, 4, 64}), machine.memory_bytes_per_cycle = among({0, 0, 50});
    use_tile_machine(machine);
    auto call = any_call(random);
    call.deterministic = random() % 2;
    run_both(call, machine);
    if (HasFailure()) return;
  }
}

/// predict knows what a call asks for: its report is that of the call, from the least budget on.
TEST_P(Simulator, PredictKnowsWhatACallAsksFor) {
  std::mt19937 random(seed_of(unsigned(60 + GetParam())));
  for (int i = 0; i < repeats(25) && !HasFailure(); ++i) {
    auto machine = small_machine(GetParam(), 4 << 20);
    machine.overlap = random() % 3 == 0, machine.separate_vector = random() % 3 == 0;
    if (random() % 3 == 0) machine.memory_bytes_per_cycle = 50;
    if (random() % 4 == 0) machine.mesh_rows = 1, machine.mesh_columns = GetParam(), machine.hop_cycles = 40;
    use_tile_machine(machine);
    auto call = any_call(random);
    call.layout = Layout(random() % 3), call.deterministic = random() % 4 == 0;
    call.draw();
    call.forward(false);
    auto large = call.lse;
    large.put(std::int64_t(random() % large.size()), random() % 2 ? 40 : -1000);
    bool is_large = false;  // without that
    for (std::int64_t row = 0; row < call.lse.size(); ++row) {
      const auto size = std::abs(call.lse.at(row));
      is_large |= size >= 32 && std::isfinite(size);
    }
    for (const bool backward : {false, true}) {
      call.budget = -1;
      const auto least = least_workspace(call.arranged(call.q.view()), call.arranged(call.k.view()),
                                         call.arranged(call.v.view()), call.options(false), backward);
      for (const auto budget : {std::int64_t{-1}, least, least + std::int64_t(random() % least), 3 * least}) {
        call.budget = budget;
        CallTensors tensors;
        if (backward) call.dlse = tensors.dlse = random() % 2, tensors.large_lse = is_large || random() % 2;
        else tensors.row_sum = tensors.row_max = random() % 2;
        const auto predicted = call.predicted(backward, tensors);
        if (tensors.large_lse) std::swap(call.lse, large);
        if (backward) call.backward(false);
        else call.forward(false, random() % 2, tensors.row_max);
        if (tensors.large_lse) std::swap(call.lse, large);
        const auto& report = last_tile_report();
        const auto text = call.text() + (backward ? " backward" : "") + (tensors.row_max ? " lm" : "") +
                          (tensors.large_lse ? " large lse" : "") + ", budget " + std::to_string(budget);
        EXPECT_NEAR(predicted.cycles, report.cycles, 0.05 * report.cycles) << text;
        EXPECT_EQ(predicted.peak_bytes, report.peak_bytes) << text;
        EXPECT_EQ(predicted.multiply_adds, report.multiply_adds) << text;
        const auto mapping = [](const TileReport& one) {
          return std::vector{one.num_chunks_q,     one.num_chunks_kv,       one.grid_rows, one.grid_columns,
                             one.chunks_in_flight, one.head_groups_at_once, one.waves};
        };
        EXPECT_EQ(mapping(predicted), mapping(report)) << text;
      }
    }
  }
}

TEST(Prediction, OfTensorsOfTheOtherDirection) {
  TileCall call;
  call.draw();
  CallTensors tensors[4];
  tensors[0].row_sum = tensors[1].row_max = tensors[2].dlse = tensors[3].large_lse = true;
  const char* names[] = {"row_sum", "row_max", "dlse", "large_lse"};
  for (int i = 0; i < 4; ++i) {
    const bool backward = i < 2;
    try {
      call.predicted(backward, tensors[i]);
      ADD_FAILURE() << names[i] << ": no error";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                std::string(names[i]) + ": given to a " +
                    (backward ? "backward call, expected a forward one" : "forward call, expected a backward one"));
    }
    EXPECT_NO_THROW(call.predicted(!backward, tensors[i]));
  }
}

/// Deterministic backward calls sum P first: steps whose products and vector operations have another ratio.
TEST(Prediction, OfSumsOfP) {
  for (const bool separate : {false, true})
    for (const double start : {0.0, 200.0})
      for (const double rate : {64.0, 2048.0})
        for (const std::int64_t chunks : {4, 32})
          for (const auto& rule : {full(), causal(), local(20)}) {
            auto machine = small_machine(4, 4 << 20);
            machine.separate_vector = separate, machine.unit_start_cycles = start;
            machine.multiply_adds_float32 = rate, machine.sync_cycles = 0;
            use_tile_machine(machine);
            TileCall call;
            call.queries = call.keys = {256}, call.heads = 2, call.rule = rule, call.deterministic = true;
            call.chunks_q = chunks, call.chunks_kv = 128 / chunks, call.d_qk = 64, call.d_v = 16;
            run_both(call, machine);
          }
  use_tile_machine(TileMachine{});
}

TEST_P(Simulator, AnyGrid) {
  std::mt19937 random(seed_of(7));
  const auto machine = small_machine(GetParam(), 8 << 20);
  for (int i = 0; i < repeats(30); ++i) {
    const auto rows = 1 + std::int64_t(random() % GetParam());
    const auto columns = 1 + std::int64_t(random() % (GetParam() / rows));
    use_tile_machine(machine, {.grid_rows = rows, .grid_columns = columns, .chunks_in_flight = 1 + columns % 3});
    auto call = any_call(random);
    run_both(call, machine);
    if (HasFailure()) return;
    EXPECT_EQ(last_tile_report().grid_rows, rows);
    EXPECT_EQ(last_tile_report().grid_columns, columns);
  }
}

TEST_P(Simulator, RepeatsItsBits) {
  const auto machine = small_machine(GetParam(), 1 << 20);
  use_tile_machine(machine);
  TileCall call;
  call.heads = 4, call.kv_heads = 2, call.rule = causal() & local(500);
  call.queries = {900}, call.keys = {1000};  // enough work in a phase for several threads
  call.draw();
  call.forward(false);
  auto again = call;
  for (const std::int64_t threads : {1, 2, 5}) {
    auto options = again.options(false);
    options.threads = threads;
    forward(again.q.view(), again.k.view(), again.v.view(), {again.out.view(), again.lse.view(), {}, {}}, options);
    EXPECT_EQ(again.out.bytes(), call.out.bytes());
    EXPECT_EQ(again.lse.bytes(), call.lse.bytes());
  }
}

TEST(Memory, TooLittleNamesTilePhaseAndBytes) {
  const auto machine = small_machine(4, 24000);
  use_tile_machine(machine);
  TileCall call;
  call.chunks_q = call.chunks_kv = 1;
  call.queries = call.keys = {256}, call.d_qk = call.d_v = 16;
  call.draw();
  const auto before = call.out.bytes();
  try {
    call.forward(false);
    FAIL() << "no error";
  } catch (const Error& error) {
    const std::string line = error.what();
    EXPECT_EQ(error.kind(), Error::Kind::memory);
    EXPECT_NE(line.find("tile 0, phase 'keys 0': "), std::string::npos) << line;
    EXPECT_NE(line.find("bytes live, expected at most 24000"), std::string::npos) << line;
  }
  EXPECT_EQ(call.out.bytes(), before);
  call.chunks_q = call.chunks_kv = 0;  // the planner finds chunks that fit
  call.forward(true);
  call.forward(false);
  expect_close(call, "out", call.out);
  EXPECT_LE(last_tile_report().peak_bytes, 24000);
  use_tile_machine(TileMachine{});
}

/// Runs both passes on tiles and returns the bits of one batch entry's results.
std::vector<std::string> bits_of_entry(TileCall& call, std::int64_t entry) {
  call.forward(false);
  call.backward(false);
  EXPECT_EQ(last_tile_report().backward, true);
  std::vector<std::string> bits;
  for (auto* numbers : {&call.out, &call.lse, &call.dq, &call.dk, &call.dv}) {
    const auto all = numbers->bytes();
    const auto one = all.size() / std::size_t(call.batch);
    bits.emplace_back(reinterpret_cast<const char*>(all.data()) + std::size_t(entry) * one, one);
  }
  return bits;
}

/// Copies a batch entry of a tensor to a tensor that has it alone.
void copy_entry(Numbers& from, std::int64_t batch, std::int64_t entry, Numbers& to) {
  const auto bytes = from.bytes().size() / std::size_t(batch);
  std::memcpy(to.view().data, static_cast<const char*>(from.view().data) + std::size_t(entry) * bytes, bytes);
}

TEST(Deterministic, ABatchEntryHasTheBitsThatItHasAlone) {
  std::mt19937 random(seed_of(11));
  int differ = 0;  // calls whose mapping is another one in a batch, without deterministic
  for (int i = 0; i < repeats(12); ++i) {
    use_tile_machine(small_machine(12, 1 << 19));
    TileCall batch;
    batch.type = i % 2 ? ElementType::float32 : ElementType::float16;
    batch.batch = 3, batch.heads = 2, batch.kv_heads = 1 + i % 2, batch.d_qk = batch.d_v = 16;
    batch.queries = batch.keys = {100 + 10 * i}, batch.rule = i % 3 ? causal() : full();
    if (i % 4 == 0) batch.key_lengths = {90, 17, 60};
    batch.deterministic = true;
    if (i % 2) batch.budget = 90000;
    batch.draw();
    const std::int64_t entry = i % 3;
    auto alone = batch;
    alone.batch = 1;
    if (!batch.key_lengths.empty()) alone.key_lengths = {batch.key_lengths[std::size_t(entry)]};
    alone.draw();
    for (const auto& [from, to] :
         {std::pair{&batch.q, &alone.q}, {&batch.k, &alone.k}, {&batch.v, &alone.v}, {&batch.dout, &alone.dout}})
      copy_entry(*from, 3, entry, *to);
    EXPECT_EQ(bits_of_entry(batch, entry), bits_of_entry(alone, 0)) << batch.text();
    batch.deterministic = alone.deterministic = false, batch.budget = alone.budget = -1;
    batch.forward(false);
    const auto rows = last_tile_report().grid_rows;
    alone.forward(false);
    differ += rows != last_tile_report().grid_rows;
  }
  EXPECT_GT(differ, 0);
  use_tile_machine(TileMachine{});
}

/// The least budget that an error names; -1 if there is none.
template <typename F>
std::int64_t named_least(const F& run) {
  try {
    run();
  } catch (const Error& error) {
    const std::string line = error.what(), before = "expected at least ";
    if (line.find(before) != std::string::npos) return std::stoll(line.substr(line.find(before) + before.size()));
    ADD_FAILURE() << line;
  }
  return -1;
}

/// A call, explain and predict name the same least budget. Each that is smaller is refused with that number, each that is
/// larger works, whatever results are asked for and however large an lse is.
void expect_budgets_work(TileCall& call, const TileMachine& machine, std::mt19937& random) {
  call.draw();
  call.forward(true);
  auto large = call.lse;
  large.put(0, 1000);
  for (const bool backward : {false, true}) {
    const auto run = [&](std::int64_t budget) {
      call.budget = budget;
      backward ? call.backward(false) : call.forward(false);
    };
    const auto predict = [&](std::int64_t budget) {
      call.budget = budget;
      predict_tiles(call.q.view(), call.k.view(), call.v.view(), call.options(false), backward);
    };
    const auto text = call.text() + (backward ? " backward" : "") + (call.deterministic ? " deterministic" : "");
    const auto least = named_least([&] { run(1); });
    EXPECT_EQ(named_least([&] { predict(1); }), least) << text;
    EXPECT_EQ(explain_plan(call.q.view(), call.k.view(), call.v.view(), call.options(false), backward).least_bytes,
              least)
        << text;
    for (const auto budget : {least - 1, std::int64_t(random() % least)})
      EXPECT_EQ(named_least([&] { run(budget); }), least) << text << " with " << budget;
    for (const auto budget : {least, least + std::int64_t(random() % least), 2 * least, 3 * least + 1, 20 * least}) {
      ASSERT_NO_THROW(predict(budget)) << text << " with " << budget << ", the least is " << least;
      ASSERT_NO_THROW(run(budget)) << text << " with " << budget << ", the least is " << least;
      EXPECT_LE(last_tile_report().peak_bytes, budget) << text;
      expect_report(call, machine);
    }
    call.budget = least;
    ASSERT_NO_THROW(backward ? (std::swap(call.lse, large), call.backward(false), std::swap(call.lse, large))
                             : forward(call.q.view(), call.k.view(), call.v.view(), {call.out.view(), {}, {}, {}},
                                       call.options(false)))
        << text;
  }
}

TEST_P(Simulator, BudgetsFromTheLeastOnWork) {
  std::mt19937 random(seed_of(unsigned(40 + GetParam())));
  for (int i = 0; i < repeats(12) && !HasFailure(); ++i) {
    auto machine = small_machine(GetParam(), 4 << 20);
    machine.overlap = i % 2;
    if (i % 3 == 1) machine.memory_bytes_per_cycle = 50;
    if (i % 3 == 2) machine.mesh_rows = 1, machine.mesh_columns = GetParam(), machine.hop_cycles = 40;
    use_tile_machine(machine);
    auto call = any_call(random);
    call.deterministic = i % 4 > 1;
    expect_budgets_work(call, machine, random);
  }
}

TEST(Budget, RefusedBeforeAnythingIsWritten) {
  for (const bool deterministic : {false, true}) {
    use_tile_machine(small_machine(8, 1 << 20));
    TileCall call;
    call.batch = 2, call.queries = call.keys = {200}, call.rule = causal(), call.deterministic = deterministic;
    call.draw();
    call.budget = least_workspace(call.q.view(), call.k.view(), call.v.view(), call.options(false), false) - 1;
    const auto before = call.out.bytes();
    EXPECT_EQ(named_least([&] { call.forward(false); }), call.budget + 1);
    EXPECT_EQ(call.out.bytes(), before);
  }
  use_tile_machine(TileMachine{});
}

/// Below a tile's memory no budget works, and the line names the bound. From there on a budget does not bind.
TEST(Budget, OfALeastBeyondTheMemoryOfATile) {
  const auto machine = small_machine(4, 1 << 15);
  use_tile_machine(machine);
  TileCall call;
  call.queries = call.keys = {88}, call.d_qk = call.d_v = 32;
  call.draw();
  const auto before = call.dq.bytes();
  for (const bool deterministic : {false, true})
    for (const std::int64_t budget : {1, (1 << 15) - 1}) {
      call.deterministic = deterministic, call.budget = budget;
      try {
        call.backward(false);
        FAIL() << "no error";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), Error::Kind::memory);
        EXPECT_STREQ(error.what(),
                     "tile machine small: tile 0, phase 'sums of P 0': up to 33280 bytes live under a memory_budget, "
                     "expected at most 32768; with 88 query and 88 key chunks");
      }
      EXPECT_EQ(call.dq.bytes(), before);
    }
  call.deterministic = false;
  for (const std::int64_t budget : {1 << 15, 1 << 20, -1}) {
    call.budget = budget;
    ASSERT_NO_THROW(call.backward(false)) << budget;
    expect_report(call, machine);
  }
  EXPECT_NE(call.dq.bytes(), before);
  use_tile_machine(TileMachine{});
}

TEST(Budget, OfDeterministicBatches) {
  struct Sizes {
    const char* machine;
    std::int64_t tiles, batch, heads, queries, keys, d;
  };
  std::mt19937 random(1);
  for (const auto& sizes : {Sizes{"bow", 1, 2, 2, 100, 64, 40},
                            {"flatattention-32x32", 16, 5, 4, 17, 300, 16},
                            {"ipu-mk2", 4, 9, 4, 30, 90, 16}}) {
    auto machine = tile_machine(sizes.machine);
    machine.tiles = sizes.tiles;
    if (machine.mesh_columns > 0) machine.mesh_rows = machine.mesh_columns = 4;
    use_tile_machine(machine);
    TileCall call;
    call.type = ElementType::float16, call.batch = sizes.batch, call.heads = call.kv_heads = sizes.heads;
    call.queries = {sizes.queries}, call.keys = {sizes.keys}, call.d_qk = call.d_v = sizes.d;
    call.deterministic = true;
    expect_budgets_work(call, machine, random);
  }
  use_tile_machine(TileMachine{});
}

/// The mapping of one head changes where the budget passes a power of two. A batch that fitted just below must fit there.
TEST(Budget, OfDeterministicBatchesAtPowersOfTwo) {
  auto machine = tile_machine("ipu-mk2");
  machine.tiles = 4;
  use_tile_machine(machine);
  for (std::int64_t batch = 1; batch <= 40; ++batch) {
    const TensorView q(nullptr, ElementType::float16, {batch, 1, 250, 16}, Device{DeviceKind::tiles});
    Options options;
    options.deterministic = true;
    const auto least = least_workspace(q, q, q, options, false);
    for (std::int64_t power = 1024; power <= 1 << 19; power *= 2)
      for (const auto budget : {power - 1, power, power + power / 64}) {
        options.memory_budget = budget;
        if (budget < least) EXPECT_THROW(predict_tiles(q, q, q, options), Error) << batch << " with " << budget;
        else EXPECT_NO_THROW(predict_tiles(q, q, q, options)) << batch << " with " << budget;
      }
  }
  use_tile_machine(TileMachine{});
}

/// Steps of the least budget have the fewest rows; so have those that are executed.
TEST(Budget, OfAlikeRows) {
  std::mt19937 random(1);
  auto machine = tile_machine("ipu-mk2");
  machine.tiles = 16;
  use_tile_machine(machine);
  TileCall call;
  call.queries = call.keys = {64}, call.d_qk = call.d_v = 40;
  expect_budgets_work(call, machine, random);
  use_tile_machine(TileMachine{});
}

/// The estimate of memory counts both waves that a machine with overlap holds.
TEST(Prediction, OfMemoryWithOverlap) {
  auto machine = small_machine(4, 1 << 20);
  machine.overlap = true, machine.memory_bytes_per_cycle = 50;
  TileCall call;
  call.batch = 8, call.queries = call.keys = {256};
  call.draw();
  const auto problem =
      shape_problem(call.q.view(), call.k.view(), call.v.view(), call.options(false), Direction::forward);
  const auto plan = make_plan(problem, backend_of(problem.device).menu(problem));
  const simulator::Call of_tiles(problem, *plan, machine, {});
  simulator::Mapping mapping;
  mapping.query_chunks = mapping.key_chunks = 4, mapping.rows = 4, mapping.waves = 8;
  EXPECT_EQ(simulator::typical_bytes(of_tiles, mapping, simulator::typical_sizes(of_tiles, mapping)),
            simulator::evaluate(of_tiles, mapping).peak);
}

/// A tile does not send itself the keys that it alone computes with.
TEST(Prediction, OfKeysThatNoOtherTileWants) {
  auto machine = tile_machine("bow");
  machine.tiles = 2, machine.memory_per_tile = 1 << 17;
  TileChoice choice;
  choice.chunks_in_flight = 1;
  use_tile_machine(machine, choice);
  TileCall call;
  call.type = ElementType::float16, call.batch = 2, call.queries = call.keys = {64}, call.d_qk = call.d_v = 40;
  call.rule = local(17), call.deterministic = true, call.chunks_kv = 4;
  call.draw();
  call.forward(false);
  EXPECT_DOUBLE_EQ(last_tile_report().predicted_cycles, last_tile_report().cycles);
  use_tile_machine(TileMachine{});
}

/// Delays are those of ways that bytes go.
TEST(Prediction, OfDelaysOnAMesh) {
  for (const std::int64_t columns : {1, 2, 4, 16})
    for (const std::int64_t keys : {1, 5, 40})
      for (const auto& rule : {full(), ~causal(), local(3)})
        for (const bool deterministic : {false, true}) {
          auto machine = tile_machine("blackhole");
          machine.tiles = 16, machine.mesh_columns = columns, machine.mesh_rows = 16 / columns;
          machine.hop_cycles = 100;
          use_tile_machine(machine);
          TileCall call;
          call.type = ElementType::float16, call.batch = 2, call.heads = call.kv_heads = 2, call.d_qk = call.d_v = 16;
          call.queries = {100}, call.keys = {keys}, call.rule = rule, call.deterministic = deterministic;
          call.draw();
          call.forward(true);
          for (const bool backward : {false, true}) {
            backward ? call.backward(false) : call.forward(false);
            EXPECT_NEAR(last_tile_report().predicted_cycles, last_tile_report().cycles, 1) << call.text();
          }
        }
  use_tile_machine(TileMachine{});
}

TEST(Mapping, ColumnsDealShortChunksEvenly) {
  for (const std::int64_t rows : {3, 7, 40})
    for (const std::int64_t size : {1, 2, 5, 40, 45}) {
      std::vector<std::int64_t> keys(std::size_t(rows), 0);
      for (std::int64_t chunk = 0; chunk < 40; ++chunk) {
        std::int64_t next = 0;
        for (std::int64_t row = 0; row < rows; ++row) {
          const auto slice = simulator::slice_of(size, rows, row, chunk * size % rows);
          EXPECT_EQ(slice.first, next);
          next = slice.end;
          keys[std::size_t(row)] += slice.size();
        }
        EXPECT_EQ(next, size);
      }
      const auto [least, most] = std::minmax_element(keys.begin(), keys.end());
      EXPECT_LE(*most - *least, 1) << size << " keys, " << rows << " rows";
    }
}

TEST(Report, TracesTransfers) {
  const auto machine = small_machine(6, 1 << 20);
  use_tile_machine(machine, {.grid_rows = 3, .grid_columns = 2, .trace = true});
  TileCall call;
  call.queries = call.keys = {96};
  call.draw();
  forward(call.q.view(), call.k.view(), call.v.view(), {call.out.view(), call.lse.view(), {}, {}}, call.options(false));
  const auto& report = last_tile_report();
  std::int64_t bytes = 0;
  for (const auto& transfer : report.transfers) bytes += transfer.bytes;
  EXPECT_EQ(bytes, report.exchanged_bytes);
  ASSERT_EQ(report.live_bytes.size(), report.phases.size() * 6);
  for (std::size_t p = 0; p < report.phases.size(); ++p) {
    const auto first = report.live_bytes.begin() + std::ptrdiff_t(p * 6);
    EXPECT_EQ(*std::max_element(first, first + 6), report.phases[p].live_bytes_max);
    const auto cycles = report.tile_compute_cycles.begin() + std::ptrdiff_t(p * 6);
    EXPECT_EQ(*std::max_element(cycles, cycles + 6), report.phases[p].compute_cycles);
  }
  EXPECT_EQ(report.multiply_adds, 96.0 * 96 * 16);
  const auto predicted = predict_tiles(call.q.view(), call.k.view(), call.v.view(), call.options(false));
  EXPECT_EQ(predicted.live_bytes, report.live_bytes);
  EXPECT_EQ(predicted.exchanged_bytes, report.exchanged_bytes);
  EXPECT_NEAR(predicted.cycles, report.cycles, 1e-6 * report.cycles);
  use_tile_machine(TileMachine{});
}

}  // namespace
}  // namespace anyflash::testing
