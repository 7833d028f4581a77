#include "tile_machine/layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace anyflash::simulator {

IncomingRows incoming_rows(const Call& call, const Mapping& mapping, const Schedule& schedule) {
  IncomingRows incoming(schedule.phases);
  if (!call.backward || mapping.rows == 1) return incoming;
  const KeyHomes homes(call, mapping);
  std::vector<std::int64_t> met(mapping.key_chunks, 0);  // by how many tiles of the column in this phase
  std::vector<std::int32_t> chunks;
  std::vector<std::int64_t> steps(mapping.rows + 1);
  for (std::int64_t phase = 0; phase < schedule.phases; ++phase) {
    auto& rows = incoming[phase];
    rows.resize(mapping.tiles_each());
    for (std::int64_t column = 0; column < mapping.columns; ++column) {
      chunks.clear();
      for (auto tile = column; tile < mapping.tiles_each(); tile += mapping.columns)
        for (const auto chunk : schedule.tiles[tile].chunks[phase])
          if (met[chunk]++ == 0) chunks.push_back(chunk);
      std::fill(steps.begin(), steps.end(), 0);
      for (const auto chunk : chunks) homes.add(chunk, std::exchange(met[chunk], 0), steps);
      std::int64_t of_row = 0;
      for (std::int64_t row = 0; row < mapping.rows; ++row) {
        auto& own = rows[row * mapping.columns + column];
        own = of_row += steps[row];
        for (const auto chunk : schedule.tiles[row * mapping.columns + column].chunks[phase])
          own -= homes.of(chunk, row);
      }
    }
  }
  return incoming;
}

std::int64_t typical_bytes(const Call& call, const Mapping& m, const TileSizes& sizes) {
  Bytes homes;
  const auto offsets = lay_homes(homes, call, sizes);
  Bytes all(homes.used() * (call.resident() ? m.waves : std::min<std::int64_t>(m.waves, call.machine.overlap ? 2 : 1)));
  lay_wave(all, call, m, sizes, offsets);
  Bytes keys, reduction;
  lay_keys(keys, call, m, sizes);
  if (m.columns > 1) lay_reduction(reduction, call, m, sizes);
  return all.used() + std::max(keys.used(), reduction.used());
}

TileSizes typical_sizes(const Call& call, const Mapping& m) {
  const auto ceil = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  TileSizes sizes{};
  sizes.items = ceil(m.query_chunks * call.heads_each, m.rows);
  sizes.chunk_rows = ceil(call.queries.entries(), m.query_chunks);
  sizes.key_chunk_rows = ceil(call.keys.entries(), m.key_chunks);
  sizes.query_rows = ceil(call.queries.entries() * sizes.items, m.query_chunks);
  sizes.home_rows = ceil(sizes.query_rows, m.columns);
  sizes.home_keys = ceil(call.keys.entries(), m.columns * m.rows);
  sizes.incoming_keys = call.backward && m.rows > 1 ? m.in_flight * sizes.key_chunk_rows : 0;
  sizes.step_rows = sizes.chunk_rows;
  // Tiles differ a little: a part of the memory stays free.
  const auto free = call.memory() - typical_bytes(call, m, sizes) * 21 / 20;
  const auto row = line_of(sizes.key_chunk_rows) * 4 * (call.backward ? 3 : 1);
  const auto worthwhile =
      std::min(Cost(call).worthwhile_rows(sizes.chunk_rows, sizes.key_chunk_rows), sizes.query_rows);
  if (free > 0) sizes.step_rows = std::clamp(worthwhile, sizes.chunk_rows, sizes.chunk_rows + free / row);
  return sizes;
}

MostKeys most_keys(const Call& call, const Mapping& m) {
  MostKeys keys;
  const KeyHomes homes(call, m);
  const auto rounds = m.rounds();
  std::vector<std::int64_t> of_rows(m.rows + 1), chunks;
  const auto most = [&] {  // of what was added to of_rows, which is then empty
    std::int64_t largest = 0, own = 0;
    for (std::int64_t row = 0; row < m.rows; ++row) largest = std::max(largest, own += of_rows[row]);
    std::fill(of_rows.begin(), of_rows.end(), 0);
    return largest;
  };
  for (std::int64_t column = 0; column < m.columns; ++column) {
    chunks.clear();
    m.chunks_of(column, [&](std::int64_t chunk) { chunks.push_back(chunk); });
    for (const auto chunk : chunks) homes.add(chunk, 1, of_rows);
    keys.home = std::max(keys.home, most());
    for (std::int64_t first = 0; call.backward && m.rows > 1 && first < rounds; first += m.in_flight) {
      for (std::int64_t row = 0; row < m.rows; ++row)
        for (auto at = first; at < std::min(first + m.in_flight, rounds); ++at) {
          const auto round = (m.first_round(row) + at) % rounds;
          if (round < std::int64_t(chunks.size())) homes.add(chunks[round], 1, of_rows);
        }
      keys.incoming = std::max(keys.incoming, most());
    }
  }
  return keys;
}

std::int64_t largest_bytes(const Call& call, const Mapping& m, const MostKeys& keys) {
  const auto ceil = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const auto entries = call.queries.entries();
  TileSizes sizes{};
  sizes.items = ceil(m.query_chunks * call.heads_each, m.rows);
  sizes.chunk_rows = sizes.step_rows = ceil(entries, m.query_chunks);
  sizes.key_chunk_rows = ceil(call.keys.entries(), m.key_chunks);
  sizes.query_rows = sizes.items * (entries / m.query_chunks) +
                     std::min(sizes.items, entries % m.query_chunks * call.heads_each);  // of chunks with one row more
  sizes.home_rows = std::min(sizes.query_rows, sizes.items * ceil(sizes.chunk_rows, m.columns));
  sizes.home_keys = keys.home, sizes.incoming_keys = keys.incoming;
  return typical_bytes(call, m, sizes);
}

std::vector<TileSizes> sizes_of(const Call& call, const Mapping& mapping, const Schedule& schedule,
                                const IncomingRows& incoming) {
  std::vector<TileSizes> all(mapping.tiles_each());
  const KeyHomes homes(call, mapping);
  std::vector<std::vector<std::int64_t>> home_keys(mapping.columns, std::vector<std::int64_t>(mapping.rows + 1));
  mapping.each_chunk([&](std::int64_t chunk, std::int64_t column) { homes.add(chunk, 1, home_keys[column]); });
  for (auto& rows : home_keys) std::partial_sum(rows.begin(), rows.end(), rows.begin());
  for (std::int64_t local = 0; local < mapping.tiles_each(); ++local) {
    const auto row = local / mapping.columns, column = local % mapping.columns;
    auto& sizes = all[local];
    sizes.query_rows = schedule.query_rows[row];
    sizes.items = std::int64_t(schedule.items[row].size());
    for (const auto item : schedule.items[row])
      sizes.home_rows += part_of(call.query_chunk(mapping, item).size(), mapping.columns, column).size();
    sizes.home_keys = home_keys[column][row];
    sizes.chunk_rows = (call.queries.entries() + mapping.query_chunks - 1) / mapping.query_chunks;
    sizes.key_chunk_rows = (call.keys.entries() + mapping.key_chunks - 1) / mapping.key_chunks;
    sizes.step_rows = std::min(schedule.step_rows, std::max(sizes.query_rows, sizes.chunk_rows));
  }
  for (const auto& of_phase : incoming)
    for (std::size_t local = 0; local < of_phase.size(); ++local)
      all[local].incoming_keys = std::max(all[local].incoming_keys, of_phase[local]);
  return all;
}

}  // namespace anyflash::simulator
