#include "tile_machine/compute.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "cpu/numbers.h"
#include "rules/coordinates.h"
#include "rules/words.h"

namespace anyflash::simulator {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

/// A key chunk, widened.
namespace {

/// Divides means of scaled values by their scale. A mean of finite numbers is finite, however it was rounded.
void unscale(float* numbers, std::int64_t count, float scale) {
  constexpr float largest = std::numeric_limits<float>::max();
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(numbers[i])) continue;
    numbers[i] = std::clamp(numbers[i], -largest * scale, largest * scale) / scale;
  }
}

}  // namespace

struct Compute::Visit {
  std::int64_t unit, index;  // the index among the visits of the phase
  Range keys;
  const float *k, *v;  // (keys, line)
  bool finite;
  float *dk, *dv;  // backward: where its gradients are summed
  bool sums;       // backward: P is only summed
};

struct Compute::Step {
  std::int64_t head, item, at_item;  // head in the call; at_item: the item's index in its grid row
  Range chunk, rows, keys;           // the query chunk, and the step's part of it and of the key chunk
  const MaskGroup* mask;
  std::int64_t first_row;  // of the tile's gathered rows; rows and chunk are of its first item, if there are several
  bool partial;
};

bool Compute::load_rows(const Tile& tile, std::int64_t from, std::int64_t rows, std::int64_t channels,
                        std::int64_t line, float* to) const {
  const char* const bytes = tile.arena.at(from);
  if (line == channels) return widen(half(), bytes, rows * channels, to);
  bool finite = true;
  for (std::int64_t row = 0; row < rows; ++row) {
    finite &= widen(half(), bytes + row * channels * call_.element, channels, to + row * line);
    std::fill(to + row * line + channels, to + (row + 1) * line, 0.0f);
  }
  return finite;
}

const float* Compute::transposed(const float* rows, std::int64_t line, std::int64_t keys, std::int64_t channels,
                                 Buffer& buffer) {
  const auto width = line_of(keys);
  float* const to = buffer.of(channels * width);
  constexpr std::int64_t block = 16;
  for (std::int64_t key = 0; key < width; key += block)
    for (std::int64_t channel = 0; channel < channels; ++channel)
      for (std::int64_t j = key; j < key + block; ++j)
        to[channel * width + j] = j < keys ? rows[j * line + channel] : 0.0f;
  return to;
}

/// Bit j of row r: does query rows.first + r see key keys.first + j?
void Compute::find_words(const MaskGroup& mask, Range rows, Range keys, std::int64_t word_line) {
  words_.assign(rows.size() * word_line, 0);
  for (auto block = call_.keys.block_of(keys.first); call_.keys.start(block) < keys.end; ++block) {
    const Range part{std::max(keys.first, call_.keys.start(block)), std::min(keys.end, call_.keys.start(block + 1))};
    const auto box = call_.keys.box(block);
    if (!rules::inside(box.origin, mask.program.k_size())) continue;
    rules::WordsOfKeys words(mask.program, box);
    // Entries without padding between them are neighbours in the word.
    const int first = call_.keys.entry(part.first), last = call_.keys.entry(part.end - 1);
    const bool together = last - first == part.size() - 1;
    const auto kept = part.size() == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << part.size()) - 1;
    const auto to = part.first - keys.first;
    for (std::int64_t row = 0; row < rows.size(); ++row) {
      const auto seen = words(call_.queries.coordinate(rows.first + row));
      std::uint64_t bits = 0;
      if (together) bits = seen >> first & kept;
      else
        for (std::int64_t j = 0; j < part.size(); ++j) bits |= (seen >> call_.keys.entry(part.first + j) & 1) << j;
      auto* const word = &words_[row * word_line + to / 64];
      word[0] |= bits << to % 64;
      if (to % 64 != 0 && to % 64 + part.size() > 64) word[1] |= bits >> (64 - to % 64);
    }
  }
}

void Compute::all_words(const StepShape& shape) {
  words_.assign(shape.rows * shape.word_line, ~std::uint64_t{0});
  if (shape.columns % 64 == 0) return;
  for (std::int64_t row = 0; row < shape.rows; ++row)
    words_[row * shape.word_line + shape.columns / 64] = (std::uint64_t{1} << shape.columns % 64) - 1;
}

/// Counted from the first key's, so that they are small where distances are.
void Compute::find_coordinates(const MaskGroup& mask, Range rows, Range keys, std::int64_t line) {
  const auto& program = mask.program;
  query_coordinates_.assign(rows.size() * 3, 0);
  key_coordinates_.assign(3 * line, 0);
  const auto inside = [&](std::int64_t key) { return rules::inside(call_.keys.coordinate(key), program.k_size()); };
  if (!inside(keys.first)) return;
  const auto origin = rules::key_coordinate(program, call_.keys.coordinate(keys.first));
  for (auto key = keys.first; key < keys.end; ++key) {
    if (!inside(key)) continue;
    const auto at = rules::key_coordinate(program, call_.keys.coordinate(key));
    for (int i = 0; i < 3; ++i) key_coordinates_[i * line + key - keys.first] = float(at[i] - origin[i]);
  }
  for (auto row = rows.first; row < rows.end; ++row) {
    const auto at = rules::query_coordinate(program, call_.queries.coordinate(row));
    for (int i = 0; i < 3; ++i) query_coordinates_[(row - rows.first) * 3 + i] = float(at[i] - origin[i]);
  }
}

bool Compute::sees_a_key(const MaskGroup& mask, std::int64_t position) const {
  const auto& [start, runs] = mask.keys_of_query_block;
  const auto block = call_.queries.block_of(position);
  const auto query = call_.queries.coordinate(position);
  for (auto i = start[block]; i < start[block + 1]; ++i)
    for (auto key = runs[i].first; key < runs[i].first + runs[i].count; ++key)
      if (runs[i].kind == TileClass::full || rules::word(mask.program, query, call_.keys.box(key))) return true;
  return false;
}

void Compute::begin(Tile& tile) {
  const auto rows = tile.sizes.query_rows;
  const auto line = call_.backward ? call_.line_qk : call_.line_v;
  std::fill_n(tile.arena.floats(tile.wave.accumulators), rows * line, 0.0f);
  if (!call_.backward) {
    std::fill_n(tile.arena.floats(tile.wave.row_max), rows, -infinity);
    std::fill_n(tile.arena.floats(tile.wave.row_sum), rows, 0.0f);
  } else {
    std::fill_n(tile.arena.floats(tile.wave.dk), tile.sizes.home_keys * call_.line_qk, 0.0f);
    std::fill_n(tile.arena.floats(tile.wave.dv), tile.sizes.home_keys * call_.line_v, 0.0f);
    if (call_.lse_remainders) std::fill_n(sums_of(tile, tile.column), rows, 0.0);
  }
}

void Compute::row_sums(Tile& tile) {
  const auto rows = tile.home.query_rows;
  float* const lse = tile.arena.floats(tile.home.statistics);
  float* const delta = lse + rows;
  for (std::size_t i = 0; i < tile.home_item_start.size(); ++i) {
    const auto first = tile.home_item_start[i];
    const auto count = (i + 1 < tile.home_item_start.size() ? tile.home_item_start[i + 1] : rows) - first;
    float* const out = q_.of(std::max<std::int64_t>(count, 1) * call_.line_v);
    load_rows(tile, tile.home.out + first * call_.d_v * call_.element, count, call_.d_v, call_.line_v, out);
    float* const dout = dout_.of(std::max<std::int64_t>(count, 1) * call_.line_v);
    load_rows(tile, tile.home.dout + first * call_.d_v * call_.element, count, call_.d_v, call_.line_v, dout);
    row_dots(count, call_.d_v, dout, out, call_.line_v, delta + first);
    for (auto row = first; row < first + count; ++row) {
      if (lse[row] != -infinity) continue;
      // No P but 0, whatever the scores; and whatever dout is.
      std::fill_n(tile.arena.at(tile.home.dout + row * call_.d_v * call_.element), call_.d_v * call_.element, char{0});
      for (std::int64_t n = 0; n < call_.statistics; ++n) lse[n * rows + row] = 0;
    }
  }
  tile.compute += cost_.row_sums(rows);
}

void Compute::keys(Tile& tile, std::int64_t unit, const Schedule& schedule, std::int64_t phase, bool sums) {
  const auto& chunks = schedule.tiles[tile.row * mapping_.columns + tile.column].chunks[phase];
  const auto e = call_.element;
  tile.bias_parts.clear();
  for (std::size_t n = 0; n < chunks.size(); ++n) {
    Visit visit{};
    visit.unit = unit, visit.index = std::int64_t(n);
    visit.keys = call_.key_chunk(mapping_, chunks[n]), visit.sums = sums;
    const auto size = visit.keys.size();
    auto k = chunk_at(tile, phase, visit.index), v = k + size * call_.d_qk * e;
    const auto start = tile.home_chunk_start[chunks[n] / mapping_.columns];
    if (mapping_.rows == 1) k = tile.home.k + start * call_.d_qk * e, v = tile.home.v + start * call_.d_v * e;
    float *const k_to = k_.of(size * call_.line_qk), *const v_to = v_.of(size * call_.line_v);
    visit.finite = load_rows(tile, k, size, call_.d_qk, call_.line_qk, k_to);
    visit.finite &= load_rows(tile, v, size, call_.d_v, call_.line_v, v_to);
    if (tile.value_scale != 1)
      for (std::int64_t x = 0; x < size * call_.line_v; ++x) v_to[x] *= tile.value_scale;
    visit.k = k_to, visit.v = v_to;
    if (call_.backward && mapping_.rows == 1 && !sums) {
      visit.dk = tile.arena.floats(tile.wave.dk) + start * call_.line_qk;
      visit.dv = tile.arena.floats(tile.wave.dv) + start * call_.line_v;
    } else if (call_.backward && !sums) {
      visit.dk = tile.arena.floats(partial_at(tile, phase, visit.index));
      visit.dv = visit.dk + size * call_.line_qk;
      std::fill_n(visit.dk, size * (call_.line_qk + call_.line_v), 0.0f);
    }
    const auto& items = schedule.items[tile.row];
    Step joined{};  // of items that see the whole chunk
    const auto flush = [&] {
      if (joined.rows.size() > 0) this->step(tile, visit, joined);
      joined.rows = {};
    };
    for (std::size_t i = 0; i < items.size(); ++i) {
      Step step{};
      const auto in_unit = items[i] / mapping_.query_chunks;
      step.head = call_.head_of(unit, in_unit), step.item = items[i], step.at_item = std::int64_t(i);
      step.chunk = call_.query_chunk(mapping_, items[i]);
      step.mask = &call_.mask(unit, in_unit);
      steps_.of(*step.mask, step.chunk, visit.keys, [&](Range rows, Range keys, bool partial) {
        step.rows = rows, step.keys = keys, step.partial = partial;
        step.first_row = tile.item_start[i] + rows.first - step.chunk.first;
        if (partial || rows != step.chunk || keys != visit.keys) return this->step(tile, visit, step);
        const auto size = joined.rows.size();
        if (size > 0 && joined.head == step.head && joined.first_row + size == step.first_row &&
            size + rows.size() <= schedule.step_rows) {
          joined.rows.end += rows.size();
          return;
        }
        flush();
        joined = step;
      });
    }
    flush();
    if (!call_.backward || mapping_.rows == 1 || sums) continue;
    // The rows that this tile owns stay here.
    const auto own = call_.key_home(mapping_, chunks[n], tile.row);
    float *const dk = tile.arena.floats(tile.wave.dk) + start * call_.line_qk, *const dv =
                                                                                   tile.arena.floats(tile.wave.dv) +
                                                                                   start * call_.line_v;
    for (std::int64_t x = 0; x < own.size() * call_.line_qk; ++x) dk[x] += visit.dk[own.first * call_.line_qk + x];
    for (std::int64_t x = 0; x < own.size() * call_.line_v; ++x) dv[x] += visit.dv[own.first * call_.line_v + x];
  }
}

void Compute::step(Tile& tile, const Visit& visit, const Step& step) {
  StepShape shape;
  shape.rows = step.rows.size(), shape.columns = step.keys.size();
  shape.line = line_of(shape.columns);
  double pairs = double(shape.rows) * double(shape.columns);
  if (step.partial || shape.line != shape.columns) {
    shape.word_line = (shape.line + 63) / 64;
    if (step.partial) find_words(*step.mask, step.rows, step.keys, shape.word_line);
    else all_words(shape);
    shape.words = words_.data();
    pairs = 0;
    for (const auto word : words_) pairs += std::popcount(word);
  }
  if (visit.sums) {
    sum_step(tile, visit, step, shape);
    tile.compute += cost_.sum_step(shape.rows, shape.columns, step.partial);
    return;
  }
  call_.backward ? backward_step(tile, visit, step, shape) : forward_step(tile, visit, step, shape);
  tile.pairs += pairs;
  tile.compute += cost_.step(shape.rows, shape.columns, step.partial);
}

void Compute::sum_step(Tile& tile, const Visit& visit, const Step& step, const StepShape& shape) {
  load_rows(tile, tile.wave.q + step.first_row * call_.d_qk * call_.element, shape.rows, call_.d_qk, call_.line_qk,
            q_.of(shape.rows * call_.line_qk));
  scores(tile, visit, step, shape, nullptr);
  sum_probabilities(shape, tile.arena.floats(tile.wave.statistics) + step.first_row,
                    tile.arena.floats(tile.keys.scores), sums_of(tile, tile.column) + step.first_row);
}

double* Compute::sums_of(const Tile& tile, std::int64_t column) {
  return reinterpret_cast<double*>(tile.arena.at(tile.wave.sums)) + column * tile.sizes.query_rows;
}

/// log(sum) is the rest if it is small enough to be a rounding error of lse. A larger one means that lse covers more keys
/// than this call has: then lse is right.
void Compute::find_lse_remainders(Tile& tile, std::int64_t unit, const Schedule& schedule) {
  const float* const lse = tile.arena.floats(tile.wave.statistics);
  float* const lse_remainders = tile.arena.floats(tile.wave.lse_remainders);
  const auto& items = schedule.items[tile.row];
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto head = call_.head_of(unit, items[i] / mapping_.query_chunks);
    const auto end = i + 1 < items.size() ? tile.item_start[i + 1] : tile.sizes.query_rows;
    for (auto row = tile.item_start[i]; row < end; ++row) {
      lse_remainders[row] = 0;
      const float size = std::abs(lse[row]);
      if (!(size >= Call::large_lse && size < infinity)) continue;
      double sum = 0;
      for (std::int64_t column = 0; column < mapping_.columns; ++column) sum += sums_of(tile, column)[row];
      if (call_.problem.sink.given())
        sum += std::exp(cpu::ReadHeadNumber(call_.problem.sink, call_.batch_of(unit), head) - double(lse[row]));
      const double rest = std::log(sum), step = double(std::nextafter(size, infinity)) - double(size);
      if (std::abs(rest) <= 0.75 * step) lse_remainders[row] = float(rest);
    }
  }
  tile.compute += cost_.lse_remainders(tile.sizes.query_rows, mapping_.columns);
}

/// Scores of a step, in the tile's memory. The queries are in q_.
void Compute::scores(Tile& tile, const Visit& visit, const Step& step, const StepShape& shape, float* slopes) {
  float* const s = tile.arena.floats(tile.keys.scores);
  const auto from_key = step.keys.first - visit.keys.first;
  const float* const kt = transposed(visit.k + from_key * call_.line_qk, call_.line_qk, shape.columns, call_.d_qk, kt_);
  multiply(false, shape.rows, call_.d_qk, shape.line, q_.of(1), call_.line_qk, 1, kt, shape.line, s, shape.line);
  const auto& problem = call_.problem;
  ScoreTerms terms;
  terms.scale = float(problem.scale), terms.cap = float(problem.softcap);
  terms.slopes = slopes;
  if (problem.bias.given()) {
    terms.bias_line = bias_line(tile);
    terms.bias = tile.arena.floats(bias_at(tile, visit.index, step.at_item)) +
                 (step.rows.first - step.chunk.first) * terms.bias_line + from_key;
  }
  if (problem.alibi.given()) {
    find_coordinates(*step.mask, step.rows, step.keys, shape.line);
    terms.alibi = float(cpu::ReadHeadNumber(problem.alibi, call_.batch_of(visit.unit), step.head));
    terms.dimensions = problem.dimensions;
    terms.queries = query_coordinates_.data(), terms.keys = key_coordinates_.data();
  }
  finish_scores(shape, terms, s);
}

void Compute::forward_step(Tile& tile, const Visit& visit, const Step& step, const StepShape& shape) {
  load_rows(tile, tile.wave.q + step.first_row * call_.d_qk * call_.element, shape.rows, call_.d_qk, call_.line_qk,
            q_.of(shape.rows * call_.line_qk));
  scores(tile, visit, step, shape, nullptr);
  float* const s = tile.arena.floats(tile.keys.scores);
  float* const to = tile.arena.floats(tile.wave.accumulators) + step.first_row * call_.line_v;
  online_softmax(shape, half(), s, tile.arena.floats(tile.wave.row_max) + step.first_row,
                 tile.arena.floats(tile.wave.row_sum) + step.first_row, to, call_.line_v);
  const float* const v = visit.v + (step.keys.first - visit.keys.first) * call_.line_v;
  add_product(shape, step.partial && !visit.finite, false, s, v, call_.line_v, to);
}

/// C += A B, or for rows of keys C += A^T B. non_finite: B holds numbers that are not finite, and hidden pairs must
/// not see them. Then B's rows that hold such numbers count as zeros, and are added for their visible pairs only. So
/// results that do not depend on them keep their bits.
void Compute::add_product(const StepShape& shape, bool non_finite, bool of_keys, const float* a, const float* b,
                          std::int64_t line, float* c) {
  const auto depth = of_keys ? shape.rows : shape.columns;
  const float* factor = b;
  bad_.clear();
  if (non_finite) {
    float* const clean = clean_.of(depth * line);
    std::copy_n(b, depth * line, clean);
    for (std::int64_t row = 0; row < depth; ++row) {
      const auto* const numbers = b + row * line;
      if (std::all_of(numbers, numbers + line, [](float x) { return std::isfinite(x); })) continue;
      std::fill_n(clean + row * line, line, 0.0f);
      bad_.push_back(row);
    }
    factor = clean;
  }
  if (of_keys) multiply(true, shape.columns, shape.rows, line, a, 1, shape.line, factor, line, c, line);
  else multiply(true, shape.rows, shape.columns, line, a, shape.line, 1, factor, line, c, line);
  for (const auto bad : bad_)
    for (std::int64_t i = 0; i < (of_keys ? shape.columns : shape.rows); ++i) {
      const auto row = of_keys ? bad : i, column = of_keys ? i : bad;
      if ((shape.words[row * shape.word_line + column / 64] >> column % 64 & 1) == 0) continue;
      const float weight = a[row * shape.line + column];
      for (std::int64_t x = 0; x < line; ++x) c[i * line + x] += weight * b[bad * line + x];
    }
}

void Compute::backward_step(Tile& tile, const Visit& visit, const Step& step, const StepShape& shape) {
  const auto e = call_.element, rows = shape.rows, line_qk = call_.line_qk, line_v = call_.line_v;
  float *const q = q_.of(rows * line_qk), *const dout = dout_.of(rows * line_v);
  bool finite = visit.finite;
  finite &= load_rows(tile, tile.wave.q + step.first_row * call_.d_qk * e, rows, call_.d_qk, line_qk, q);
  finite &= load_rows(tile, tile.wave.dout + step.first_row * call_.d_v * e, rows, call_.d_v, line_v, dout);
  float* const slopes = tile.keys.slopes >= 0 ? tile.arena.floats(tile.keys.slopes) : nullptr;
  scores(tile, visit, step, shape, slopes);
  float *const s = tile.arena.floats(tile.keys.scores), *const ds = tile.arena.floats(tile.keys.dscores);
  const auto from_key = step.keys.first - visit.keys.first;
  const float* const vt = transposed(visit.v + from_key * line_v, line_v, shape.columns, call_.d_v, vt_);
  multiply(false, rows, call_.d_v, shape.line, dout, line_v, 1, vt, shape.line, ds, shape.line);
  const float* const lse = tile.arena.floats(tile.wave.statistics) + step.first_row;
  GradientTerms terms;
  terms.lse = lse, terms.delta = lse + tile.sizes.query_rows;
  if (call_.statistics > 2) terms.dlse = terms.delta + tile.sizes.query_rows;
  if (call_.lse_remainders) {
    terms.lse_remainders = tile.arena.floats(tile.wave.lse_remainders) + step.first_row;
  } else {
    lse_remainders_.assign(rows, 0.0f);
    terms.lse_remainders = lse_remainders_.data();
  }
  terms.slopes = slopes;
  terms.gradient = float(call_.problem.scale);
  if (call_.problem.dbias.given()) {  // dS takes the place of the bias
    const auto line = bias_line(tile);
    const auto offset =
        bias_at(tile, visit.index, step.at_item) + ((step.rows.first - step.chunk.first) * line + from_key) * 4;
    terms.dbias = tile.arena.floats(offset), terms.dbias_line = line;
    tile.bias_parts.push_back({step.item, step.rows, step.keys, offset, line});
  }
  differentiate(shape, half(), terms, s, ds);
  float *const dv = visit.dv + from_key * line_v, *const dk = visit.dk + from_key * line_qk;
  float* const dq = tile.arena.floats(tile.wave.accumulators) + step.first_row * line_qk;
  const float* const k = visit.k + from_key * line_qk;
  const bool non_finite = step.partial && !finite;
  add_product(shape, non_finite, true, s, dout, line_v, dv);
  add_product(shape, non_finite, true, ds, q, line_qk, dk);
  add_product(shape, non_finite, false, ds, k, line_qk, dq);
}

void Compute::add_incoming(Tile& tile, const Schedule& schedule, std::int64_t phase) {
  const float* from = tile.arena.floats(tile.keys.incoming);
  std::int64_t rows = 0;
  for (std::int64_t sender = 0; sender < mapping_.rows; ++sender) {
    if (sender == tile.row) continue;
    for (const auto chunk : schedule.tiles[sender * mapping_.columns + tile.column].chunks[phase]) {
      const auto own = call_.key_home(mapping_, chunk, tile.row).size();
      const auto start = tile.home_chunk_start[chunk / mapping_.columns];
      float* const dk = tile.arena.floats(tile.wave.dk) + start * call_.line_qk;
      for (std::int64_t row = 0; row < own; ++row, from += call_.d_qk)
        for (std::int64_t c = 0; c < call_.d_qk; ++c) dk[row * call_.line_qk + c] += from[c];
      float* const dv = tile.arena.floats(tile.wave.dv) + start * call_.line_v;
      for (std::int64_t row = 0; row < own; ++row, from += call_.d_v)
        for (std::int64_t c = 0; c < call_.d_v; ++c) dv[row * call_.line_v + c] += from[c];
      rows += own;
    }
  }
  tile.compute += cost_.add_keys(rows);
}

/// Partial results of the other columns' tiles are in the reduction's memory, by column.
void Compute::combine(Tile& tile) {
  const auto rows = tile.home.query_rows;
  const auto channels = call_.backward ? call_.d_qk : call_.d_v, line = line_of(channels);
  const float* from = tile.arena.floats(tile.reduction);
  for (std::int64_t column = 0; column < mapping_.columns; ++column) {
    if (column == tile.column) continue;
    for (std::size_t i = 0, row = 0; i < tile.item_start.size(); ++i) {
      const auto end = i + 1 < tile.item_start.size() ? tile.home_item_start[i + 1] : rows;
      for (; std::int64_t(row) < end; ++row) {
        // The rows at home of an item are a part of its gathered rows.
        const auto at = tile.item_start[i] + tile.home_in_item[i] + std::int64_t(row) - tile.home_item_start[i];
        float* const to = tile.arena.floats(tile.wave.accumulators) + at * line;
        const float* const numbers = from + std::int64_t(row) * channels;
        if (call_.backward) {
          for (std::int64_t c = 0; c < channels; ++c) to[c] += numbers[c];
          continue;
        }
        auto &row_max = tile.arena.floats(tile.wave.row_max)[at], &row_sum = tile.arena.floats(tile.wave.row_sum)[at];
        const float other_max = from[rows * channels + std::int64_t(row)];
        const float other_sum = from[rows * (channels + 1) + std::int64_t(row)];
        const float most = std::max(row_max, other_max);
        const float own = row_max == most ? 1.0f : std::exp(row_max - most);
        const float other = other_max == most ? 1.0f : std::exp(other_max - most);
        row_sum = row_sum * own + other_sum * other;
        row_max = most;
        for (std::int64_t c = 0; c < channels; ++c) to[c] = to[c] * own + numbers[c] * other;
      }
    }
    from += rows * call_.partial_query_bytes() / 4;
  }
  tile.compute += cost_.combine(rows, mapping_.columns) - cost_.finish_rows(rows);
}

void Compute::finish_rows(Tile& tile, std::int64_t unit, const Schedule& schedule) {
  const auto rows = tile.home.query_rows;
  const auto channels = call_.backward ? call_.d_qk : call_.d_v, line = line_of(channels);
  const auto to = call_.backward ? tile.home.dq : tile.home.out;
  const auto& items = schedule.items[tile.row];
  const bool sinks = call_.problem.sink.given();
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto end = i + 1 < items.size() ? tile.home_item_start[i + 1] : rows;
    const auto in_unit = items[i] / mapping_.query_chunks;
    for (auto row = tile.home_item_start[i]; row < end; ++row) {
      const auto in_item = tile.home_in_item[i] + row - tile.home_item_start[i];
      const auto at = tile.item_start[i] + in_item;
      float* const numbers = tile.arena.floats(tile.wave.accumulators) + at * line;
      if (!call_.backward) {
        float row_max = tile.arena.floats(tile.wave.row_max)[at], row_sum = tile.arena.floats(tile.wave.row_sum)[at];
        if (sinks && (row_sum != 0 ||
                      sees_a_key(call_.mask(unit, in_unit), call_.query_chunk(mapping_, items[i]).first + in_item))) {
          const auto sink =
              float(cpu::ReadHeadNumber(call_.problem.sink, call_.batch_of(unit), call_.head_of(unit, in_unit)));
          const float together = std::max(row_max, sink);
          if (together != -infinity || sink != sink) {
            const float factor = std::exp(row_max - together);
            for (std::int64_t c = 0; factor != 1 && c < channels; ++c) numbers[c] *= factor;
            row_sum = row_sum * factor + std::exp(sink - together);
            row_max = together;
          }
        }
        if (row_sum == 0) row_max = -infinity;
        if (row_sum != row_sum && row_max != infinity) row_max = row_sum;
        for (std::int64_t c = 0; c < channels; ++c) numbers[c] = row_sum == 0 ? 0.0f : numbers[c] / row_sum;
        if (tile.value_scale != 1) unscale(numbers, channels, tile.value_scale);
        float* const statistics = tile.arena.floats(tile.home.statistics);
        statistics[row] = row_sum == 0 ? -infinity : row_max + std::log(row_sum);
        if (call_.statistics > 1) statistics[rows + row] = row_max, statistics[2 * rows + row] = row_sum;
      }
      if (call_.problem.dsink.given()) {  // -P (delta - dlse)
        const float* const lse = tile.arena.floats(tile.wave.statistics) + at;
        const auto sink = cpu::ReadHeadNumber(call_.problem.sink, call_.batch_of(unit), call_.head_of(unit, in_unit));
        const double rest = call_.lse_remainders ? tile.arena.floats(tile.wave.lse_remainders)[at] : 0;
        const double dlse = call_.statistics > 2 ? lse[2 * tile.sizes.query_rows] : 0;
        tile.dsink[in_unit] -= std::exp(sink - double(lse[0]) - rest) * (double(lse[tile.sizes.query_rows]) - dlse);
      }
      narrow(half(), numbers, channels, tile.arena.at(to + row * channels * call_.element), !call_.backward);
    }
  }
  tile.compute += cost_.finish_rows(rows);
}

void Compute::finish_keys(Tile& tile) {
  const auto keys = tile.home.key_rows, e = call_.element;
  for (std::int64_t key = 0; key < keys; ++key) {
    narrow(half(), tile.arena.floats(tile.wave.dk) + key * call_.line_qk, call_.d_qk,
           tile.arena.at(tile.home.dk + key * call_.d_qk * e), false);
    narrow(half(), tile.arena.floats(tile.wave.dv) + key * call_.line_v, call_.d_v,
           tile.arena.at(tile.home.dv + key * call_.d_v * e), false);
  }
  tile.compute += cost_.finish_keys(keys);
}

}  // namespace anyflash::simulator
