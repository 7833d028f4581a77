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

}  // namespace anyflash
