// The tile machine: a simulated processor of many tiles with small private memories. It computes in phases: all tiles
// exchange data, all compute, all wait for each other (bulk-synchronous, as Graphcore's IPU). Calls on
// Device{DeviceKind::tiles} run on it; their tensors are in the CPU's memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <anyflash/attention.h>

namespace anyflash {

/// A machine of tiles. The default is an IPU Mk2. All rates are those of one tile with all its workers.
///
/// A product of (m, k) and (k, n) numbers takes, with n and k rounded up to whole blocks of unit_columns and unit_depth
/// and m to unit_rows, m n k / multiply_adds cycles, plus unit_load_cycles for each block of unit_depth x unit_columns,
/// plus unit_start_cycles.
struct TileMachine {
  std::string name = "ipu-mk2";
  std::int64_t tiles = 1472;
  std::int64_t memory_per_tile = 624 * 1024;  ///< bytes
  std::int64_t reserved_per_tile = 0;         ///< bytes of it that tensors cannot have: code and stacks
  double clock_hz = 1.33e9;
  double multiply_adds_float16 = 64;  ///< a cycle; products of float16 accumulate in float32
  double multiply_adds_float32 = 16;  ///< a cycle
  std::int64_t unit_rows = 1, unit_columns = 16, unit_depth = 16;  ///< what a product's sizes are rounded up to
  double unit_load_cycles = 16;  ///< to load one block of the second operand into the unit
  double unit_start_cycles = 0;  ///< of a product, beside: to set it up, fill the unit and drain it
  double exp_per_cycle = 1;      ///< exponentials of a float16 call
  double vector_per_cycle = 4;   ///< other elementwise operations of a float16 call
  double exp_per_cycle_float32 = 1.0 / 3;
  double vector_per_cycle_float32 = 2;
  double exchange_bytes_per_cycle = 4;  ///< received by a tile, and sent by it (what many tiles receive is sent once)
  double sync_cycles = 600;             ///< of a phase
  std::int64_t workers = 6;             ///< threads of a tile: a call's work on a tile is in as many shares
  /// The unit of products works beside that of elementwise operations: a step takes the longer of both.
  bool separate_vector = false;
  /// Exchange of the next phase runs while the tiles compute this one. A phase then takes the longer of both, and tiles
  /// hold the data of two phases.
  bool overlap = false;
  /// The exchange is a mesh of this shape: each phase adds hop_cycles for each hop of its longest way. 0: all to all.
  std::int64_t mesh_rows = 0, mesh_columns = 0;
  double hop_cycles = 0;
  /// Bytes a cycle, all tiles together, of a memory that all tiles share and that holds the tensors. 0: there is none,
  /// and the tensors are on the tiles.
  double memory_bytes_per_cycle = 0;
};

/// A machine from a file of lines `key = value`, whose keys are the members of TileMachine; # begins a comment. It
/// must name tiles, memory_per_tile and clock_hz; other members are by default those of an IPU Mk2. Throws Error, naming
/// the key, for unknown keys and for numbers that are missing or absurd. A name has letters, digits, spaces and -_.().
TileMachine read_tile_machine(const std::string& path);
/// The same from text; `origin` is what errors call it. base: the machine that members not named come from.
TileMachine parse_tile_machine(std::string_view text, std::string_view origin = "machine",
                               const TileMachine* base = nullptr);
/// The names of the machines that come with the library.
std::vector<std::string> tile_machine_names();
/// One of these by its name, else the machine of a file.
TileMachine tile_machine(const std::string& name_or_path);

/// What a caller may fix of the mapping, beside the call's own num_chunks_q, num_chunks_kv and memory_budget (the most
/// bytes that are live on any tile). 0: the planner chooses.
struct TileChoice {
  std::int64_t grid_rows = 0, grid_columns = 0;  ///< tiles of one key head: rows share queries, columns share keys
  std::int64_t chunks_in_flight = 0;             ///< key chunks that a tile receives in one phase, at most
  bool trace = false;                            ///< fill transfers, live_bytes and compute_cycles of the report
};

/// Makes calls on the tile machine use `machine` from the next one on. No other thread may be in a call at the same
/// time. Throws Error if a number is absurd.
void use_tile_machine(const TileMachine& machine, const TileChoice& choice = {});
/// The machine that calls use.
TileMachine used_tile_machine();
/// What is fixed of their mappings.
TileChoice used_tile_choice();

/// One phase of a call: exchange, then computation, then synchronization.
struct TilePhase {
  std::string name;            ///< "heads 0: keys 3"
  double compute_cycles = 0;   ///< of the slowest tile
  double exchange_cycles = 0;  ///< of the slowest tile
  double sync_cycles = 0;
  std::int64_t exchanged_bytes = 0;  ///< received by all tiles
  std::int64_t live_bytes_max = 0;   ///< of the fullest tile
  double live_bytes_mean = 0;        ///< over all tiles of the machine
};

/// Bytes that one tile sent to another in a call.
struct TileTransfer {
  std::int32_t from = 0, to = 0;  ///< tiles; -1: the shared memory
  std::int64_t bytes = 0;
};

/// What a call did, or would do, on the tile machine.
struct TileReport {
  TileMachine machine;
  bool backward = false;
  ElementType type = ElementType::float16;
  // The mapping.
  std::int64_t num_chunks_q = 0, num_chunks_kv = 0, grid_rows = 0, grid_columns = 0, chunks_in_flight = 0;
  std::int64_t head_groups_at_once = 0;  ///< key heads (of all batch entries) that compute at the same time
  std::int64_t waves = 0;                ///< how many times so many are computed one after the other
  // The cost.
  double cycles = 0, compute_cycles = 0, exchange_cycles = 0, sync_cycles = 0;
  double seconds = 0;           ///< at the machine's clock
  double predicted_cycles = 0;  ///< by the planner, before the call
  std::int64_t exchanged_bytes = 0;
  std::int64_t peak_bytes = 0;  ///< of the fullest tile in any phase
  std::int64_t peak_tile = 0;   ///< that tile
  double multiply_adds = 0;     ///< of visible pairs: (d_qk + d_v) forward, 3 d_qk + 2 d_v backward
  double utilisation = 0;       ///< multiply_adds / (cycles * tiles * peak rate of the type)
  double busy = 0;              ///< cycles in which a tile computes / cycles, the mean over all tiles
  std::vector<TilePhase> phases;
  std::vector<std::int64_t> peak_bytes_of_tile;  ///< (tiles)
  // With TileChoice::trace only:
  std::vector<TileTransfer> transfers;      ///< of all phases together, by from and to
  std::vector<std::int64_t> live_bytes;     ///< (phases, tiles)
  std::vector<double> tile_compute_cycles;  ///< (phases, tiles)
};

/// A machine for the calls of one thread, and the report of the last one.
struct TileContext {
  TileMachine machine;
  TileChoice choice;
  std::optional<TileReport> report;
};
/// Makes the calling thread's calls use `context` instead of what use_tile_machine says; null: no longer. It must live
/// until the thread uses another one. Returns the one before. Throws Error if a number is absurd.
TileContext* use_tile_context(TileContext* context);

/// The report of the calling thread's last forward or backward call on the tile machine, of its context if it has
/// one. Calls without pairs have no report. Throws Error before the first.
const TileReport& last_tile_report();

/// The report that the planner expects of a call, without computing it: data pointers may be null. Throws Error as the
/// call would: if the plan does not fit, the error names tile, phase and bytes. It is within 5 % of the call's own report
/// if `tensors` are those of the call.
TileReport predict_tiles(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options,
                         bool backward = false, const CallTensors& tensors = {});

/// A mapping that the planner considered.
struct TileCandidate {
  std::int64_t num_chunks_q = 0, num_chunks_kv = 0, grid_rows = 0, grid_columns = 0, chunks_in_flight = 0, waves = 0;
  double compute_cycles = 0, exchange_cycles = 0, sync_cycles = 0, cycles = 0;
  std::int64_t peak_bytes = 0;
  bool fits = false, chosen = false;
};

/// All mappings that the planner considers for a call, best first, those that do not fit last.
std::vector<TileCandidate> tile_candidates(const TensorView& q, const TensorView& k, const TensorView& v,
                                           const Options& options, bool backward = false,
                                           const CallTensors& tensors = {});

/// What a picture of a report shows: all of the others, one below the other; the memory of every tile; when phases
/// exchange, compute and wait; who sends to whom (with TileChoice::trace only); live memory over time.
enum class TilePicture : std::uint8_t { all, memory, phases, transfers, live };
/// Pictures of a report, as an SVG document. Throws Error for transfers of a report without trace.
std::string tile_picture_svg(const TileReport& report, TilePicture picture = TilePicture::all);

/// Cycles of a tile for the product of (m, k) and (k, n) numbers: the closed form that planner and simulator share.
/// Throws Error for sizes below 0.
double tile_product_cycles(const TileMachine& machine, ElementType type, std::int64_t m, std::int64_t n,
                           std::int64_t k);

/// Cycles of a tile for a step of the forward pass.
struct TileStep {
  double products = 0;  ///< S = Q K^T and O += P V
  double total = 0;     ///< with the softmax
};
/// A step in which `rows` queries meet `keys` keys, all of them visible.
TileStep tile_step_cycles(const TileMachine& machine, ElementType type, std::int64_t rows, std::int64_t keys,
                          std::int64_t d_qk, std::int64_t d_v);

}  // namespace anyflash
