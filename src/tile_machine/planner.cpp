// The choice of a mapping: many are estimated by closed forms, the most promising are evaluated tile by tile.
#include "tile_machine/planner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

namespace anyflash::simulator {
namespace {

/// How much of the area the rule shows, by blocks, and how much of a block's row or column it touches.
struct Area {
  double visible = 1;  ///< of all pairs of blocks
  double reach = 1;    ///< of the keys: those between the first and the last that a query block sees, on average
};

Area area_of(const Call& call) {
  const auto key_blocks = double((call.keys.entries() + 63) / 64);
  double visible = 0, reach = 0, rows = 0;
  const auto groups = std::min<std::size_t>(call.plan.groups.size(), 8);  // a sample, for the estimate
  for (std::size_t g = 0; g < groups; ++g) {
    const auto& list = call.plan.groups[g].keys_of_query_block;
    for (std::size_t block = 0; block + 1 < list.start.size(); ++block) {
      rows += 1;
      if (list.start[block] == list.start[block + 1]) continue;
      const auto &first = list.runs[list.start[block]], &last = list.runs[list.start[block + 1] - 1];
      reach += (last.first + last.count - first.first) / key_blocks;
      for (auto i = list.start[block]; i < list.start[block + 1]; ++i) visible += list.runs[i].count / key_blocks;
    }
  }
  return rows > 0 ? Area{visible / rows, reach / rows} : Area{};
}

/// The estimate of a mapping, as if all chunks and all tiles were alike.
class Estimate {
 public:
  explicit Estimate(const Call& call) : call_(call), cost_(call), area_(area_of(call)) {}

  double cycles(const Mapping& m) const {
    const auto rows = ceil(call_.queries.entries() * call_.heads_each, m.rows);
    const auto keys = ceil(call_.keys.entries(), m.columns);
    const auto chunk_rows = ceil(call_.queries.entries(), m.query_chunks);
    const auto chunk_keys = ceil(call_.keys.entries(), m.key_chunks);
    const double items = double(m.query_chunks * call_.heads_each) / double(m.rows);
    const double chunks = std::ceil(double(m.key_chunks) / double(m.columns));
    // Of the pairs of chunks, those that are not hidden: a chunk widens what is visible by its own length.
    const double wide = double(chunk_rows + chunk_keys) / double(call_.keys.entries());
    const double shown = area_.visible >= 1 ? 1 : std::min(1.0, area_.visible * (1 + std::min(wide, 1.0)));
    const double pairs = std::ceil(items) * chunks * shown;
    const double uneven = shown < 1 ? 1 + 0.5 * std::sqrt((1 - shown) / std::max(pairs, 0.5)) : 1;
    double compute = std::max(pairs * uneven, 1.0) * cost_.step(chunk_rows, chunk_keys, false) *
                     (shown < 1 ? area_.visible / shown : 1);
    const double met = std::min(1.0, shown < 1 ? std::max(area_.visible, 1 - std::pow(1 - shown, items)) : 1.0);
    const double received_keys = double(keys) * met * (1 - 1 / double(m.rows));
    double bytes = received_keys * double(call_.key_row_bytes());
    if (m.columns > 1) {
      bytes += double(rows) * double(call_.query_row_bytes() + call_.partial_query_bytes());
      compute += cost_.combine(ceil(rows, m.columns), m.columns);
    }
    if (call_.backward) {
      bytes += received_keys * double(call_.partial_key_bytes());
      compute += cost_.add_keys(std::int64_t(received_keys)) + cost_.row_sums(ceil(rows, m.columns));
    }
    double exchange = cost_.exchange(bytes);
    if (!call_.resident()) {
      const double all = double(rows) * double(call_.query_row_bytes() * 2) * double(m.rows) +
                         double(call_.keys.entries()) * double(call_.key_row_bytes() * (call_.backward ? 2 : 1));
      exchange += all * double(m.at_once) / call_.machine.memory_bytes_per_cycle;
    }
    const double phases = std::ceil(chunks * met / double(m.in_flight)) + (m.columns > 1 ? 1 : 0) +
                          (call_.backward && m.columns > 1 ? 1 : 0) + (call_.backward && m.rows > 1 ? 1 : 0);
    compute += phases * call_.machine.sync_cycles;
    if (!call_.resident()) exchange += 2 * call_.machine.sync_cycles;
    return double(m.waves) * (call_.machine.overlap ? std::max(compute, exchange) : compute + exchange);
  }

  /// Bytes of the fullest tile.
  std::int64_t bytes(const Mapping& m) const { return typical_bytes(call_, m, typical_sizes(call_, m)); }

 private:
  static std::int64_t ceil(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

  const Call& call_;
  Cost cost_;
  Area area_;
};

void add(std::vector<std::int64_t>& numbers, std::int64_t number, std::int64_t most) {
  number = std::clamp<std::int64_t>(number, 1, most);
  if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) numbers.push_back(number);
}

/// The numbers worth trying for one part of a mapping; the caller's own if it gives one.
std::vector<std::int64_t> column_counts(const Call& call, std::int64_t tiles) {
  if (call.choice.grid_columns > 0) return {call.choice.grid_columns};
  if (call.choice.grid_rows > 0) tiles = std::max<std::int64_t>(tiles / call.choice.grid_rows, 1);
  const auto most = std::min(tiles, call.keys.entries());
  std::vector<std::int64_t> counts;
  for (const auto n : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 46, 64, 92, 128})
    if (n <= most) add(counts, n, most);
  const auto root = std::int64_t(std::sqrt(double(tiles)));
  for (const auto n : {root, root * 3 / 4, root * 3 / 2}) add(counts, n, most);
  if (call.machine.mesh_columns > 0 && call.machine.mesh_columns <= most) add(counts, call.machine.mesh_columns, most);
  return counts;
}

std::vector<std::int64_t> multiples(std::int64_t chosen, std::int64_t of, std::int64_t share, std::int64_t most,
                                    std::int64_t most_times) {
  if (chosen > 0) return {chosen};
  std::vector<std::int64_t> counts;
  for (const auto n : {1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024})
    if (n <= most_times) add(counts, (of * n + share - 1) / share, most);
  return counts;
}

std::vector<std::int64_t> wave_counts(const Call& call) {
  const auto choice = call.choice;
  const auto each = choice.grid_rows > 0 && choice.grid_columns > 0 ? choice.grid_rows * choice.grid_columns : 1;
  const auto least = (call.units * each + call.machine.tiles - 1) / call.machine.tiles;
  std::vector<std::int64_t> counts;
  add(counts, least + 1, call.units);
  for (auto n = least; n < 2 * call.units; n *= 2) add(counts, n, call.units);
  return counts;
}

/// About how long an evaluation takes.
double work_of(const Call& call, const Mapping& m) {
  const double chunks = double(m.query_chunks * call.heads_each) * double(m.key_chunks);
  const double phases = std::ceil(double(m.key_chunks) / double(m.columns * m.in_flight)) + 2;
  const double visits = double(m.tiles_each()) * phases;
  const double each = 2 + std::min(visits / 1e5, 4.0);  // lists that no cache holds take longer
  return 1e3 + 0.2 * chunks + each * visits + double(call.machine.tiles);
}

constexpr std::int64_t usual_chunks = 128, long_chunks = 1024;  // the latter where no tile can hold larger ones

/// Calls f(mapping) for changed copies of m. most_chunks: of the keys, for a column.
template <typename F>
void for_each_mapping(const Call& call, Mapping m, std::int64_t most_chunks, const F& f) {
  const auto& choice = call.choice;
  std::vector<std::int64_t> seen;
  for (const auto waves : wave_counts(call)) {
    m.at_once = (call.units + waves - 1) / waves;
    m.waves = (call.units + m.at_once - 1) / m.at_once;
    const auto tiles = call.machine.tiles / m.at_once;
    if (tiles < 1 || std::find(seen.begin(), seen.end(), m.at_once) != seen.end()) continue;
    seen.push_back(m.at_once);
    for (const auto columns : column_counts(call, tiles)) {
      m.columns = columns;
      const auto most_rows = call.queries.entries() * call.heads_each;
      m.rows = choice.grid_rows > 0
                   ? choice.grid_rows
                   : std::clamp<std::int64_t>(tiles / columns, 1, std::max<std::int64_t>(most_rows, 1));
      if (m.tiles_each() > tiles) continue;
      for (const auto query_chunks : multiples(call.chunks_q, m.rows, call.heads_each, call.queries.entries(), 32))
        for (const auto key_chunks : multiples(call.chunks_kv, columns, 1, call.keys.entries(), most_chunks)) {
          m.query_chunks = query_chunks, m.key_chunks = key_chunks;
          const auto each = (key_chunks + columns - 1) / columns;
          std::vector<std::int64_t> flights;
          if (choice.chunks_in_flight > 0) flights = {choice.chunks_in_flight};
          else
            for (const auto n : {std::int64_t{1}, std::int64_t{2}, std::int64_t{4}, each}) add(flights, n, each);
          for (const auto in_flight : flights) {
            m.in_flight = in_flight;
            f(m);
          }
        }
    }
  }
}

/// Mappings are guessed by estimates, evaluated tile by tile, and changed step by step while that helps.
class Search {
 public:
  Search(const Call& call, bool staggered) : call_(call), estimate_(call) {
    first_.turns = call.lopsided, first_.staggered = staggered;
  }

  /// Evaluates the most promising mappings of a coarse list.
  void guess() {
    struct Guess {
      double cycles;
      std::int64_t excess;  // bytes beyond the memory
      Mapping mapping;
    };
    std::vector<Guess> guesses;
    const auto memory = call_.memory();
    // Rows of a grid differ a little, so tiles hold up to some 2 % more than the estimate.
    bool none_fits = true;
    for (const auto most_chunks : {usual_chunks, long_chunks}) {
      if (!none_fits) break;
      for_each_mapping(call_, first_, most_chunks, [&](const Mapping& mapping) {
        const auto excess = std::max<std::int64_t>(estimate_.bytes(mapping) * 51 / 50 - memory, 0);
        none_fits &= excess > 0;
        guesses.push_back({estimate_.cycles(mapping), excess, mapping});
      });
    }
    if (none_fits) return;
    std::sort(guesses.begin(), guesses.end(), [](const Guess& a, const Guess& b) {
      return std::pair(a.excess, a.cycles) < std::pair(b.excess, b.cycles);
    });
    std::map<std::int64_t, int> of_waves;  // estimates are least sure where the number of waves differs
    for (const auto& guess : guesses) {
      if (all_.size() >= guessed_at_most || (!all_.empty() && !affordable())) break;
      if (work_of(call_, guess.mapping) > 8 * work_at_most) continue;
      if (of_waves[guess.mapping.waves]++ < guessed_of_waves) consider(guess.mapping);
    }
  }

  /// Goes from the best mapping to a better neighbour, as long as there is one and the work is not too much.
  void refine() {
    if (all_.empty()) return;
    for (std::size_t from = best_, before = all_.size() + 1; affordable(); from = best_) {
      if (from == before) return;
      before = from;
      const auto mapping = all_[from].mapping;
      for (const auto& neighbour : neighbours(mapping)) {
        if (!affordable()) return;
        consider(neighbour);
      }
    }
  }

  std::vector<Evaluation> sorted() {
    std::stable_sort(all_.begin(), all_.end(),
                     [&](const Evaluation& a, const Evaluation& b) { return better(call_, a, b); });
    return std::move(all_);
  }

 private:
  static constexpr std::size_t guessed_at_most = 12;
  static constexpr int guessed_of_waves = 2;
  static constexpr double work_at_most = 1.3e6;

  bool affordable() const { return work_ < work_at_most; }

  void consider(const Mapping& mapping) {
    const std::array<std::int64_t, 6> key = {mapping.query_chunks, mapping.key_chunks, mapping.rows,
                                             mapping.columns,      mapping.in_flight,  mapping.at_once};
    if (!seen_.insert(key).second) return;
    // Until one fits, only those that need about as little memory as the best are worth it.
    const auto bytes = estimate_.bytes(mapping);
    if (!all_.empty() && !all_[best_].fits(call_) && bytes > best_bytes_ * 51 / 50) return;
    work_ += work_of(call_, mapping);
    const bool fits = !all_.empty() && all_[best_].fits(call_);
    auto found = evaluate_below(call_, mapping, fits ? all_[best_].cycles : std::numeric_limits<double>::infinity());
    if (!found) return;
    all_.push_back(std::move(*found));
    if (all_.size() == 1 || better(call_, all_.back(), all_[best_])) best_ = all_.size() - 1, best_bytes_ = bytes;
  }

  /// The mapping with other numbers where the caller has not fixed them, if there is such a mapping. items: query
  /// chunks of a grid row; chunks: key chunks of a column.
  void add(std::vector<Mapping>& found, Mapping m, std::int64_t items, std::int64_t chunks) const {
    const auto& choice = call_.choice;
    const auto queries = call_.queries.entries(), keys = call_.keys.entries();
    const auto tiles = call_.machine.tiles / m.at_once;
    m.columns =
        choice.grid_columns > 0 ? choice.grid_columns : std::clamp<std::int64_t>(m.columns, 1, std::min(tiles, keys));
    m.rows = choice.grid_rows > 0
                 ? choice.grid_rows
                 : std::clamp<std::int64_t>(m.rows, 1, std::min(tiles / m.columns, queries * call_.heads_each));
    if (m.rows < 1 || m.tiles_each() > tiles) return;
    items = std::max<std::int64_t>(items, 1), chunks = std::max<std::int64_t>(chunks, 1);
    m.query_chunks = call_.chunks_q > 0 ? call_.chunks_q
                                        : std::min((items * m.rows + call_.heads_each - 1) / call_.heads_each, queries);
    m.key_chunks = call_.chunks_kv > 0 ? call_.chunks_kv : std::min(chunks * m.columns, keys);
    const auto each = (m.key_chunks + m.columns - 1) / m.columns;
    m.in_flight =
        choice.chunks_in_flight > 0 ? choice.chunks_in_flight : std::clamp<std::int64_t>(m.in_flight, 1, each);
    found.push_back(m);
  }

  std::vector<Mapping> neighbours(const Mapping& m) const {
    std::vector<Mapping> found;
    const auto items = (m.query_chunks * call_.heads_each + m.rows - 1) / m.rows;
    const auto chunks = (m.key_chunks + m.columns - 1) / m.columns;
    const auto tiles = call_.machine.tiles / m.at_once;
    const auto with = [&](auto change) {
      auto changed = m;
      change(changed);
      return changed;
    };
    for (const auto n : {items + 1, items * 2, items / 2, items - 1}) add(found, m, n, chunks);
    for (const auto n : {chunks * 2, chunks / 2, chunks + 1, chunks - 1}) {  // about as many keys in flight
      add(found, with([&](Mapping& c) { c.in_flight = std::max<std::int64_t>(m.in_flight * n / chunks, 1); }), items,
          n);
      add(found, m, items, n);
    }
    for (const auto n : {m.in_flight * 2, m.in_flight / 2, m.in_flight + 1, m.in_flight - 1, chunks})
      add(found, with([&](Mapping& c) { c.in_flight = std::max<std::int64_t>(n, 1); }), items, chunks);
    for (const auto n : {m.columns * 2, m.columns / 2, m.columns + 1, m.columns - 1}) {
      const auto columns = std::max<std::int64_t>(n, 1);
      const auto wide =
          with([&](Mapping& c) { c.columns = columns, c.rows = std::max<std::int64_t>(tiles / columns, 1); });
      const auto now = std::max<std::int64_t>((items * wide.rows + m.rows / 2) / m.rows, 1);
      add(found, wide, now, std::max<std::int64_t>(chunks * m.columns / columns, 1));
    }
    for (const auto waves : {m.waves - 1, m.waves + 1, m.waves / 2, m.waves * 2}) {
      if (waves < 1 || waves > call_.units) continue;
      auto changed = m;
      changed.at_once = (call_.units + waves - 1) / waves;
      changed.waves = (call_.units + changed.at_once - 1) / changed.at_once;
      const auto each = call_.machine.tiles / changed.at_once;
      if (changed.at_once == m.at_once || each < 1) continue;
      changed.columns = std::min(m.columns, each);
      changed.rows = std::max<std::int64_t>(each / changed.columns, 1);
      add(found, changed, items, chunks);
    }
    return found;
  }

  const Call& call_;
  Estimate estimate_;
  Mapping first_;
  std::vector<Evaluation> all_;
  std::size_t best_ = 0;
  std::int64_t best_bytes_ = 0;  // by the estimate
  std::set<std::array<std::int64_t, 6>> seen_;
  double work_ = 0;
};

}  // namespace

BoundedMappings::BoundedMappings(const Call& call) : call_(any_results(call)) {
  Mapping first;
  first.staggered = true;
  for_each_mapping(call_, first, long_chunks, [&](Mapping m) {
    m.step_rows = (call_.queries.entries() + m.query_chunks - 1) / m.query_chunks;
    auto sizes = typical_sizes(call_, m);
    sizes.step_rows = m.step_rows;
    all_.push_back({m, typical_bytes(call_, m, sizes)});
  });
  std::stable_sort(all_.begin(), all_.end(), [](const Bounded& a, const Bounded& b) { return a.bytes < b.bytes; });
}

std::int64_t BoundedMappings::bytes_of(const Mapping& m) {
  const auto [keys, fresh] = keys_.try_emplace({m.rows, m.columns, m.key_chunks, m.in_flight});
  if (fresh) keys->second = most_keys(call_, m);
  return largest_bytes(call_, m, keys->second);
}

Bounded BoundedMappings::smallest() {
  const auto about = [](std::int64_t bytes) { return bytes + bytes / 64; };
  auto least = std::numeric_limits<std::int64_t>::max() / 2;
  std::vector<Bounded> small;
  for (const auto& [m, guessed] : all_) {
    if (guessed > about(least)) break;
    small.push_back({m, bytes_of(m)});
    least = std::min(least, small.back().bytes);
  }
  std::erase_if(small, [&](const Bounded& one) { return one.bytes > about(least); });
  return *std::min_element(small.begin(), small.end(), [&](const Bounded& a, const Bounded& b) {
    return work_of(call_, a.mapping) < work_of(call_, b.mapping);
  });
}

Bounded BoundedMappings::fastest_within(std::int64_t bytes) {
  const Estimate estimate(call_);
  std::vector<std::pair<double, const Mapping*>> fitting;
  for (const auto& one : all_)
    if (one.bytes <= bytes) fitting.emplace_back(estimate.cycles(one.mapping), &one.mapping);
  std::stable_sort(fitting.begin(), fitting.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [cycles, mapping] : fitting)
    if (const auto needed = bytes_of(*mapping); needed <= bytes) return {*mapping, needed};
  return smallest();
}

std::vector<Evaluation> search(const Call& call, bool staggered) {
  Search search(call, staggered);
  search.guess();
  search.refine();
  return search.sorted();
}

}  // namespace anyflash::simulator
