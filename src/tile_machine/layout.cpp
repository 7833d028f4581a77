#include "tile_machine/layout.h"

namespace anyflash::simulator {

std::vector<std::int64_t> incoming_rows(const Call& call, const Mapping& mapping, const Schedule& schedule,
                                        std::int64_t phase) {
  std::vector<std::int64_t> incoming(mapping.tiles_each(), 0);
  if (!call.backward || mapping.rows == 1) return incoming;
  std::vector<std::int64_t> met(mapping.key_chunks, 0);  // by how many tiles of the column
  std::vector<std::int32_t> chunks;
  for (std::int64_t column = 0; column < mapping.columns; ++column) {
    chunks.clear();
    for (auto tile = column; tile < mapping.tiles_each(); tile += mapping.columns)
      for (const auto chunk : schedule.tiles[tile].chunks[phase])
        if (met[chunk]++ == 0) chunks.push_back(chunk);
    for (std::int64_t row = 0; row < mapping.rows; ++row) {
      auto& rows = incoming[row * mapping.columns + column];
      const auto home = [&](std::int64_t chunk) { return call.key_home(mapping, chunk, row).size(); };
      for (const auto chunk : chunks) rows += met[chunk] * home(chunk);
      for (const auto chunk : schedule.tiles[row * mapping.columns + column].chunks[phase]) rows -= home(chunk);
    }
    for (const auto chunk : chunks) met[chunk] = 0;
  }
  return incoming;
}

std::vector<TileSizes> sizes_of(const Call& call, const Mapping& mapping, const Schedule& schedule) {
  std::vector<TileSizes> all(mapping.tiles_each());
  for (std::int64_t local = 0; local < mapping.tiles_each(); ++local) {
    const auto row = local / mapping.columns, column = local % mapping.columns;
    auto& sizes = all[local];
    sizes.query_rows = schedule.query_rows[row];
    sizes.items = std::int64_t(schedule.items[row].size());
    for (const auto item : schedule.items[row])
      sizes.home_rows += part_of(call.query_chunk(mapping, item).size(), mapping.columns, column).size();
    for (auto chunk = column; chunk < mapping.key_chunks; chunk += mapping.columns)
      sizes.home_keys += call.key_home(mapping, chunk, row).size();
    sizes.chunk_rows = (call.queries.entries() + mapping.query_chunks - 1) / mapping.query_chunks;
    sizes.key_chunk_rows = (call.keys.entries() + mapping.key_chunks - 1) / mapping.key_chunks;
  }
  for (std::int64_t phase = 0; call.backward && mapping.rows > 1 && phase < schedule.phases; ++phase) {
    const auto incoming = incoming_rows(call, mapping, schedule, phase);
    for (std::size_t local = 0; local < all.size(); ++local)
      all[local].incoming_keys = std::max(all[local].incoming_keys, incoming[local]);
  }
  return all;
}

}  // namespace anyflash::simulator
