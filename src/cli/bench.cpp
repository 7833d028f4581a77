// anyflash bench: the time that forward and backward take.
//
// Figure: useful floating-point operations, as `explain` counts them, divided by the median time. Spread: the slowest
// of the repetitions divided by the fastest, minus 1.

#include <anyflash/anyflash.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "calibrate.h"
#include "call.h"
#include "check_cases.h"
#include "commands.h"
#include "layouts.h"
#include "numbers.h"
#include "progress.h"
#include "results.h"
#include "shapes.h"
#include "tensor_file.h"
#include "tiles.h"

namespace anyflash::cli {

namespace {

struct BenchArguments {
  std::vector<std::string> shapes = {"2048"}, rules = {"full()", "causal()"}, types = {"float32"};
  std::vector<int> threads = {0}, head_sizes = {64};
  std::string keys, direction = "both", json;
  Options options;  // align and the switches
  Device device;
  bool calibrate = false, predict = false;
  std::string output;
  int batch = 1, heads = 4, kv_heads = 0, value_size = 0, repetitions = 7;
};

struct BenchCase {
  std::string rule, type, shape;
  int threads, head_size;
};

struct Timing {
  std::string direction;
  double median = 0, spread = 0, gflops = 0;  // seconds, a ratio, 10^9 useful operations a second
  std::optional<TileReport> tiles = {};
};

template <class Work>
Timing time_of(const std::string& direction, int repetitions, double flops, const Work& work) {
  std::vector<double> seconds;
  work();  // the first run makes the plan
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = (seconds[(seconds.size() - 1) / 2] + seconds[seconds.size() / 2]) / 2;
  return {direction, median, seconds.back() / seconds.front() - 1, flops / median / 1e9};
}

/// On the tile machine a call's time is that of the machine, always the same.
template <class Work>
Timing time_on(const Device& device, const std::string& direction, int repetitions, double flops, const Work& work) {
  if (device.kind != DeviceKind::tiles) return time_of(direction, repetitions, flops, work);
  work();
  const auto& report = last_tile_report();
  return {direction, report.seconds, 0, flops / report.seconds / 1e9, report};
}

std::vector<Timing> time_case(const BenchArguments& arguments, const BenchCase& one) {
  const auto type = *float_type(one.type);
  const auto queries = parse_shape("--shape", one.shape);
  const auto keys = parse_keys(arguments.keys, queries);
  const auto d_v = arguments.value_size > 0 ? arguments.value_size : one.head_size;
  const auto kv_heads = arguments.kv_heads > 0 ? arguments.kv_heads : arguments.heads;
  Call call;
  call.device = arguments.device;
  call.options = arguments.options;
  call.options.rule = parse_rule(one.rule);
  call.options.threads = one.threads;
  call.q = random_normal(type, shape_in(Layout::bhsd, arguments.batch, arguments.heads, queries, one.head_size), 1);
  call.k = random_normal(type, shape_in(Layout::bhsd, arguments.batch, kv_heads, keys, one.head_size), 2);
  call.v = random_normal(type, shape_in(Layout::bhsd, arguments.batch, kv_heads, keys, d_v), 3);

  const auto explanation =
      explain(call.options.rule, queries, keys, {arguments.options.align, one.head_size, d_v, type, false});
  const double heads = double(arguments.batch) * arguments.heads;
  std::vector<Timing> timings;
  const auto results = run_forward(call);
  PlacedCall placed(call, results);
  if (arguments.direction != "backward")
    timings.push_back(time_on(call.device, "forward", arguments.repetitions, heads * explanation.forward_flops,
                              [&] { placed.forward(); }));
  if (arguments.direction == "forward") return timings;
  const auto dout = random_dout(call, 4);
  const auto gradients = run_backward(call, results, dout, nullptr);
  placed.add_backward(dout, nullptr, gradients);
  timings.push_back(time_on(call.device, "backward", arguments.repetitions, heads * explanation.backward_flops,
                            [&] { placed.backward(); }));
  return timings;
}

void has_entries(const std::string& option, const SequenceShape& shape) {
  if (volume(shape) == 0) fail(option + ": '" + text_of(shape) + "' has no entry, there is nothing to time");
}

std::vector<BenchCase> cases_of(const BenchArguments& arguments) {
  std::vector<BenchCase> cases;
  if (arguments.kv_heads > 0 && arguments.heads % arguments.kv_heads != 0)
    fail("--kv-heads: " + std::to_string(arguments.kv_heads) + ", expected a divisor of the " +
         std::to_string(arguments.heads) + " of --heads");
  for (const auto& rule : arguments.rules)
    for (const auto& type : arguments.types)
      for (const auto& shape : arguments.shapes)
        for (const auto threads : arguments.threads)
          for (const auto head_size : arguments.head_sizes) {
            parse_rule(rule);
            const auto queries = parse_shape("--shape", shape);
            has_entries("--shape", queries);
            has_entries("--keys", parse_keys(arguments.keys, queries));
            cases.push_back({rule, type, shape, threads, head_size});
          }
  return cases;
}

/// Throws Error for an option that --calibrate or --predict would not read.
void refuse_unused(const CLI::App& command, const BenchArguments& arguments) {
  const std::string way = arguments.calibrate ? "--calibrate" : "--predict";
  if (!arguments.calibrate && !arguments.predict) return;
  for (const auto* option : command.get_options()) {
    const auto name = option->get_name();
    if (option->count() > 0 && name != way && name != "--output") fail(name + ": expected without " + way);
  }
}

void bench_command(const BenchArguments& arguments) {
  if (!arguments.output.empty() && !arguments.calibrate) fail("--output: expected only with --calibrate");
  if (arguments.calibrate) return calibrate(arguments.output, false);
  if (arguments.predict) return predict();
  const auto cases = cases_of(arguments);
  if (!arguments.json.empty()) check_target(arguments.json);
  auto rows = nlohmann::ordered_json::array();
  Progress progress(int(cases.size()));
  for (const auto& one : cases) {
    progress.step("timing " + one.rule + " " + one.type + " " + one.shape);
    const auto timings = time_case(arguments, one);
    progress.clear();
    if (rows.empty())
      std::printf("%-32s %-9s %12s %5s %8s %-9s %12s %9s %8s\n", "rule", "type", "shape", "head", "threads",
                  "direction", "median ms", "GFLOP/s", "spread");
    for (const auto& timing : timings) {
      std::printf("%-32s %-9s %12s %5d %8s %-9s %12.3f %9.1f %6.1f %%\n", one.rule.c_str(), one.type.c_str(),
                  one.shape.c_str(), one.head_size, one.threads ? std::to_string(one.threads).c_str() : "all",
                  timing.direction.c_str(), 1e3 * timing.median, timing.gflops, 100 * timing.spread);
      if (timing.tiles) print_tiles(*timing.tiles);
      rows.push_back({{"rule", one.rule},
                      {"type", one.type},
                      {"shape", one.shape},
                      {"keys", arguments.keys.empty() ? one.shape : arguments.keys},
                      {"align", name_of(arguments.options.align)},
                      {"batch", arguments.batch},
                      {"heads", arguments.heads},
                      {"kv_heads", arguments.kv_heads > 0 ? arguments.kv_heads : arguments.heads},
                      {"head_size", one.head_size},
                      {"value_size", arguments.value_size > 0 ? arguments.value_size : one.head_size},
                      {"device", device_name(arguments.device)},
                      {"threads", one.threads},
                      {"direction", timing.direction},
                      {"repetitions", arguments.repetitions},
                      {"median_seconds", timing.median},
                      {"gflops", timing.gflops},
                      {"spread", timing.spread}});
      if (timing.tiles) rows.back()["tiles"] = tiles_json(*timing.tiles);
      for_each_switch([&](const char* name, auto member) { rows.back()[name] = arguments.options.*member; });
    }
    std::fflush(stdout);
  }
  if (arguments.json.empty()) return;
  write_file_whole(arguments.json, [&](const std::string& path) {
    std::ofstream file(path);
    file << rows.dump(2) << '\n';
    file.close();
    if (!file) fail("cannot be written");
  });
}

}  // namespace

void add_bench(CLI::App& app) {
  auto* command = app.add_subcommand("bench", "Time forward and backward; every combination of the repeated options.");
  const auto arguments = std::make_shared<BenchArguments>();
  auto* a = arguments.get();
  const auto count = [&](const char* name, int& value, const char* help, int least, int most = 1 << 20) {
    command->add_option(name, value, help)
        ->check(CLI::Range(least, most).description(""))
        ->capture_default_str()
        ->type_name("N");
  };
  command->add_option("--shape", a->shapes, "sequence: 4096, 512x512, ... (may be repeated)")
      ->capture_default_str()
      ->type_name("SIZES");
  command->add_option("--keys", a->keys, "the keys' sequence, if it is another")->type_name("SIZES");
  command->add_option("-r,--rule", a->rules, "mask rule (may be repeated)")->capture_default_str();
  command->add_option("--type", a->types, "element type (may be repeated)")
      ->check(one_of(float_type_names()))
      ->capture_default_str()
      ->type_name("NAME");
  command->add_option("--head-size", a->head_sizes, "channels of queries and keys (may be repeated)")
      ->check(CLI::Range(1, 256).description(""))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--threads", a->threads, "threads, all if 0 (may be repeated)")
      ->check(CLI::Range(0, 4096).description(""))
      ->capture_default_str()
      ->type_name("N");
  count("--value-size", a->value_size, "channels of values, as --head-size if 0", 0, 512);
  count("--batch", a->batch, "batch entries", 1);
  count("--heads", a->heads, "query heads", 1);
  count("--kv-heads", a->kv_heads, "key and value heads, as --heads if 0", 0);
  count("--repetitions", a->repetitions, "timed runs, after one to warm up", 1);
  add_align(*command, a->options.align);
  add_device(*command, a->device);
  add_switches(*command, a->options);
  command->add_option("--direction", a->direction, "forward, backward or both")
      ->check(one_of({"forward", "backward", "both"}))
      ->capture_default_str()
      ->type_name("NAME");
  command->add_option("--json", a->json, "also write the rows to this file")->type_name("FILE");
  command->add_flag("--calibrate", a->calibrate, "measure the constants of 'explain --plan' and keep them in a file");
  command->add_option("-o,--output", a->output, "that file, if it is another than explain reads")->type_name("FILE");
  command->add_flag("--predict", a->predict, "compare predicted times with measured ones");
  command->footer(
      "GFLOP/s counts useful operations only, for each visible pair: 2 x (head size + value size) forward, 6 x head "
      "size + 4 x value size backward. With --device tiles the time is that of the simulated machine.\n\n"
      "Examples:\n"
      "  anyflash bench --shape 2048 --rule \"causal()\" --type float32 --threads 1\n"
      "  anyflash bench --calibrate\n"
      "  anyflash bench --shape 256x256 --rule \"local(8)\" --rule \"neighbourhood(13)\" --json bench.json\n"
      "  anyflash bench --shape 4096 --type float16 --device tiles --machine bow");
  command->callback([arguments, command] {
    refuse_unused(*command, *arguments);
    bench_command(*arguments);
  });
}

}  // namespace anyflash::cli
