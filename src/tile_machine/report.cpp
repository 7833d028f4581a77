// What a call did or would do, as its caller reads it.
#include "tile_machine/planner.h"

namespace anyflash::simulator {

TileReport report_of(const Call& call, const Evaluation& evaluation, double visible_pairs) {
  const auto& machine = call.machine;
  const auto& m = evaluation.mapping;
  TileReport report;
  report.machine = machine;
  report.backward = call.backward;
  report.type = call.problem.type;
  report.num_chunks_q = m.query_chunks, report.num_chunks_kv = m.key_chunks;
  report.grid_rows = m.rows, report.grid_columns = m.columns;
  report.chunks_in_flight = m.in_flight;
  report.head_groups_at_once = m.at_once, report.waves = m.waves;
  report.compute_cycles = evaluation.compute, report.exchange_cycles = evaluation.exchange;
  report.sync_cycles = evaluation.sync, report.cycles = evaluation.cycles;
  report.seconds = report.cycles / machine.clock_hz;
  double busy = 0;
  const auto tiles = double(machine.tiles);
  for (const auto& phase : evaluation.phases) {
    report.phases.push_back({phase.name(m.waves), phase.compute, phase.exchange, machine.sync_cycles, phase.bytes,
                             phase.live, phase.live_sum / tiles});
    report.exchanged_bytes += phase.bytes;
    busy += phase.busy;
  }
  report.peak_bytes = evaluation.peak;
  report.peak_tile = evaluation.phases.empty() ? 0 : evaluation.phases[evaluation.peak_phase].live_tile;
  const double numbers = call.backward ? double(3 * call.d_qk + 2 * call.d_v) : double(call.d_qk + call.d_v);
  report.multiply_adds = visible_pairs * numbers;
  const auto rate =
      call.problem.type == ElementType::float16 ? machine.multiply_adds_float16 : machine.multiply_adds_float32;
  if (report.cycles > 0) {
    report.utilisation = report.multiply_adds / (report.cycles * tiles * rate);
    report.busy = busy / (report.cycles * tiles);
  }
  report.peak_bytes_of_tile = evaluation.peak_of_tile;
  report.live_bytes = evaluation.live;
  for (const auto& [pair, bytes] : evaluation.transfers)
    report.transfers.push_back({std::int32_t(pair.first), std::int32_t(pair.second), bytes});
  report.tile_compute_cycles = evaluation.tile_compute;
  return report;
}

}  // namespace anyflash::simulator
