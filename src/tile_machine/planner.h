// The choice of a mapping, and what it will cost.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tile_machine/layout.h"

namespace anyflash::simulator {

enum class PhaseKind : std::uint8_t {
  load,
  row_sums,
  sums,            ///< backward, if an lse is large: P is summed over each row
  lse_remainders,  ///< these sums tell what lse lost to rounding
  keys,
  key_gradients,
  reduction,
  store
};

/// A phase of a wave: what the slowest tile does in it, and what all do.
struct PhaseCost {
  PhaseKind kind = PhaseKind::keys;
  std::int64_t wave = 0, index = 0;      ///< index: of a keys or sums phase
  double compute = 0, exchange = 0;      ///< cycles of the slowest tile
  double busy = 0;                       ///< compute cycles of all tiles together
  std::int64_t bytes = 0;                ///< received by all tiles
  std::int64_t live = 0, live_tile = 0;  ///< of the fullest tile
  double live_sum = 0;

  std::string name(std::int64_t waves) const;
};

/// The phases of each wave, with `key_phases` phases of keys each.
std::vector<PhaseCost> empty_phases(const Call& call, const Mapping& mapping, std::int64_t key_phases);

struct Evaluation {
  Mapping mapping;
  std::vector<PhaseCost> phases;
  double compute = 0, exchange = 0, sync = 0, cycles = 0;
  std::int64_t peak = 0;
  std::size_t peak_phase = 0;
  std::vector<std::int64_t> peak_of_tile;
  // If asked for, (phases, tiles):
  std::vector<std::int64_t> live;
  std::vector<double> tile_compute;
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> transfers;  // bytes from a tile to another

  bool fits(const Call& call) const { return peak <= call.memory(); }
  /// Adds up the phases. With overlap the exchange of a wave runs beside its computation.
  void total(const TileMachine& machine);
};

/// The exchange of a phase: the most that a tile receives or sends, what all take from the shared memory, hops.
double exchange_cycles(const TileMachine& machine, double most_of_tile, double from_memory, std::int64_t hops);
/// Steps of the mesh from one tile to another.
std::int64_t hops_between(const TileMachine& machine, std::int64_t from, std::int64_t to);

/// The call, with memory for whatever an lse holds and is asked for: what fits does so for all calls of these shapes.
Call any_results(const Call& call);
/// What a mapping costs. trace: fill live and tile_compute.
Evaluation evaluate(const Call& call, const Mapping& mapping, bool trace = false);
/// The same, unless it must cost `most` cycles or more.
std::optional<Evaluation> evaluate_below(const Call& call, const Mapping& mapping, double most);
/// Whether the first of two is the better one: it fits, and takes fewer cycles; or it is nearer to fit.
bool better(const Call& call, const Evaluation& a, const Evaluation& b);
/// The mappings that are worth a closer look, evaluated, the best first, those that do not fit last. staggered: such
/// mappings alone.
std::vector<Evaluation> search(const Call& call, bool staggered = false);
/// A mapping, and bytes that no tile exceeds under it, whatever the masks hide, an lse holds, and is asked for.
struct Bounded {
  Mapping mapping;
  std::int64_t bytes;
};
/// Mappings whose bytes have such a bound.
class BoundedMappings {
 public:
  explicit BoundedMappings(const Call& call);
  /// Of those with at most 1/64 more than the fewest bytes, the one that is soonest evaluated. It depends on the sizes of
  /// the call alone.
  Bounded smallest();
  /// The one that the estimate says is the fastest of at most so many bytes; the smallest if there is none.
  Bounded fastest_within(std::int64_t bytes);
  std::int64_t bytes_of(const Mapping& mapping);

 private:
  const Call call_;
  std::vector<Bounded> all_;  // bytes: as if all tiles were alike
  std::map<std::array<std::int64_t, 4>, MostKeys> keys_;
};
/// The mappings that are worth a closer look. If none fits, one that needs too much.
std::vector<Evaluation> candidates(const Call& call);
/// The smallest memory_budget that works.
std::int64_t least_memory(const Call& call);
/// The best mapping. Throws Error if none fits: the least budget that works, or tile, phase and bytes.
Evaluation best(const Call& call);

/// The report of an evaluation. visible_pairs: those that the rule shows, of all heads and batch entries.
TileReport report_of(const Call& call, const Evaluation& evaluation, double visible_pairs);

}  // namespace anyflash::simulator
