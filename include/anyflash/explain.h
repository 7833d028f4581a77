// What a rule looks like and what it costs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <anyflash/attention.h>

namespace anyflash {

/// The figures of a rule on given shapes, as the CPU backend's plan runs it.
struct Explanation {
  std::int64_t queries = 0, keys = 0;
  std::int64_t visible_pairs = 0;   ///< pairs the rule shows, of queries * keys
  std::int64_t visited_pairs = 0;   ///< pairs in the tiles that are computed
  std::int64_t tiles_skipped = 0, tiles_partial = 0, tiles_full = 0;
  std::int64_t query_block[3] = {}, query_step[3] = {}, key_block[3] = {}, key_step[3] = {};
  double forward_flops = 0, backward_flops = 0;   ///< useful: 4 (10) * d per visible pair with d_qk = d_v = d
  double bytes = 0;                 ///< of q, k, v, out and lse, one head
  std::vector<std::uint8_t> tile_classes;  ///< (query blocks, key blocks): 0 skip, 1 partial, 2 full; empty if over 2^24 tiles
  std::int64_t query_blocks = 0, key_blocks = 0;
};

/// Sizes of the sequence, 1 to 3 numbers each, outermost first.
using SequenceShape = std::vector<std::int64_t>;

struct ExplainOptions {
  Align align = Align::none_front;
  std::int64_t d_qk = 64, d_v = 64;
  ElementType type = ElementType::float32;
  bool backward = false;  ///< describe the backward plan
};

/// Throws Error as forward would for these shapes.
Explanation explain(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                    const ExplainOptions& options = {});

/// The pattern itself, (queries, keys) row-major, 1 where the query sees the key: from the definition, pair by pair.
/// Throws Error over 2^28 pairs.
std::vector<std::uint8_t> pattern(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                  Align align = Align::none_front);

/// A picture of the pattern: queries down, keys across, shrunk to at most `side` pixels a side; grey levels 0 (no pair
/// visible) to 255 (all visible). width * height bytes.
struct Picture {
  int width = 0, height = 0;
  std::vector<std::uint8_t> grey;
};
Picture picture(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align, int side = 256);
std::string picture_text(const Picture& picture);  ///< for a terminal: one character for 1 x 2 pixels
std::string picture_svg(const Picture& picture, const std::string& title);

}  // namespace anyflash
