// The machine that calls use.
#pragma once

#include <anyflash/tile_machine.h>

namespace anyflash::simulator {

struct UsedMachine {
  TileMachine machine;
  TileChoice choice;
};
UsedMachine used_machine();

/// Throws Error, naming the member, if a number is absurd.
void check_machine(const TileMachine& machine);

}  // namespace anyflash::simulator
