// Phases, one after the other: exchange between arenas, then computation on each. The tiles of one unit (and of the units
// that come after it in later waves) are simulated together; those of other units do not meet them.
#include "tile_machine/executor.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <exception>
#include <map>

#include "cpu/numbers.h"
#include "tile_machine/compute.h"
#include "tile_machine/host.h"

namespace anyflash::simulator {
namespace {

/// Threads of the host. To wake them costs as much as some 10^6 multiply-adds, in each phase.
int host_threads(const Call& call, std::int64_t key_phases) {
  const double pairs = double(call.queries.entries()) * double(call.keys.entries()) * double(call.heads_each);
  const double of_phase = pairs * double(call.d_qk + call.d_v) / double(key_phases);
  return of_phase < 4e6 ? 1 : std::min(threads_of(call.problem, call.plan), 16);
}

class Executor {
 public:
  Executor(const Call& call, const Mapping& mapping)
      : call_(call), mapping_(mapping), scheduler_(call, mapping), host_(call) {
    std::int64_t key_phases = 1;
    for (std::int64_t unit = 0; unit < call.units; ++unit) {
      schedules_.push_back(&scheduler_.of(unit));
      key_phases = std::max(key_phases, schedules_.back()->phases);
    }
    key_phases_ = key_phases;
    threads_ = host_threads(call, key_phases);
    large_values_.assign(call.units, 0);
    counted_.mapping = mapping;
    counted_.phases = empty_phases(call, mapping, key_phases);
    traffic_.resize(counted_.phases.size());
    for (int thread = 0; thread < threads_; ++thread) computes_.emplace_back(call_, mapping_);
    const auto tiles = call.machine.tiles;
    counted_.peak_of_tile.assign(tiles, 0);
    if (call.choice.trace) counted_.live.assign(counted_.phases.size() * tiles, 0);
    if (call.choice.trace) counted_.tile_compute.assign(counted_.phases.size() * tiles, 0);
    if (call.problem.dbias.given()) {
      const auto& size = call.problem.dbias.size;
      dbias_.assign(size[0] * size[1] * size[2] * size[3], 0);
    }
    if (call.problem.dsink.given()) dsink_.assign(call.problem.heads_q, 0);
  }

  Execution run() {
    for (std::int64_t place = 0; place < std::min(mapping_.at_once, call_.units); ++place) run_place(place);
    store_sums();
    Execution result;
    for (std::size_t p = 0; p < counted_.phases.size(); ++p) {
      auto& phase = counted_.phases[p];
      phase.exchange =
          exchange_cycles(call_.machine, double(traffic_[p].most), double(traffic_[p].outside), traffic_[p].hops);
      if (phase.live > counted_.peak) counted_.peak = phase.live, counted_.peak_phase = p;
    }
    counted_.total(call_.machine);
    result.visible_pairs = pairs_;
    for (const auto& [pair, bytes] : transfers_)
      result.transfers.push_back({std::int32_t(pair.first), std::int32_t(pair.second), bytes});
    result.counted = std::move(counted_);
    return result;
  }

 private:
  struct Traffic {
    std::int64_t most = 0, outside = 0, hops = 0;
  };

  /// Runs body(tile, compute) for all tiles of the place. Results do not depend on the threads.
  template <typename Body>
  void for_each_tile(const Body& body) {
    std::exception_ptr failed;
#pragma omp parallel for schedule(dynamic) num_threads(threads_) if (threads_ > 1 && tiles_.size() > 1)
    for (std::size_t t = 0; t < tiles_.size(); ++t) {
      try {
        body(tiles_[t], computes_[omp_get_thread_num()]);
      } catch (...) {
#pragma omp critical(anyflash_tile_failed)
        failed = std::current_exception();
      }
    }
    if (failed) std::rethrow_exception(failed);
  }

  void run_place(std::int64_t place) {
    place_ = place;
    tiles_.clear();
    tiles_.reserve(mapping_.tiles_each());
    for (std::int64_t local = 0; local < mapping_.tiles_each(); ++local) {
      auto& tile = tiles_.emplace_back(call_.memory(), place * mapping_.tiles_each() + local);
      tile.row = local / mapping_.columns, tile.column = local % mapping_.columns;
      if (call_.choice.trace) tile.senders.assign(mapping_.tiles_each() + 1, 0);
    }
    std::vector<std::int64_t> units;
    for (auto unit = place; unit < call_.units; unit += mapping_.at_once) units.push_back(unit);
    for (std::size_t wave = 0; call_.resident() && wave < units.size(); ++wave) {
      lay_home(units[wave]);
      load(units[wave], std::int64_t(wave));
    }
    std::size_t phase = 0;
    for (std::size_t wave = 0; wave < units.size(); ++wave) run_unit(units[wave], wave, phase);
    for (; phase < counted_.phases.size(); ++phase) end_phase(phase);  // of waves in which this place is idle
    for (auto& tile : tiles_) {
      pairs_ += tile.pairs;
      for (std::size_t from = 0; from < tile.senders.size(); ++from) {
        if (tile.senders[from] == 0) continue;
        const bool outside = from + 1 == tile.senders.size();
        transfers_[{outside ? -1 : place * mapping_.tiles_each() + std::int64_t(from), tile.number}] +=
            tile.senders[from];
      }
    }
  }

  void size_tiles(std::int64_t unit) {
    const auto& schedule = *schedules_[unit];
    const auto sizes = sizes_of(call_, mapping_, schedule, incoming_rows(call_, mapping_, schedule));
    for (std::size_t local = 0; local < tiles_.size(); ++local) tiles_[local].sizes = sizes[local];
  }

  void lay_home(std::int64_t unit) {
    size_tiles(unit);
    for (auto& tile : tiles_) tile.homes.push_back(lay_homes(tile.arena, call_, tile.sizes));
  }

  /// Where items and chunks begin among a tile's rows.
  void find_starts(const Schedule& schedule) {
    for (auto& tile : tiles_) {
      tile.item_start.clear(), tile.home_item_start.clear();
      tile.home_in_item.clear(), tile.home_chunk_start.clear();
      std::int64_t rows = 0, home_rows = 0, keys = 0;
      for (const auto item : schedule.items[tile.row]) {
        const auto size = call_.query_chunk(mapping_, item).size();
        const auto own = part_of(size, mapping_.columns, tile.column);
        tile.item_start.push_back(rows), tile.home_item_start.push_back(home_rows);
        tile.home_in_item.push_back(own.first);
        rows += size, home_rows += own.size();
      }
      mapping_.chunks_of(tile.column, [&](std::int64_t chunk) {
        tile.home_chunk_start.push_back(keys);
        keys += call_.key_home(mapping_, chunk, tile.row).size();
      });
    }
  }

  /// The caller's tensors to their homes.
  void load(std::int64_t unit, std::int64_t wave) {
    const auto& schedule = *schedules_[unit];
    find_starts(schedule);
    const auto& problem = call_.problem;
    const auto b = call_.batch_of(unit), g = call_.key_head_of(unit), e = call_.element;
    std::atomic<bool> large = false;
    for_each_tile([&](Tile& tile, Compute&) {
      const auto& home = tile.homes[wave];
      for_each_home_row(tile, unit, schedule, home, [&](std::int64_t h, std::int64_t position, std::int64_t row) {
        host_.load_query(problem.q, b, h, position, call_.d_qk, tile.arena.at(home.q + row * call_.d_qk * e));
        if (!call_.backward) return;
        host_.load_query(problem.out, b, h, position, call_.d_v, tile.arena.at(home.out + row * call_.d_v * e));
        host_.load_query(problem.dout, b, h, position, call_.d_v, tile.arena.at(home.dout + row * call_.d_v * e));
        float* const statistics = tile.arena.floats(home.statistics);
        statistics[row] = *host_.statistic(problem.lse, b, h, position);
        if (problem.dlse.given())
          statistics[2 * home.query_rows + row] = *host_.statistic(problem.dlse, b, h, position);
      });
      for_each_home_key(tile, [&](std::int64_t position, std::int64_t key) {
        host_.load_key(problem.k, b, g, position, call_.d_qk, tile.arena.at(home.k + key * call_.d_qk * e));
        char* const v = tile.arena.at(home.v + key * call_.d_v * e);
        host_.load_key(problem.v, b, g, position, call_.d_v, v);
        if (e == 4 && !call_.backward && !large.load(std::memory_order_relaxed) &&
            has_large(reinterpret_cast<const float*>(v)))
          large.store(true, std::memory_order_relaxed);
      });
    });
    large_values_[unit] = large;
  }

  /// One over more than twice the number of keys.
  float value_scale() const { return std::ldexp(1.0f, -std::bit_width(std::uint64_t(call_.keys.entries())) - 1); }
  /// Forward: whether a sum over all keys of numbers as large as one of these may overflow.
  bool has_large(const float* v) const {
    const float most = std::numeric_limits<float>::max() * value_scale();
    return std::any_of(v, v + call_.d_v, [&](float x) { return std::isfinite(x) && std::abs(x) > most; });
  }

  /// Results from their homes to the caller's tensors.
  void store(std::int64_t unit) {
    const auto& schedule = *schedules_[unit];
    const auto& problem = call_.problem;
    const auto b = call_.batch_of(unit), g = call_.key_head_of(unit), e = call_.element;
    for_each_tile([&](Tile& tile, Compute&) {
      const auto& home = tile.home;
      for_each_home_row(tile, unit, schedule, home, [&](std::int64_t h, std::int64_t position, std::int64_t row) {
        if (call_.backward) {
          if (problem.dq.given())
            host_.store_query(problem.dq, b, h, position, call_.d_qk, tile.arena.at(home.dq + row * call_.d_qk * e));
          return;
        }
        host_.store_query(problem.out, b, h, position, call_.d_v, tile.arena.at(home.out + row * call_.d_v * e));
        const float* const statistics = tile.arena.floats(home.statistics) + row;
        if (problem.lse.given()) *host_.statistic(problem.lse, b, h, position) = statistics[0];
        if (problem.row_max.given()) *host_.statistic(problem.row_max, b, h, position) = statistics[home.query_rows];
        if (problem.row_sum.given())
          *host_.statistic(problem.row_sum, b, h, position) = statistics[2 * home.query_rows];
      });
      if (!call_.backward) return;
      for_each_home_key(tile, [&](std::int64_t position, std::int64_t key) {
        if (problem.dk.given())
          host_.store_key(problem.dk, b, g, position, call_.d_qk, tile.arena.at(home.dk + key * call_.d_qk * e));
        if (problem.dv.given())
          host_.store_key(problem.dv, b, g, position, call_.d_v, tile.arena.at(home.dv + key * call_.d_v * e));
      });
    });
  }

  /// f(head, position, row at home)
  template <typename F>
  void for_each_home_row(const Tile& tile, std::int64_t unit, const Schedule& schedule, const Homes& home,
                         const F& f) const {
    const auto& items = schedule.items[tile.row];
    for (std::size_t i = 0; i < items.size(); ++i) {
      const auto head = call_.head_of(unit, items[i] / mapping_.query_chunks);
      const auto first = call_.query_chunk(mapping_, items[i]).first + tile.home_in_item[i];
      const auto end = i + 1 < items.size() ? tile.home_item_start[i + 1] : home.query_rows;
      for (auto row = tile.home_item_start[i]; row < end; ++row) f(head, first + row - tile.home_item_start[i], row);
    }
  }
  /// f(position, key at home)
  template <typename F>
  void for_each_home_key(const Tile& tile, const F& f) const {
    std::int64_t key = 0;
    mapping_.chunks_of(tile.column, [&](std::int64_t chunk) {
      const auto keys = call_.key_chunk(mapping_, chunk);
      const auto own = call_.key_home(mapping_, chunk, tile.row);
      for (auto j = own.first; j < own.end; ++j) f(keys.first + j, key++);
    });
  }

  void run_unit(std::int64_t unit, std::size_t wave, std::size_t& phase) {
    const auto& schedule = *schedules_[unit];
    size_tiles(unit);
    if (!call_.resident()) {
      for (auto& tile : tiles_) tile.homes.assign(wave + 1, {}), tile.arena.release(0);
      for (auto& tile : tiles_) {
        tile.homes[wave] = lay_homes(tile.arena, call_, tile.sizes);
        // With overlap the next wave's data arrives meanwhile.
        if (call_.machine.overlap && mapping_.waves > 1) lay_homes(tile.arena, call_, tile.sizes);
      }
      load(unit, std::int64_t(wave));
    } else {
      find_starts(schedule);
    }
    for (auto& tile : tiles_) {
      tile.home = tile.homes[wave];
      tile.dsink.assign(call_.heads_each, 0);
      tile.value_scale = large_values_[unit] ? value_scale() : 1;
    }
    if (!call_.resident()) {
      for (auto& tile : tiles_) tile.outside += loaded_bytes(tile);
      end_phase(phase++);
    }
    if (call_.backward && (mapping_.columns > 1 || call_.lse_remainders)) {
      for_each_tile([&](Tile& tile, Compute& compute) { compute.row_sums(tile); });
      end_phase(phase++);
    }
    std::vector<std::int64_t> before_wave, before_keys;
    for (auto& tile : tiles_) {
      before_wave.push_back(tile.arena.live());
      tile.wave = lay_wave(tile.arena, call_, mapping_, tile.sizes, tile.home);
      before_keys.push_back(tile.arena.live());
      tile.keys = lay_keys(tile.arena, call_, mapping_, tile.sizes);
    }
    for_each_tile([&](Tile& tile, Compute& compute) { compute.begin(tile); });
    for (std::int64_t i = 0; call_.lse_remainders && i < key_phases_; ++i) run_sums(unit, i), end_phase(phase++);
    if (call_.lse_remainders) {
      exchange_sums();
      for_each_tile([&](Tile& tile, Compute& compute) { compute.find_lse_remainders(tile, unit, schedule); });
      end_phase(phase++);
    }
    for (std::int64_t i = 0; i < key_phases_; ++i) run_keys(unit, i), end_phase(phase++);
    if (call_.backward && mapping_.rows > 1) {
      exchange_partials(schedule, schedule.phases - 1);
      for_each_tile([&](Tile& tile, Compute& compute) {
        compute.add_incoming(tile, schedule, schedule.phases - 1);
        compute.finish_keys(tile);
      });
      end_phase(phase++);
    }
    if (mapping_.columns > 1) {
      for (std::size_t t = 0; t < tiles_.size(); ++t) {
        auto& tile = tiles_[t];
        tile.arena.release(before_keys[t]);
        tile.reduction = lay_reduction(tile.arena, call_, mapping_, tile.sizes);
      }
      exchange_rows(schedule);
      for_each_tile([&](Tile& tile, Compute& compute) {
        compute.combine(tile);
        compute.finish_rows(tile, unit, schedule);
      });
      end_phase(phase++);
    }
    for (std::size_t t = 0; t < tiles_.size(); ++t) tiles_[t].arena.release(before_wave[t]);
    store(unit);
    for (const auto& tile : tiles_)
      for (std::int64_t head = 0; !dsink_.empty() && head < call_.heads_each; ++head)
        dsink_[call_.head_of(unit, head)] += tile.dsink[head];
    if (!call_.resident()) {
      for (auto& tile : tiles_) tile.outside += stored_bytes(tile);
      end_phase(phase++);
    }
  }

  void run_keys(std::int64_t unit, std::int64_t phase) {
    const auto& schedule = *schedules_[unit];
    if (phase >= schedule.phases) return;  // others are not ready yet
    if (phase == 0 && mapping_.columns > 1 && !call_.lse_remainders) gather_queries(schedule);
    if (mapping_.rows > 1) gather_keys(schedule, phase);
    if (call_.backward && mapping_.rows > 1 && phase > 0) exchange_partials(schedule, phase - 1);
    if (call_.problem.bias.given()) load_bias(unit, schedule, phase);
    for_each_tile([&](Tile& tile, Compute& compute) {
      if (call_.backward && mapping_.columns == 1 && !call_.lse_remainders && phase == 0) compute.row_sums(tile);
      if (call_.backward && mapping_.rows > 1 && phase > 0) compute.add_incoming(tile, schedule, phase - 1);
      compute.keys(tile, unit, schedule, phase);
      if (phase + 1 < schedule.phases) return;
      if (mapping_.columns == 1) compute.finish_rows(tile, unit, schedule);
      if (call_.backward && mapping_.rows == 1) compute.finish_keys(tile);
    });
    if (call_.problem.dbias.given()) collect_bias(unit);
  }

  /// Backward, if an lse is large: the same with sums of P alone.
  void run_sums(std::int64_t unit, std::int64_t phase) {
    const auto& schedule = *schedules_[unit];
    if (phase >= schedule.phases) return;
    if (phase == 0 && mapping_.columns > 1) gather_queries(schedule);
    if (mapping_.rows > 1) gather_keys(schedule, phase);
    if (call_.problem.bias.given()) load_bias(unit, schedule, phase);
    for_each_tile([&](Tile& tile, Compute& compute) { compute.keys(tile, unit, schedule, phase, true); });
  }

  /// Every tile of a grid row gets the sums of all columns.
  void exchange_sums() {
    for_each_tile([&](Tile& tile, Compute&) {
      const auto bytes = tile.sizes.query_rows * 8;
      for (std::int64_t column = 0; column < mapping_.columns; ++column) {
        const auto& from = tile_at(tile.row, column);
        if (&from != &tile) copy(tile, tile.wave.sums + column * bytes, from, from.wave.sums + column * bytes, bytes);
      }
      if (mapping_.columns > 1) tile.sent += bytes;
    });
  }

  Tile& tile_at(std::int64_t row, std::int64_t column) { return tiles_[row * mapping_.columns + column]; }

  /// Copies between arenas; what comes from another tile is received.
  void copy(Tile& to, std::int64_t to_offset, const Tile& from, std::int64_t from_offset, std::int64_t bytes) const {
    std::memcpy(to.arena.at(to_offset), from.arena.at(from_offset), bytes);
    if (&to == &from || bytes == 0) return;
    to.received += bytes;
    to.hops = std::max(to.hops, hops_between(call_.machine, from.number, to.number));
    if (!to.senders.empty()) to.senders[from.row * mapping_.columns + from.column] += bytes;
  }

  /// Every tile of a grid row gets the whole items.
  void gather_queries(const Schedule& schedule) {
    const auto q_bytes = call_.d_qk * call_.element, dout_bytes = call_.d_v * call_.element;
    for_each_tile([&](Tile& tile, Compute&) {
      tile.sent += tile.home.query_rows * call_.query_row_bytes();
      for (std::int64_t column = 0; column < mapping_.columns; ++column) {
        const auto& from = tile_at(tile.row, column);
        for (std::size_t i = 0; i < schedule.items[tile.row].size(); ++i) {
          const auto size = call_.query_chunk(mapping_, schedule.items[tile.row][i]).size();
          const auto part = part_of(size, mapping_.columns, column);
          const auto to = tile.item_start[i] + part.first, at = from.home_item_start[i];
          copy(tile, tile.wave.q + to * q_bytes, from, from.home.q + at * q_bytes, part.size() * q_bytes);
          if (!call_.backward) continue;
          copy(tile, tile.wave.dout + to * dout_bytes, from, from.home.dout + at * dout_bytes,
               part.size() * dout_bytes);
          for (std::int64_t n = 0; n < call_.statistics; ++n)
            copy(tile, tile.wave.statistics + (n * tile.sizes.query_rows + to) * 4, from,
                 from.home.statistics + (n * from.home.query_rows + at) * 4, part.size() * 4);
        }
      }
    });
  }

  /// Every tile gets the chunks of its phase, each from the tiles of its column.
  void gather_keys(const Schedule& schedule, std::int64_t phase) {
    const auto k_bytes = call_.d_qk * call_.element, v_bytes = call_.d_v * call_.element;
    for_each_tile([&](Tile& tile, Compute& compute) {
      const auto& chunks = schedule.tiles[tile.row * mapping_.columns + tile.column].chunks[phase];
      for (std::size_t n = 0; n < chunks.size(); ++n) {
        const auto size = call_.key_chunk(mapping_, chunks[n]).size();
        const auto k = compute.chunk_at(tile, phase, std::int64_t(n)), v = k + size * k_bytes;
        for (std::int64_t row = 0; row < mapping_.rows; ++row) {
          const auto& from = tile_at(row, tile.column);
          const auto part = call_.key_home(mapping_, chunks[n], row);
          const auto at = from.home_chunk_start[chunks[n] / mapping_.columns];
          copy(tile, k + part.first * k_bytes, from, from.home.k + at * k_bytes, part.size() * k_bytes);
          copy(tile, v + part.first * v_bytes, from, from.home.v + at * v_bytes, part.size() * v_bytes);
        }
      }
    });
    for (std::int64_t column = 0; column < mapping_.columns; ++column) {     // what several receive is sent once
      std::map<std::int32_t, std::pair<std::int64_t, std::int64_t>> wanted;  // chunk: tiles that want it, the last one
      for (std::int64_t row = 0; row < mapping_.rows; ++row)
        for (const auto chunk : schedule.tiles[row * mapping_.columns + column].chunks[phase]) {
          auto& [count, last] = wanted[chunk];
          ++count, last = row;
        }
      for (const auto& [chunk, by] : wanted)
        for (std::int64_t row = 0; row < mapping_.rows; ++row) {
          if (by.first == 1 && by.second == row) continue;
          const auto rows = call_.key_home(mapping_, chunk, row).size();
          tile_at(row, column).sent += rows * call_.key_row_bytes();
        }
    }
  }

  /// Every tile gets what others have computed of dk and dv of its own keys.
  void exchange_partials(const Schedule& schedule, std::int64_t phase) {
    for_each_tile([&](Tile& tile, Compute& compute) {
      auto to = tile.keys.incoming;
      for (std::int64_t row = 0; row < mapping_.rows; ++row) {
        if (row == tile.row) continue;
        const auto& from = tile_at(row, tile.column);
        const auto& chunks = schedule.tiles[row * mapping_.columns + tile.column].chunks[phase];
        for (std::size_t n = 0; n < chunks.size(); ++n) {
          const auto size = call_.key_chunk(mapping_, chunks[n]).size();
          const auto part = call_.key_home(mapping_, chunks[n], tile.row);
          const auto dk = compute.partial_at(from, phase, std::int64_t(n)), dv = dk + size * call_.line_qk * 4;
          for (auto j = part.first; j < part.end; ++j, to += call_.d_qk * 4)
            copy(tile, to, from, dk + j * call_.line_qk * 4, call_.d_qk * 4);
          for (auto j = part.first; j < part.end; ++j, to += call_.d_v * 4)
            copy(tile, to, from, dv + j * call_.line_v * 4, call_.d_v * 4);
        }
      }
      for (const auto chunk : schedule.tiles[tile.row * mapping_.columns + tile.column].chunks[phase]) {
        const auto size = call_.key_chunk(mapping_, chunk).size();
        tile.sent += (size - call_.key_home(mapping_, chunk, tile.row).size()) * call_.partial_key_bytes();
      }
    });
  }

  /// Every tile gets the other columns' partial results of its rows at home.
  void exchange_rows(const Schedule& schedule) {
    const auto channels = call_.backward ? call_.d_qk : call_.d_v, line = line_of(channels);
    for_each_tile([&](Tile& tile, Compute&) {
      auto to = tile.reduction;
      const auto rows = tile.home.query_rows;
      for (std::int64_t column = 0; column < mapping_.columns; ++column) {
        if (column == tile.column) continue;
        const auto& from = tile_at(tile.row, column);
        for (std::size_t i = 0; i < schedule.items[tile.row].size(); ++i) {
          const auto end = i + 1 < schedule.items[tile.row].size() ? tile.home_item_start[i + 1] : rows;
          for (auto row = tile.home_item_start[i]; row < end; ++row) {
            const auto at = tile.item_start[i] + tile.home_in_item[i] + row - tile.home_item_start[i];
            copy(tile, to + row * channels * 4, from, from.wave.accumulators + at * line * 4, channels * 4);
            if (call_.backward) continue;
            copy(tile, to + (rows * channels + row) * 4, from, from.wave.row_max + at * 4, 4);
            copy(tile, to + (rows * (channels + 1) + row) * 4, from, from.wave.row_sum + at * 4, 4);
          }
        }
        to += rows * call_.partial_query_bytes();
      }
      tile.sent += (tile.sizes.query_rows - rows) * call_.partial_query_bytes();
    });
  }

  /// The bias comes from the host, for all items and the chunks of a phase.
  void load_bias(std::int64_t unit, const Schedule& schedule, std::int64_t phase) {
    const auto& bias = call_.problem.bias;
    const auto b = call_.batch_of(unit);
    for_each_tile([&](Tile& tile, Compute& compute) {
      const auto line = Compute::bias_line(tile);
      const auto& chunks = schedule.tiles[tile.row * mapping_.columns + tile.column].chunks[phase];
      const auto& items = schedule.items[tile.row];
      for (std::size_t n = 0; n < chunks.size(); ++n)
        for (std::size_t i = 0; i < items.size(); ++i) {
          const auto rows = call_.query_chunk(mapping_, items[i]), keys = call_.key_chunk(mapping_, chunks[n]);
          const auto h = call_.head_of(unit, items[i] / mapping_.query_chunks);
          float* const to = tile.arena.floats(compute.bias_at(tile, std::int64_t(n), std::int64_t(i)));
          for (auto row = rows.first; row < rows.end; ++row)
            for (auto key = keys.first; key < keys.end; ++key)
              to[(row - rows.first) * line + key - keys.first] = float(cpu::ReadNumber(
                  bias.data, bias.type, Host::bias_offset(bias, b, h, call_.queries.flat(row), call_.keys.flat(key))));
          tile.outside += rows.size() * keys.size() * 4;
        }
    });
  }

  /// Adds the dS of a phase to dbias, in the order of the tiles.
  void collect_bias(std::int64_t unit) {
    const auto& size = call_.problem.dbias.size;
    const auto at = [](std::int64_t i, std::int64_t n) { return n == 1 ? 0 : i; };
    for (const auto& tile : tiles_)
      for (const auto& part : tile.bias_parts) {
        const auto h = call_.head_of(unit, part.item / mapping_.query_chunks);
        const auto base = at(call_.batch_of(unit), size[0]) * size[1] + at(h, size[1]);
        const float* const from = tile.arena.floats(part.offset);
        for (auto row = part.rows.first; row < part.rows.end; ++row)
          for (auto key = part.keys.first; key < part.keys.end; ++key)
            dbias_[(base * size[2] + at(call_.queries.flat(row), size[2])) * size[3] +
                   at(call_.keys.flat(key), size[3])] +=
                from[(row - part.rows.first) * part.line + key - part.keys.first];
      }
  }

  void store_sums() {
    const auto& problem = call_.problem;
    for (std::size_t h = 0; h < dsink_.size(); ++h)
      cpu::WriteNumber(problem.dsink.data, problem.dsink.type, std::int64_t(h) * problem.dsink.head, dsink_[h]);
    const auto& bias = problem.dbias;
    for (std::int64_t i = 0; i < std::int64_t(dbias_.size()); ++i) {
      const auto key = i % bias.size[3], query = i / bias.size[3] % bias.size[2];
      const auto head = i / (bias.size[3] * bias.size[2]) % bias.size[1];
      const auto batch = i / (bias.size[3] * bias.size[2] * bias.size[1]);
      cpu::WriteNumber(bias.data, bias.type, Host::bias_offset(bias, batch, head, query, key), dbias_[i]);
    }
  }

  std::int64_t loaded_bytes(const Tile& tile) const {
    const auto e = call_.element;
    const auto row = call_.backward ? (call_.d_qk + 2 * call_.d_v) * e + 4 * (call_.statistics - 1) : call_.d_qk * e;
    return tile.home.query_rows * row + tile.home.key_rows * call_.key_row_bytes();
  }
  std::int64_t stored_bytes(const Tile& tile) const {
    const auto e = call_.element;
    if (!call_.backward) return tile.home.query_rows * (call_.d_v * e + 4 * call_.statistics);
    return (tile.home.query_rows * call_.d_qk + tile.home.key_rows * (call_.d_qk + call_.d_v)) * e;
  }

  /// Takes what the tiles have done into the phase's record.
  void end_phase(std::size_t p) {
    auto& phase = counted_.phases[p];
    auto& traffic = traffic_[p];
    const auto all = call_.machine.tiles;
    for (auto& tile : tiles_) {
      const auto received = tile.received + tile.outside, live = tile.arena.live();
      traffic.most = std::max({traffic.most, received, tile.sent});
      traffic.outside += tile.outside;
      traffic.hops = std::max(traffic.hops, tile.hops);
      phase.bytes += received;
      phase.compute = std::max(phase.compute, tile.compute);
      phase.busy += tile.compute;
      phase.live_sum += double(live);
      if (live > phase.live) phase.live = live, phase.live_tile = tile.number;
      counted_.peak_of_tile[tile.number] = std::max(counted_.peak_of_tile[tile.number], live);
      if (!counted_.live.empty()) counted_.live[p * all + tile.number] = live;
      if (!counted_.tile_compute.empty()) counted_.tile_compute[p * all + tile.number] = tile.compute;
      if (!tile.senders.empty()) tile.senders.back() += tile.outside;
      tile.compute = 0;
      tile.received = tile.sent = tile.outside = tile.hops = 0;
    }
  }

  const Call& call_;
  const Mapping mapping_;
  Scheduler scheduler_;
  Host host_;
  int threads_ = 1;
  std::vector<const Schedule*> schedules_;
  std::int64_t key_phases_ = 1, place_ = 0;
  std::vector<Compute> computes_;
  std::vector<Tile> tiles_;
  Evaluation counted_;
  std::vector<Traffic> traffic_;
  double pairs_ = 0;
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> transfers_;
  std::vector<double> dbias_, dsink_;
  std::vector<char> large_values_;  // by unit
};

}  // namespace

Execution execute(const Call& call, const Mapping& mapping) { return Executor(call, mapping).run(); }

}  // namespace anyflash::simulator
