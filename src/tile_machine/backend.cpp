#include "tile_machine/backend.h"

#include <anyflash/explain.h>

#include <optional>

#include "plan/facts.h"
#include "plan/own_of_thread.h"
#include "rules/compile.h"
#include "tile_machine/executor.h"
#include "tile_machine/machine.h"

namespace anyflash::simulator {
namespace {

constexpr auto* no_report = "tile report: no call on the tile machine yet";

struct LastReport {
  std::optional<TileReport> report;
};

/// A trace has a number for each phase and tile.
void check_trace(const Call& call, const Evaluation& planned) {
  constexpr std::int64_t most = 1 << 24;
  const auto phases = std::int64_t(planned.phases.size());
  if (call.choice.trace && phases > most / call.machine.tiles) {
    throw Error(Error::Kind::value, "trace: " + std::to_string(phases) + " phases of " +
                                        std::to_string(call.machine.tiles) + " tiles, expected at most " +
                                        std::to_string(most / call.machine.tiles) + " phases");
  }
}

void run(const Problem& problem, const ExecutionPlan& plan) {
  const auto [machine, choice] = used_machine();
  const Call call(problem, plan, machine, choice);
  const auto planned = best(call);
  check_trace(call, planned);
  auto execution = execute(call, planned.mapping);
  auto report = report_of(call, execution.counted, execution.visible_pairs);
  report.predicted_cycles = planned.cycles;
  report.transfers = std::move(execution.transfers);
  if (auto* const context = tile_context()) context->report = std::move(report);
  else if (auto* const last = own_of_thread<LastReport>()) last->report = std::move(report);
}

/// The problem of a call of which only shapes are known, and its plan.
struct PlannedCall {
  PlannedCall(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options, bool backward,
              const CallTensors& tensors)
      : problem(shape_problem(q, k, v, options, backward ? Direction::backward : Direction::forward, tensors)) {
    rules::check(problem.rule, planning::shapes_of(problem));
    plan = make_plan(problem, tile_menu(problem));
    if (!problem.has_pairs()) throw Error(Error::Kind::value, "query and key: no pairs, expected something to compute");
  }
  Problem problem;
  std::shared_ptr<const ExecutionPlan> plan;
};

}  // namespace

TileMenu tile_menu(const Problem& problem) {
  if (problem.device.index != 0)
    throw Error(Error::Kind::device, "query: on " + device_name(problem.device) + ", expected tiles:0");
  if (problem.type != ElementType::float16 && problem.type != ElementType::float32) {
    throw Error(Error::Kind::unsupported, std::string("query: ") + element_name(problem.type) +
                                              " on the tile machine, expected float16 or float32");
  }
  if (problem.tables_on_device)
    throw Error(Error::Kind::device, "lengths and tables: on " + device_name(problem.device) + ", expected cpu");
  TileMenu menu;
  menu.query_rows = {64};
  menu.key_rows = 64;
  return menu;
}

void forward(const Problem& problem, const ExecutionPlan& plan, char*) { run(problem, plan); }
void backward(const Problem& problem, const ExecutionPlan& plan, char*) { run(problem, plan); }

std::vector<planning::Candidate> ways(const Problem& problem, const ExecutionPlan& plan) {
  const auto [machine, choice] = used_machine();
  const Call call(problem, plan, machine, choice);
  std::vector<planning::Candidate> all;
  for (const auto& one : candidates(call)) {
    const auto& m = one.mapping;
    auto& [chunks, shown] = all.emplace_back();
    chunks.groups = m.at_once, chunks.q = m.query_chunks, chunks.kv = m.key_chunks;
    shown.groups = m.at_once, shown.chunks_q = m.query_chunks, shown.chunks_kv = m.key_chunks;
    shown.threads = 0;
    shown.grid_rows = m.rows, shown.grid_columns = m.columns, shown.in_flight = m.in_flight;
    shown.bytes = one.peak;
    shown.cost.compute = one.compute / machine.clock_hz;
    shown.cost.exchange = (one.cycles - one.compute) / machine.clock_hz;
    shown.fits = one.fits(call);
    shown.chosen = all.size() == 1 && shown.fits;
  }
  return all;
}

std::int64_t least_bytes(const Problem& problem, const ExecutionPlan& plan) {
  const auto [machine, choice] = used_machine();
  return least_memory(Call(problem, plan, machine, choice));
}

}  // namespace anyflash::simulator

namespace anyflash {

const TileReport& last_tile_report() {
  if (const auto* const context = simulator::tile_context()) {
    if (context->report) return *context->report;
    throw Error(Error::Kind::value, simulator::no_report);
  }
  const auto* const last = own_of_thread<simulator::LastReport>();
  if (!last || !last->report) throw Error(Error::Kind::value, simulator::no_report);
  return *last->report;
}

TileReport predict_tiles(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options,
                         bool backward, const CallTensors& tensors) {
  const simulator::PlannedCall planned(q, k, v, options, backward, tensors);
  const auto [machine, choice] = simulator::used_machine();
  const simulator::Call call(planned.problem, *planned.plan, machine, choice);
  auto evaluation = simulator::best(call);
  simulator::check_trace(call, evaluation);
  if (choice.trace) evaluation = simulator::evaluate(call, evaluation.mapping, true);
  auto report = simulator::report_of(call, evaluation, double(visible_pairs(q, k, v, options)));
  report.predicted_cycles = report.cycles;
  return report;
}

std::vector<TileCandidate> tile_candidates(const TensorView& q, const TensorView& k, const TensorView& v,
                                           const Options& options, bool backward, const CallTensors& tensors) {
  const simulator::PlannedCall planned(q, k, v, options, backward, tensors);
  const auto [machine, choice] = simulator::used_machine();
  const simulator::Call call(planned.problem, *planned.plan, machine, choice);
  std::vector<TileCandidate> all;
  for (const auto& one : simulator::candidates(call)) {
    const auto& m = one.mapping;
    all.push_back({m.query_chunks, m.key_chunks, m.rows, m.columns, m.in_flight, m.waves, one.compute, one.exchange,
                   one.sync, one.cycles, one.peak, one.fits(call), all.empty() && one.fits(call)});
  }
  return all;
}

}  // namespace anyflash
