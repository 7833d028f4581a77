// What calls on the tile machine report.
#pragma once

#include <anyflash/tile_machine.h>

#include <nlohmann/json_fwd.hpp>

namespace anyflash::cli {

/// A line of figures: cycles by kind, bytes, memory, utilisation.
void print_tiles(const TileReport& report);
/// The mapping and the phases too.
void print_mapping(const TileReport& report);
nlohmann::ordered_json tiles_json(const TileReport& report);

}  // namespace anyflash::cli
