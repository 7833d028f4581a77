// The machine that calls use.
#pragma once

#include <anyflash/tile_machine.h>

namespace anyflash::simulator {

struct UsedMachine {
  TileMachine machine;
  TileChoice choice;
};
UsedMachine used_machine();
/// The calling thread's, or null.
TileContext* tile_context();

/// Throws Error, naming the member, if a number is absurd.
void check_used(const TileMachine& machine, const TileChoice& choice);

}  // namespace anyflash::simulator
