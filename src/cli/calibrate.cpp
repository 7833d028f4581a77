// anyflash bench --calibrate: measures the constants of the cost model. anyflash bench --predict: compares what the
// model predicts with what is measured.

#include "calibrate.h"

#include <anyflash/anyflash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "check_cases.h"
#include "layouts.h"
#include "numbers.h"
#include "progress.h"
#include "results.h"
#include "tensor_file.h"

namespace anyflash::cli {

namespace {

struct Shaped {
  const char* rule;
  ElementType type;
  std::int64_t heads, length, head_size;
  bool backward;
  int threads;
  std::int64_t chunks_q = 0, chunks_kv = 0;
};

/// A call on tensors of its own, ready to be timed.
class Timed {
 public:
  explicit Timed(const Shaped& one) : backward_(one.backward), call_(made(one)), results_(run_forward(call_)) {
    placed_.emplace(call_, results_);
    if (!backward_) return;
    dout_ = random_dout(call_, 4);
    gradients_ = run_backward(call_, results_, dout_, nullptr);
    placed_->add_backward(dout_, nullptr, gradients_);
  }
  Timed(const Timed&) = delete;

  /// Runs once; the time in seconds.
  double run() {
    const auto start = std::chrono::steady_clock::now();
    backward_ ? placed_->backward() : placed_->forward();
    const auto took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best_ = std::min(best_, took);
    return took;
  }
  /// The fastest run: other work on the machine only makes one slower.
  double best() const { return best_; }

 private:
  static Call made(const Shaped& one) {
    Call call;
    call.options.rule = parse_rule(one.rule);
    call.options.threads = one.threads;
    if (one.chunks_q > 0) call.options.num_chunks_q = one.chunks_q;
    if (one.chunks_kv > 0) call.options.num_chunks_kv = one.chunks_kv;
    const auto shape = shape_in(Layout::bhsd, 1, one.heads, {one.length}, one.head_size);
    call.q = random_normal(one.type, shape, 1);
    call.k = random_normal(one.type, shape, 2);
    call.v = random_normal(one.type, shape, 3);
    return call;
  }

  const bool backward_;
  const Call call_;
  const Results results_;
  OwnedTensor dout_;
  NamedTensors gradients_;
  std::optional<PlacedCall> placed_;
  double best_ = std::numeric_limits<double>::infinity();
};

double seconds_of(const Shaped& one, double least_time) {
  Timed timed(one);
  double spent = 0;
  for (int i = 0; i < 3 || (spent < least_time && i < 200); ++i) spent += timed.run();
  return timed.best();
}

/// How many times as fast all threads are as one: the fastest of many rounds of each, in turn. A round is shorter than
/// the time that a busy system leaves a thread alone, and rounds come at several times, so some have all processors.
class SpeedUp {
 public:
  explicit SpeedUp(bool backward) : one_(shape(backward, 1)), all_(shape(backward, 0)) {}
  void measure() {
    for (double spent = 0; spent < 0.25;) spent += one_.run() + all_.run();
  }
  double found() const { return one_.best() / all_.best(); }

 private:
  static Shaped shape(bool backward, int threads) {
    return {"full()", ElementType::float32, 8, 256, 64, backward, threads};
  }
  Timed one_, all_;
};

PlanCandidate predicted(const Shaped& one, const Calibration& machine) {
  TensorView q;
  q.type = one.type, q.rank = 4;
  q.shape = {1, one.heads, one.length, one.head_size};
  q.set_row_major_strides();
  Options options;
  options.rule = parse_rule(one.rule);
  options.threads = one.threads;
  if (one.chunks_q > 0) options.num_chunks_q = one.chunks_q;
  if (one.chunks_kv > 0) options.num_chunks_kv = one.chunks_kv;
  for (const auto& candidate : explain_plan(q, q, q, options, one.backward, machine).candidates)
    if (candidate.chosen) return candidate;
  return {};
}

/// Measures one type and direction: a line through two head sizes with a full rule, then the factor of partial tiles,
/// with which the model predicts the time of two rules. The prediction is linear in each.
void measure(ElementType type, bool backward, double least_time, Calibration& made, Calibration::Speed& speed) {
  auto& tile = backward ? speed.backward_tile : speed.forward_tile;
  auto& channel = backward ? speed.backward_channel : speed.forward_channel;
  auto& partial = backward ? speed.backward_partial : speed.partial;
  double at[2];
  const std::int64_t sizes[] = {64, 128};
  for (int i = 0; i < 2; ++i) {
    const Shaped one{"full()", type, 2, 1024, sizes[i], backward, 1};
    tile = channel = 0, partial = 1;
    const double rest = predicted(one, made).cost.total();
    tile = 1e-6;
    const double slope = (predicted(one, made).cost.total() - rest) / tile;
    at[i] = std::max(seconds_of(one, least_time) - rest, 1e-9) / slope;
  }
  channel = std::max((at[1] - at[0]) / 128, 0.0), tile = std::max(at[0] - channel * 128, 0.0);
  double sum = 0;
  for (const char* const rule : {"causal()", "local(256)"}) {
    const Shaped one{rule, type, 2, 1024, 64, backward, 1};
    partial = 0;
    const double rest = predicted(one, made).cost.total();
    partial = 1;
    const double slope = predicted(one, made).cost.total() - rest;
    sum += std::clamp((seconds_of(one, least_time) - rest) / slope, 0.5, 4.0);
  }
  partial = sum / 2;
}

}  // namespace

void calibrate(const std::string& output, bool quiet) {
  const auto path = output.empty() ? calibration_path() : output;
  if (path.empty()) fail("--calibrate: no folder for the file, expected --output FILE or HOME to be set");
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code failed;
  if (!folder.empty() && output.empty()) std::filesystem::create_directories(folder, failed);
  check_target(path);
  unsetenv("ANYFLASH_CALIBRATION");  // the calls that are timed must not look for the file that is not written yet
  constexpr ElementType types[] = {ElementType::float16, ElementType::bfloat16, ElementType::float32,
                                   ElementType::float64};
  Calibration made;
  Calibration::Speed* const speeds[] = {&made.float16, &made.bfloat16, &made.float32, &made.float64};
  Progress progress(5, quiet);
  SpeedUp forward(false), backward(true);
  for (int i = 0; i < 4; ++i) {
    progress.step(std::string("measuring ") + element_name(types[i]));
    auto& speed = *speeds[i];
    speed.number = 2.5e-10 * double(i == 3 ? 2 : 1);
    measure(types[i], false, 0.1, made, speed);
    measure(types[i], true, 0.1, made, speed);
    forward.measure(), backward.measure();
  }
  for (const auto& device : devices())
    if (device.device.kind == DeviceKind::cpu) made.threads = std::max(device.threads, 1);
  const double speed_up = (forward.found() + backward.found()) / 2;
  made.parallel = made.threads > 1 ? std::clamp(speed_up, 1.0, double(made.threads)) : 1;
  progress.step("measuring small calls");
  made.step = std::max(seconds_of({"full()", ElementType::float32, 2, 64, 16, false, 2}, 0.05), 1e-6);
  progress.clear();
  write_file_whole(path, [&](const std::string& place) {
    std::ofstream file(place);
    file << calibration_text(made);
    file.close();
    if (!file) fail("cannot be written");
  });
  if (!quiet) std::printf("%swritten to %s\n", calibration_text(made).c_str(), path.c_str());
}

void predict() {
  constexpr auto f32 = ElementType::float32, bf16 = ElementType::bfloat16;
  constexpr Shaped calls[] = {
      {"full()", f32, 4, 1024, 64, false, 1},         {"full()", f32, 4, 1024, 128, false, 2},
      {"causal()", f32, 4, 1024, 64, false, 1},       {"causal()", f32, 4, 2048, 128, false, 1},
      {"causal()", f32, 8, 1024, 64, false, 2},       {"local(256)", f32, 4, 2048, 64, false, 1},
      {"local(128)", f32, 4, 4096, 128, false, 2},    {"full()", bf16, 4, 1024, 64, false, 1},
      {"causal()", bf16, 4, 2048, 128, false, 2},     {"local(256)", bf16, 4, 2048, 64, false, 1},
      {"full()", f32, 4, 1024, 64, true, 1},          {"full()", f32, 4, 1024, 128, true, 2},
      {"causal()", f32, 4, 1024, 64, true, 1},        {"causal()", f32, 4, 2048, 128, true, 2},
      {"local(256)", f32, 4, 2048, 64, true, 1},      {"full()", bf16, 4, 1024, 64, true, 1},
      {"causal()", bf16, 4, 2048, 64, true, 2},       {"full()", f32, 4, 1024, 64, false, 1, 4, 4},
      {"causal()", f32, 4, 2048, 64, false, 1, 2, 2}, {"full()", f32, 2, 1024, 64, true, 1, 4, 1},
      {"full()", f32, 2, 1024, 64, true, 1, 4, 4},    {"causal()", f32, 2, 2048, 64, true, 1, 2, 4}};
  std::printf("constants: %s\n%-12s %-9s %6s %5s %-9s %8s %8s %12s %12s %7s\n", calibration().source.c_str(), "rule",
              "type", "length", "head", "direction", "threads", "chunks", "predicted ms", "measured ms", "ratio");
  double worst = 1;
  for (const auto& one : calls) {
    const double guess = predicted(one, calibration()).cost.total(), time = seconds_of(one, 0.3), ratio = guess / time;
    worst = std::max({worst, ratio, 1 / ratio});
    const auto chunks = one.chunks_q > 0 ? std::to_string(one.chunks_q) + " x " + std::to_string(one.chunks_kv) : "";
    std::printf("%-12s %-9s %6lld %5lld %-9s %8d %8s %12.3f %12.3f %7.2f\n", one.rule, element_name(one.type),
                static_cast<long long>(one.length), static_cast<long long>(one.head_size),
                one.backward ? "backward" : "forward", one.threads, chunks.c_str(), 1e3 * guess, 1e3 * time, ratio);
    std::fflush(stdout);
  }
  std::printf("worst: a factor of %.2f\n", worst);
}

}  // namespace anyflash::cli
