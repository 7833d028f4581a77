// What a mapping costs: cycles, bytes and memory of every tile in every phase, counted without computing anything.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "tile_machine/planner.h"

namespace anyflash::simulator {
namespace {

/// What the tiles of one unit do in its phases.
struct UnitCost {
  const Schedule* schedule = nullptr;
  std::vector<TileSizes> sizes;
  IncomingRows incoming;
  std::vector<std::int64_t> homes, wave, keys, reduction;  ///< bytes of memory

  struct Traffic {
    double received = 0, sent = 0, outside = 0;  ///< outside: received from no tile
  };
};

/// Of all tiles of a unit, in a phase.
struct PhaseSum {
  double most = 0, outside = 0, compute = 0, busy = 0;
  std::int64_t bytes = 0;
};

/// The memory of all tiles in a phase.
struct Live {
  std::vector<std::int64_t> of_tile;
  std::int64_t most = 0, tile = 0;
  double sum = 0;
};

/// Rows of keys that each grid row sends in a column.
struct Wanted {
  const UnitCost* cost = nullptr;
  std::int64_t phase = 0;
  std::vector<std::int64_t> rows;
};

/// A tile's places on the two diagonals of a mesh.
using Place = std::array<std::int64_t, 2>;

Place place_of(const TileMachine& machine, std::int64_t tile) {
  const auto down = tile / machine.mesh_columns, across = tile % machine.mesh_columns;
  return {down + across, down - across};
}

/// How far tiles of a mesh lie along its two diagonals.
struct Spread {
  static constexpr std::int64_t far = std::int64_t{1} << 40;
  Place least{far, far}, most{-far, -far};

  bool empty() const { return least[0] == far; }
  void add(const Place& place) {
    for (const int i : {0, 1}) least[i] = std::min(least[i], place[i]), most[i] = std::max(most[i], place[i]);
  }
  /// The most steps from a tile of these to one of others; 0 if there are none.
  std::int64_t longest_way_to(const Spread& others) const {
    std::int64_t way = 0;
    for (const int i : {0, 1}) way = std::max({way, most[i] - others.least[i], others.most[i] - least[i]});
    return way;
  }
};

class Evaluator {
 public:
  Evaluator(const Call& call, const Mapping& mapping) : call_(call), mapping_(mapping), cost_(call) {
    for (std::int64_t chunk = 0; chunk < mapping.key_chunks; ++chunk)
      key_sizes_.push_back(call.key_chunk(mapping, chunk).size());
    last_asked_.resize(mapping.key_chunks), only_row_.resize(mapping.key_chunks);
    if (call.machine.mesh_columns > 0) {
      wanted_at_.resize(mapping.key_chunks), homes_at_.resize(mapping.key_chunks * mapping.at_once);
      for (std::int64_t tile = 0; tile < call.machine.tiles; ++tile) places_.push_back(place_of(call.machine, tile));
    }
    wanted_.resize(mapping.columns);
    for (std::int64_t unit = 0; unit < call.units; ++unit) units_.push_back(known(unit));
    for (const auto* unit : units_) key_phases_ = std::max(key_phases_, unit->schedule->phases);
  }

  /// At least so many cycles are computed.
  double least_cycles() const {
    double least = 0;
    for (const auto& [schedule, cost] : costs_) {
      double cycles = 0;
      for (std::int64_t phase = 0; phase < schedule->phases; ++phase) {
        double most = 0;
        for (const auto& tile : schedule->tiles) most = std::max(most, tile.cycles[phase]);
        cycles += most;
      }
      least = std::max(least, cycles);
    }
    return costs_.size() == 1 ? double(mapping_.waves) * least : least;
  }

  Evaluation run(bool trace) {
    Evaluation result;
    result.mapping = mapping_;
    result.phases = empty_phases(call_, mapping_, key_phases_);
    const auto tiles = call_.machine.tiles;
    result.peak_of_tile.assign(tiles, 0);
    resident_.assign(tiles, 0);
    for (std::int64_t unit = 0; call_.resident() && unit < call_.units; ++unit)
      for (std::int64_t local = 0; local < mapping_.tiles_each(); ++local)
        resident_[tile(unit, local)] += units_[unit]->homes[local];
    for (std::size_t p = 0; p < result.phases.size(); ++p) {
      auto& phase = result.phases[p];
      const auto first = phase.wave * mapping_.at_once, end = std::min(first + mapping_.at_once, call_.units);
      double most = 0, outside = 0;
      std::int64_t hops = 0;
      for (auto unit = first; unit < end; ++unit) {
        const auto& sum = sum_of(*units_[unit], phase);
        hops = std::max(hops, longest_way(unit, phase));
        most = std::max(most, sum.most);
        outside += sum.outside;
        phase.bytes += sum.bytes;
        phase.compute = std::max(phase.compute, sum.compute);
        phase.busy += sum.busy;
      }
      phase.exchange = exchange_cycles(call_.machine, most, outside, hops);
      const auto& live = live_in(first, end, phase.kind, result.peak_of_tile);
      phase.live = live.most, phase.live_tile = live.tile, phase.live_sum = live.sum;
      if (phase.live > result.peak) result.peak = phase.live, result.peak_phase = p;
      if (trace) record(result, first, end, phase, live);
    }
    result.total(call_.machine);
    return result;
  }

 private:
  const UnitCost* known(std::int64_t unit) {
    const auto& schedule = scheduler_.of(unit);
    auto& cost = costs_[&schedule];
    if (cost.schedule) return &cost;
    cost.schedule = &schedule;
    cost.incoming = incoming_rows(call_, mapping_, schedule);
    cost.sizes = sizes_of(call_, mapping_, schedule, cost.incoming);
    for (const auto& sizes : cost.sizes) {
      Bytes bytes;
      const auto homes = lay_homes(bytes, call_, sizes);
      cost.homes.push_back(bytes.used());
      lay_wave(bytes, call_, mapping_, sizes, homes);
      cost.wave.push_back(bytes.used() - cost.homes.back());
      Bytes keys, reduction;
      lay_keys(keys, call_, mapping_, sizes);
      if (mapping_.columns > 1) lay_reduction(reduction, call_, mapping_, sizes);
      cost.keys.push_back(keys.used());
      cost.reduction.push_back(reduction.used());
    }
    return &cost;
  }

  /// What all tiles of a unit do in a phase. Waves repeat it.
  const PhaseSum& sum_of(const UnitCost& cost, const PhaseCost& phase) {
    const auto [known, fresh] = sums_.try_emplace({&cost, phase.kind, phase.index});
    auto& sum = known->second;
    for (std::int64_t local = 0; fresh && local < mapping_.tiles_each(); ++local) {
      const auto traffic = traffic_of(cost, local, phase);
      const auto compute = compute_of(cost, local, phase);
      sum.most = std::max({sum.most, traffic.received + traffic.outside, traffic.sent});
      sum.outside += traffic.outside;
      sum.bytes += std::int64_t(traffic.received + traffic.outside);
      sum.compute = std::max(sum.compute, compute);
      sum.busy += compute;
    }
    return sum;
  }

  /// The memory of all tiles in a phase. Phases of one kind with the same units have the same.
  const Live& live_in(std::int64_t first, std::int64_t end, PhaseKind kind, std::vector<std::int64_t>& peaks) {
    const auto [known, fresh] = lives_.try_emplace({costs_.size() == 1 ? end - first : -first - 1, kind});
    auto& live = known->second;
    if (!fresh) return live;
    live.of_tile = resident_;
    for (auto unit = first; unit < end; ++unit)
      for (std::int64_t local = 0; local < mapping_.tiles_each(); ++local)
        live.of_tile[tile(unit, local)] += live_of(*units_[unit], local, kind);
    for (std::size_t t = 0; t < peaks.size(); ++t) {
      live.sum += double(live.of_tile[t]);
      peaks[t] = std::max(peaks[t], live.of_tile[t]);
      if (live.of_tile[t] > live.most) live.most = live.of_tile[t], live.tile = std::int64_t(t);
    }
    return live;
  }

  /// A line of the trace.
  void record(Evaluation& result, std::int64_t first, std::int64_t end, const PhaseCost& phase,
              const Live& live) const {
    result.live.insert(result.live.end(), live.of_tile.begin(), live.of_tile.end());
    const auto line = result.tile_compute.size();
    result.tile_compute.resize(line + resident_.size());
    for (auto unit = first; unit < end; ++unit)
      for (std::int64_t local = 0; local < mapping_.tiles_each(); ++local)
        result.tile_compute[line + tile(unit, local)] = compute_of(*units_[unit], local, phase);
    for (auto unit = first; unit < end; ++unit)
      for (std::int64_t local = 0; local < mapping_.tiles_each(); ++local) {
        if (phase.kind == PhaseKind::reduction || (phase.kind == PhaseKind::keys && phase.index == 0))
          record_rows(result, unit, local, phase.kind);
        if (phase.kind == PhaseKind::keys) record_keys(result, unit, local, phase.index);
        if (call_.backward && phase.kind == PhaseKind::keys) record_partials(result, unit, local, phase.index - 1);
        if (phase.kind == PhaseKind::key_gradients) record_partials(result, unit, local, key_phases_ - 1);
      }
  }

  /// Who sends a tile its queries, or partial results of its rows.
  void record_rows(Evaluation& result, std::int64_t unit, std::int64_t local, PhaseKind kind) const {
    const auto row = local / mapping_.columns, own = local % mapping_.columns;
    const auto& sizes = units_[unit]->sizes;
    for (std::int64_t column = 0; column < mapping_.columns; ++column) {
      if (column == own) continue;
      const auto from = row * mapping_.columns + column;
      const auto bytes = kind == PhaseKind::keys ? sizes[from].home_rows * call_.query_row_bytes()
                                                 : sizes[local].home_rows * call_.partial_query_bytes();
      if (bytes > 0) result.transfers[{tile(unit, from), tile(unit, local)}] += bytes;
    }
  }

  /// Who sends a tile its keys.
  void record_keys(Evaluation& result, std::int64_t unit, std::int64_t local, std::int64_t phase) const {
    if (phase >= units_[unit]->schedule->phases) return;
    for (const auto chunk : units_[unit]->schedule->tiles[local].chunks[phase])
      for (std::int64_t row = 0; row < mapping_.rows; ++row) {
        const auto from = row * mapping_.columns + local % mapping_.columns;
        const auto bytes = homes_.of(chunk, row) * call_.key_row_bytes();
        if (from != local && bytes > 0) result.transfers[{tile(unit, from), tile(unit, local)}] += bytes;
      }
  }

  /// To whom a tile sends what it has of others' dk and dv.
  void record_partials(Evaluation& result, std::int64_t unit, std::int64_t local, std::int64_t phase) const {
    if (phase < 0 || phase >= units_[unit]->schedule->phases) return;
    for (const auto chunk : units_[unit]->schedule->tiles[local].chunks[phase])
      for (std::int64_t row = 0; row < mapping_.rows; ++row) {
        const auto to = row * mapping_.columns + local % mapping_.columns;
        const auto bytes = homes_.of(chunk, row) * call_.partial_key_bytes();
        if (to != local && bytes > 0) result.transfers[{tile(unit, local), tile(unit, to)}] += bytes;
      }
  }

  std::int64_t tile(std::int64_t unit, std::int64_t local) const {
    return unit % mapping_.at_once * mapping_.tiles_each() + local;
  }

  /// Bytes beside the homes of all waves.
  std::int64_t live_of(const UnitCost& cost, std::int64_t local, PhaseKind kind) const {
    const auto two = call_.machine.overlap && mapping_.waves > 1;
    const auto homes = call_.resident() ? 0 : (two ? 2 : 1) * cost.homes[local];
    switch (kind) {
      case PhaseKind::sums:
      case PhaseKind::lse_remainders:
      case PhaseKind::keys:
      case PhaseKind::key_gradients: return homes + cost.wave[local] + cost.keys[local];
      case PhaseKind::reduction: return homes + cost.wave[local] + cost.reduction[local];
      case PhaseKind::row_sums:
      case PhaseKind::load:
      case PhaseKind::store: return homes;
    }
    return homes;
  }

  double compute_of(const UnitCost& cost, std::int64_t local, const PhaseCost& phase) const {
    const auto& schedule = *cost.schedule;
    const auto& sizes = cost.sizes[local];
    const bool whole_rows = mapping_.columns == 1, whole_keys = mapping_.rows == 1;
    switch (phase.kind) {
      case PhaseKind::row_sums: return cost_.row_sums(sizes.home_rows);
      case PhaseKind::sums: return phase.index < schedule.phases ? schedule.tiles[local].sums[phase.index] : 0;
      case PhaseKind::lse_remainders: return cost_.lse_remainders(sizes.query_rows, mapping_.columns);
      case PhaseKind::keys: {
        if (phase.index >= schedule.phases) return 0;
        double cycles = schedule.tiles[local].cycles[phase.index];
        if (call_.backward && whole_rows && !call_.lse_remainders && phase.index == 0)
          cycles += cost_.row_sums(sizes.home_rows);
        if (call_.backward && phase.index > 0) cycles += cost_.add_keys(incoming(cost, local, phase.index - 1));
        if (phase.index + 1 < schedule.phases) return cycles;
        if (whole_rows) cycles += cost_.finish_rows(sizes.home_rows);
        if (call_.backward && whole_keys) cycles += cost_.finish_keys(sizes.home_keys);
        return cycles;
      }
      case PhaseKind::key_gradients:
        return cost_.add_keys(incoming(cost, local, schedule.phases - 1)) + cost_.finish_keys(sizes.home_keys);
      case PhaseKind::reduction: return cost_.combine(sizes.home_rows, mapping_.columns);
      default: return 0;
    }
  }

  /// Rows of partial dk and dv that a tile receives after a keys phase.
  std::int64_t incoming(const UnitCost& cost, std::int64_t local, std::int64_t phase) const {
    if (!call_.backward || mapping_.rows == 1) return 0;
    return cost.incoming[phase][local];
  }

  UnitCost::Traffic traffic_of(const UnitCost& cost, std::int64_t local, const PhaseCost& phase) const {
    UnitCost::Traffic traffic;
    const auto& schedule = *cost.schedule;
    const auto& sizes = cost.sizes[local];
    const auto e = double(call_.element);
    const double queries = double(sizes.home_rows), keys = double(sizes.home_keys);
    const double d_qk = double(call_.d_qk), d_v = double(call_.d_v);
    switch (phase.kind) {
      case PhaseKind::load:
        traffic.outside =
            call_.backward ? queries * ((d_qk + 2 * d_v) * e + 4 * double(call_.statistics - 1)) : queries * d_qk * e;
        traffic.outside += keys * (d_qk + d_v) * e;
        break;
      case PhaseKind::store:
        traffic.outside = call_.backward ? (queries * d_qk + keys * (d_qk + d_v)) * e
                                         : queries * (d_v * e + 4 * double(call_.statistics));
        break;
      case PhaseKind::keys:
        if (phase.index < schedule.phases) keys_traffic(cost, local, phase.index, !call_.lse_remainders, traffic);
        break;
      case PhaseKind::sums:
        if (phase.index < schedule.phases) keys_traffic(cost, local, phase.index, true, traffic);
        break;
      case PhaseKind::lse_remainders:
        traffic.received = double((mapping_.columns - 1) * sizes.query_rows * 8);
        if (mapping_.columns > 1) traffic.sent = double(sizes.query_rows * 8);
        break;
      case PhaseKind::key_gradients: partial_traffic(cost, local, schedule.phases - 1, traffic); break;
      case PhaseKind::reduction: {
        const auto bytes = double(call_.partial_query_bytes());
        traffic.received = double(mapping_.columns - 1) * queries * bytes;
        traffic.sent = double(sizes.query_rows - sizes.home_rows) * bytes;
        break;
      }
      case PhaseKind::row_sums: break;
    }
    return traffic;
  }

  void keys_traffic(const UnitCost& cost, std::int64_t local, std::int64_t phase, bool gathers,
                    UnitCost::Traffic& traffic) const {
    const auto& schedule = *cost.schedule;
    const auto& sizes = cost.sizes[local];
    const auto row = local / mapping_.columns;
    if (phase == 0 && mapping_.columns > 1 && gathers) {
      traffic.received += double(sizes.query_rows - sizes.home_rows) * double(call_.query_row_bytes());
      traffic.sent += double(sizes.home_rows) * double(call_.query_row_bytes());
    }
    for (const auto chunk : schedule.tiles[local].chunks[phase]) {
      const auto size = key_sizes_[chunk];
      traffic.received += double(size - homes_.of(chunk, row)) * double(call_.key_row_bytes());
      if (call_.problem.bias.given()) traffic.outside += double(size * sizes.query_rows * 4);
    }
    if (mapping_.rows > 1) traffic.sent += double(rows_sent(cost, local, phase)) * double(call_.key_row_bytes());
    if (phase > 0 && !(gathers && call_.lse_remainders)) partial_traffic(cost, local, phase - 1, traffic);
  }

  /// Rows of keys that a tile sends in a phase, each once.
  std::int64_t rows_sent(const UnitCost& cost, std::int64_t local, std::int64_t phase) const {
    const auto row = local / mapping_.columns, column = local % mapping_.columns;
    auto& [of_cost, of_phase, rows] = wanted_[column];
    if (of_cost == &cost && of_phase == phase) return rows[row];
    of_cost = &cost, of_phase = phase;
    rows.assign(mapping_.rows + 1, 0);  // first what each row has more than the one before
    ++asked_;
    for (auto at = column; at < mapping_.tiles_each(); at += mapping_.columns)
      for (const auto chunk : cost.schedule->tiles[at].chunks[phase]) {
        const bool known = std::exchange(last_asked_[chunk], asked_) == asked_;
        only_row_[chunk] = known ? -1 : at / mapping_.columns;
        if (!known) homes_.add(chunk, 1, rows);
      }
    std::partial_sum(rows.begin(), rows.end(), rows.begin());
    for (auto at = column; at < mapping_.tiles_each(); at += mapping_.columns)
      for (const auto chunk : cost.schedule->tiles[at].chunks[phase])
        if (const auto own = at / mapping_.columns; only_row_[chunk] == own) rows[own] -= homes_.of(chunk, own);
    return rows[row];
  }

  void partial_traffic(const UnitCost& cost, std::int64_t local, std::int64_t phase, UnitCost::Traffic& traffic) const {
    if (!call_.backward || mapping_.rows == 1) return;
    const auto bytes = double(call_.partial_key_bytes());
    traffic.received += double(incoming(cost, local, phase)) * bytes;
    for (const auto chunk : cost.schedule->tiles[local].chunks[phase]) {
      traffic.sent += double(key_sizes_[chunk] - homes_.of(chunk, local / mapping_.columns)) * bytes;
    }
  }

  /// The longest way that bytes go in a phase: along columns of the grid for keys, along rows for queries.
  std::int64_t longest_way(std::int64_t unit, const PhaseCost& phase) {
    if (call_.machine.mesh_columns <= 0) return 0;
    const auto phases = units_[unit]->schedule->phases;
    switch (phase.kind) {
      case PhaseKind::sums:
      case PhaseKind::keys: {
        if (phase.index >= phases) return 0;
        const bool sums = phase.kind == PhaseKind::sums;
        auto way = way_of_keys(unit, phase.index);
        if (call_.backward && !sums && phase.index > 0) way = std::max(way, way_of_keys(unit, phase.index - 1));
        if (phase.index == 0 && sums == call_.lse_remainders) way = std::max(way, way_of_rows(unit, false));
        return way;
      }
      case PhaseKind::key_gradients: return way_of_keys(unit, phases - 1);
      case PhaseKind::lse_remainders: return way_of_rows(unit, true);
      case PhaseKind::reduction: return way_of_rows(unit, false);
      default: return 0;
    }
  }

  /// The longest way between homes of a phase's keys and the tiles that compute with them.
  std::int64_t way_of_keys(std::int64_t unit, std::int64_t phase) {
    if (mapping_.rows == 1) return 0;
    const auto [known, fresh] = ways_.try_emplace({units_[unit], unit % mapping_.at_once, phase});
    auto& most = known->second;
    std::vector<std::int32_t> chunks;
    for (std::int64_t column = 0; fresh && column < mapping_.columns; ++column) {
      const auto place = [&](std::int64_t row) { return places_[tile(unit, row * mapping_.columns + column)]; };
      for (std::int64_t row = 0; row < mapping_.rows; ++row) {
        const auto here = place(row);
        for (const auto chunk : units_[unit]->schedule->tiles[row * mapping_.columns + column].chunks[phase]) {
          if (wanted_at_[chunk].empty()) chunks.push_back(chunk);
          wanted_at_[chunk].add(here);
        }
      }
      for (const auto chunk : chunks) {
        auto& homes = homes_at_[unit % mapping_.at_once * mapping_.key_chunks + chunk];
        if (homes.empty()) {
          const auto first = call_.first_row(mapping_, chunk);
          for (std::int64_t key = 0; key < std::min(key_sizes_[chunk], mapping_.rows); ++key)
            homes.add(place((first + key) % mapping_.rows));
        }
        most = std::max(most, homes.longest_way_to(std::exchange(wanted_at_[chunk], {})));
      }
      chunks.clear();
    }
    return most;
  }

  /// The longest way along a grid row. whole: from every tile, not only the homes of queries.
  std::int64_t way_of_rows(std::int64_t unit, bool whole) {
    if (mapping_.columns == 1) return 0;
    const auto [known, fresh] = ways_.try_emplace({units_[unit], unit % mapping_.at_once, whole ? -2 : -1});
    auto& most = known->second;
    for (std::int64_t row = 0; fresh && row < mapping_.rows; ++row) {
      Spread all, homes;
      for (std::int64_t column = 0; column < mapping_.columns; ++column) {
        const auto local = row * mapping_.columns + column;
        const auto& sizes = units_[unit]->sizes[local];
        if (sizes.query_rows > 0) all.add(places_[tile(unit, local)]);
        if (whole ? sizes.query_rows > 0 : sizes.home_rows > 0) homes.add(places_[tile(unit, local)]);
      }
      most = std::max(most, homes.longest_way_to(all));
    }
    return most;
  }

  const Call& call_;
  const Mapping mapping_;
  Cost cost_;
  Scheduler scheduler_{call_, mapping_};
  const KeyHomes homes_{call_, mapping_};
  std::map<const Schedule*, UnitCost> costs_;
  std::vector<const UnitCost*> units_;
  std::int64_t key_phases_ = 1;
  std::vector<std::int64_t> key_sizes_;  // of each chunk
  std::vector<std::int64_t> resident_;   // bytes of each tile: the homes of all waves
  std::map<std::tuple<const UnitCost*, PhaseKind, std::int64_t>, PhaseSum> sums_;
  std::map<std::pair<std::int64_t, PhaseKind>, Live> lives_;
  std::map<std::tuple<const UnitCost*, std::int64_t, std::int64_t>, std::int64_t> ways_;
  std::vector<Place> places_;           // of all tiles of a mesh
  std::vector<Spread> wanted_at_;       // of each key chunk
  std::vector<Spread> homes_at_;        // of each key chunk of each unit that computes at the same time
  mutable std::vector<Wanted> wanted_;  // of each column, in the phase asked for last
  mutable std::int64_t asked_ = 0;
  mutable std::vector<std::int64_t> last_asked_;  // of each key chunk
  mutable std::vector<std::int64_t> only_row_;    // which alone asks for a chunk, or -1
};

}  // namespace

std::string PhaseCost::name(std::int64_t waves) const {
  const auto prefix = waves > 1 ? "wave " + std::to_string(wave) + ": " : std::string();
  switch (kind) {
    case PhaseKind::load: return prefix + "load";
    case PhaseKind::row_sums: return prefix + "row sums";
    case PhaseKind::sums: return prefix + "sums of P " + std::to_string(index);
    case PhaseKind::lse_remainders: return prefix + "lse remainders";
    case PhaseKind::keys: return prefix + "keys " + std::to_string(index);
    case PhaseKind::key_gradients: return prefix + "dk and dv";
    case PhaseKind::reduction: return prefix + "reduction";
    case PhaseKind::store: return prefix + "store";
  }
  return prefix;
}

std::vector<PhaseCost> empty_phases(const Call& call, const Mapping& mapping, std::int64_t key_phases) {
  std::vector<PhaseCost> phases;
  for (std::int64_t wave = 0; wave < mapping.waves; ++wave) {
    const auto add = [&](PhaseKind kind, std::int64_t index = 0) {
      auto& phase = phases.emplace_back();
      phase.kind = kind, phase.wave = wave, phase.index = index;
    };
    if (!call.resident()) add(PhaseKind::load);
    if (call.backward && (mapping.columns > 1 || call.lse_remainders)) add(PhaseKind::row_sums);
    for (std::int64_t i = 0; call.lse_remainders && i < key_phases; ++i) add(PhaseKind::sums, i);
    if (call.lse_remainders) add(PhaseKind::lse_remainders);
    for (std::int64_t i = 0; i < key_phases; ++i) add(PhaseKind::keys, i);
    if (call.backward && mapping.rows > 1) add(PhaseKind::key_gradients);
    if (mapping.columns > 1) add(PhaseKind::reduction);
    if (!call.resident()) add(PhaseKind::store);
  }
  return phases;
}

void Evaluation::total(const TileMachine& machine) {
  compute = exchange = sync = cycles = 0;
  for (std::size_t p = 0; p < phases.size();) {
    double computes = 0, exchanges = 0;
    double after_compute = 0, after_moves = 0;  // synchronization
    const auto wave = phases[p].wave;
    if (machine.overlap && wave == 0 && phases[p].kind == PhaseKind::load) cycles += phases[p].exchange;
    for (; p < phases.size() && phases[p].wave == wave; ++p) {
      computes += phases[p].compute;
      exchanges += phases[p].exchange;
      const bool moves = phases[p].kind == PhaseKind::load || phases[p].kind == PhaseKind::store;
      (moves ? after_moves : after_compute) += machine.sync_cycles;
    }
    compute += computes, exchange += exchanges, sync += after_compute + after_moves;
    const double working = computes + after_compute, moving = exchanges + after_moves;
    cycles += machine.overlap ? std::max(working, moving) : working + moving;
  }
}

double exchange_cycles(const TileMachine& machine, double most_of_tile, double from_memory, std::int64_t hops) {
  double cycles = most_of_tile / machine.exchange_bytes_per_cycle;
  if (machine.memory_bytes_per_cycle > 0) cycles = std::max(cycles, from_memory / machine.memory_bytes_per_cycle);
  return cycles + double(hops) * machine.hop_cycles;
}

std::int64_t hops_between(const TileMachine& machine, std::int64_t from, std::int64_t to) {
  if (machine.mesh_columns <= 0) return 0;
  return std::abs(from / machine.mesh_columns - to / machine.mesh_columns) +
         std::abs(from % machine.mesh_columns - to % machine.mesh_columns);
}

Evaluation evaluate(const Call& call, const Mapping& mapping, bool trace) {
  return Evaluator(call, mapping).run(trace);
}

std::optional<Evaluation> evaluate_below(const Call& call, const Mapping& mapping, double most) {
  Evaluator evaluator(call, mapping);
  if (evaluator.least_cycles() >= most) return {};
  return evaluator.run(false);
}

}  // namespace anyflash::simulator
