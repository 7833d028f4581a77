#include "tiles.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "owned_tensor.h"

namespace anyflash::cli {

void print_tiles(const TileReport& report) {
  std::printf(
      "    %s: %.0f cycles (%.0f compute, %.0f exchange, %.0f sync), utilisation %.1f %%, busy %.1f %%, %s exchanged, "
      "at most %s a tile\n",
      report.machine.name.c_str(), report.cycles, report.compute_cycles, report.exchange_cycles, report.sync_cycles,
      100 * report.utilisation, 100 * report.busy, bytes_text(double(report.exchanged_bytes)).c_str(),
      bytes_text(double(report.peak_bytes)).c_str());
}

void print_mapping(const TileReport& report) {
  const auto number = [](std::int64_t n) { return static_cast<long long>(n); };
  const auto& machine = report.machine;
  std::printf("machine         %s: %lld tiles of %s, %.3g GHz\n", machine.name.c_str(), number(machine.tiles),
              bytes_text(double(machine.memory_per_tile)).c_str(), machine.clock_hz / 1e9);
  std::printf("chunks          %lld of queries, %lld of keys, %lld in flight\n", number(report.num_chunks_q),
              number(report.num_chunks_kv), number(report.chunks_in_flight));
  std::printf("grid            %lld x %lld tiles a key head, %lld at once, %lld waves\n", number(report.grid_rows),
              number(report.grid_columns), number(report.head_groups_at_once), number(report.waves));
  std::printf("cycles          %.0f: %.0f compute, %.0f exchange, %.0f sync\n", report.cycles, report.compute_cycles,
              report.exchange_cycles, report.sync_cycles);
  std::printf("time            %.4g us\n", 1e6 * report.seconds);
  std::printf("utilisation     %.1f %% of the peak rate, tiles compute %.1f %% of the time\n", 100 * report.utilisation,
              100 * report.busy);
  std::printf("exchanged       %s\n", bytes_text(double(report.exchanged_bytes)).c_str());
  std::printf("memory          at most %s, on tile %lld\n", bytes_text(double(report.peak_bytes)).c_str(),
              number(report.peak_tile));
  std::printf("\n%-24s %12s %12s %8s %12s %12s %12s\n", "phase", "compute", "exchange", "sync", "exchanged",
              "most live", "mean live");
  constexpr std::size_t most = 40;
  for (std::size_t i = 0; i < report.phases.size() && i < most; ++i) {
    const auto& phase = report.phases[i];
    std::printf("%-24s %12.0f %12.0f %8.0f %12s %12s %12s\n", phase.name.c_str(), phase.compute_cycles,
                phase.exchange_cycles, phase.sync_cycles, bytes_text(double(phase.exchanged_bytes)).c_str(),
                bytes_text(double(phase.live_bytes_max)).c_str(), bytes_text(phase.live_bytes_mean).c_str());
  }
  if (report.phases.size() > most) std::printf("... %zu phases more\n", report.phases.size() - most);
}

nlohmann::ordered_json tiles_json(const TileReport& report) {
  auto phases = nlohmann::ordered_json::array();
  for (const auto& phase : report.phases)
    phases.push_back({{"name", phase.name},
                      {"compute_cycles", phase.compute_cycles},
                      {"exchange_cycles", phase.exchange_cycles},
                      {"sync_cycles", phase.sync_cycles},
                      {"exchanged_bytes", phase.exchanged_bytes},
                      {"live_bytes_max", phase.live_bytes_max},
                      {"live_bytes_mean", phase.live_bytes_mean}});
  return {{"machine", report.machine.name},
          {"tiles", report.machine.tiles},
          {"num_chunks_q", report.num_chunks_q},
          {"num_chunks_kv", report.num_chunks_kv},
          {"grid_rows", report.grid_rows},
          {"grid_columns", report.grid_columns},
          {"chunks_in_flight", report.chunks_in_flight},
          {"head_groups_at_once", report.head_groups_at_once},
          {"waves", report.waves},
          {"cycles", report.cycles},
          {"compute_cycles", report.compute_cycles},
          {"exchange_cycles", report.exchange_cycles},
          {"sync_cycles", report.sync_cycles},
          {"predicted_cycles", report.predicted_cycles},
          {"seconds", report.seconds},
          {"exchanged_bytes", report.exchanged_bytes},
          {"peak_bytes", report.peak_bytes},
          {"peak_tile", report.peak_tile},
          {"utilisation", report.utilisation},
          {"busy", report.busy},
          {"phases", phases}};
}

}  // namespace anyflash::cli
