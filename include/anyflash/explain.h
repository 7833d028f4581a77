// What a rule looks like and what it costs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <anyflash/attention.h>

namespace anyflash {

/// The figures of a rule on given shapes, as the CPU backend's plan runs it. A tile: a query block times a key block.
struct Explanation {
  std::int64_t queries = 0, keys = 0;
  std::int64_t visible_pairs = 0;                 ///< pairs of a query and a key that it sees: counted, not estimated
  std::int64_t visited_pairs = 0;                 ///< pairs in the tiles that are computed, padding included
  double visited_per_visible = 0;                 ///< 1 is best; 0 if nothing is visible
  std::int64_t query_blocks = 0, key_blocks = 0;  ///< blocks that hold an entry
  std::int64_t tiles_skipped = 0, tiles_partial = 0, tiles_full = 0;  ///< sum: query_blocks * key_blocks
  /// A block in each dimension (z, y, x; 1 for dimensions that the sequence does not have): entries, and the step
  /// between them.
  std::int64_t query_block[3] = {}, query_step[3] = {}, key_block[3] = {}, key_step[3] = {};
  double forward_flops = 0;          ///< useful: 2 (d_qk + d_v) per visible pair
  double backward_flops = 0;         ///< useful: 6 d_qk + 4 d_v per visible pair
  double bytes = 0;                  ///< size of q, k, v, out and lse, one head
  double dense_mask_bytes = 0;       ///< size of the rule as a boolean matrix, one head
  int threads = 0;                   ///< of the plan
  std::int64_t workspace_bytes = 0;  ///< of a call of one head: forward or, if asked for, backward
  /// (query_blocks, key_blocks): 0 skip, 1 partial, 2 full; empty if over 2^24 tiles.
  std::vector<std::uint8_t> tile_classes;
};

/// Sizes of the sequence, 1 to 3 numbers each, outermost first.
using SequenceShape = std::vector<std::int64_t>;

struct ExplainOptions {
  Align align = Align::none_front;
  std::int64_t d_qk = 64, d_v = 64;
  ElementType type = ElementType::float32;
  bool backward = false;  ///< describe the backward plan
};

/// Describes one batch entry and head: the first ones, if a rule's tables (documents, blocks, dense) differ between
/// them. Throws Error as forward would for these shapes.
Explanation explain(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                    const ExplainOptions& options = {});

/// The number of pairs of a query and a key that it sees, over all batch entries and heads: counted, not estimated. It
/// reads only the shapes and types of q, k and v, whose data may be null. Lengths, page tables and the rule's tables
/// are read, and must be on the CPU. Throws Error as forward would.
std::int64_t visible_pairs(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options = {});

/// The pattern itself, (queries, keys) row-major, 1 where the query sees the key. Each pair is evaluated from the
/// rule's definition. Throws Error over 2^28 pairs.
std::vector<std::uint8_t> pattern(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                  Align align = Align::none_front);

/// A picture of the pattern: queries down, keys across, both in memory order, shrunk to at most `side` pixels a side.
/// It has width * height grey levels. 0: no pair is visible; 255: the densest pixel. Levels between are in proportion
/// to the visible share of a pixel's pairs, and at least 1. Where a pixel covers very many queries, it is sampled at
/// evenly spread ones.
struct Picture {
  int width = 0, height = 0;
  std::vector<std::uint8_t> grey;
  std::int64_t queries = 0, keys = 0;
  double densest = 1;  ///< the visible share of the pairs in the densest pixel; 1: all are visible
};

/// Throws Error as forward would for these shapes, and for a side that is not between 1 and 4096.
Picture picture(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                Align align = Align::none_front, std::int64_t side = 256);

/// For a terminal: one line per two rows of pixels, one character per column, from half blocks and shades.
std::string picture_text(const Picture& picture);

/// A drawing with title, axes and legend, as an SVG document; equal pixels are merged.
std::string picture_svg(const Picture& picture, const std::string& title);

/// height rows of width pixels, red, green and blue.
struct Image {
  int width = 0, height = 0;
  std::vector<std::uint8_t> rgb;
};

/// The same drawing as pixels: each pixel of the picture becomes one or more.
Image picture_image(const Picture& picture, const std::string& title);

/// The constants of the CPU's cost model, in seconds. `anyflash bench --calibrate` measures them.
struct Calibration {
  /// Of one type. A tile has 64 x 64 pairs; its time is tile + channel * (d_qk + d_v).
  struct Speed {
    double forward_tile = 0, forward_channel = 0;    ///< of the forward pass
    double backward_tile = 0, backward_channel = 0;  ///< of the backward pass
    double partial = 1, backward_partial = 1;        ///< a partial tile's computed share takes so many times as long
    double number = 0;  ///< of a number of keys, queries or results that is read or written
  };
  Speed float16, bfloat16, float32, float64;
  double step = 0;      ///< a call's, and each further chunk's
  double parallel = 1;  ///< how many times as fast `threads` threads are as one
  int threads = 1;
  std::string source = "built-in defaults";  ///< or the file that they come from
};

/// Those in use: the file's that ANYFLASH_CALIBRATION names, or $XDG_CACHE_HOME/anyflash/calibration.json, or
/// ~/.cache/anyflash/calibration.json; built-in ones if there is no such file. It is read once. Throws Error if
/// ANYFLASH_CALIBRATION names a file that cannot be read or is something else.
const Calibration& calibration();
/// Reads what calibration_text wrote. Throws Error if the text is something else.
Calibration parse_calibration(const std::string& text, const std::string& source);
/// The constants as JSON, as the file holds them.
std::string calibration_text(const Calibration& calibration);
/// Where calibration() looks, and `anyflash bench --calibrate` writes.
std::string calibration_path();

/// A predicted time in seconds.
struct PlanCost {
  double compute = 0, memory = 0, exchange = 0;

  double total() const { return compute + memory + exchange; }  ///< of the three
};

/// A way to run a call.
struct PlanCandidate {
  std::int64_t groups = 0;  ///< (batch entry, key/value head) pairs computed at once
  std::int64_t chunks_q = 1, chunks_kv = 1;
  int threads = 1;
  std::int64_t kept = 0;  ///< most key or query blocks that stay packed for a thread; 0: as many as are useful
  /// On the tile machine: the tiles of a group, and the key chunks that one receives at a time; else 0.
  std::int64_t grid_rows = 0, grid_columns = 0, in_flight = 0;
  std::int64_t bytes = 0;  ///< of workspace; on the tile machine those that are live on the fullest tile
  PlanCost cost;           ///< on the tile machine exchange includes synchronization; on a GPU no time, only an order
  bool timed = true;       ///< cost is a time
  /// On a GPU: by the portable kernels, because they need fewer bytes. Others take the fastest of this build that serve.
  bool portable = false;
  bool fits = true, chosen = false;
};

struct PlanExplanation {
  std::vector<PlanCandidate> candidates;  ///< those worth a look, by time; the chosen one, if any fits, among them
  std::int64_t least_bytes = 0;           ///< the smallest budget that works
  std::string calibration;                ///< where the cost model's constants come from
};

/// The ways to run a call that is given by its shapes, with options.memory_budget, num_chunks_q, num_chunks_kv and
/// threads. q, k and v have no data. Throws Error as forward would, except where nothing fits.
PlanExplanation explain_plan(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options = {},
                             bool backward = false, const Calibration& machine = calibration(),
                             const CallTensors& tensors = {});

/// The candidates as a table.
std::string plan_text(const PlanExplanation& explanation);
/// The candidates as stacked bars of their predicted times, an SVG document.
std::string plan_svg(const PlanExplanation& explanation, const std::string& title);

}  // namespace anyflash
