// Machines: their files, and what is refused.
#include <gtest/gtest.h>

#include <fstream>

#include "calls.h"

namespace anyflash::testing {
namespace {

std::string line_of(const std::string& text) {
  try {
    parse_tile_machine(text, "file");
    return "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Error::Kind::value);
    return error.what();
  }
}

const std::string whole = "tiles = 4\nmemory_per_tile = 65536\nclock_hz = 1e9\n";

TEST(Machine, EveryOneThatComesWithTheLibrary) {
  const auto names = tile_machine_names();
  EXPECT_EQ(names, (std::vector<std::string>{"blackhole", "bow", "flatattention-32x32", "ipu-mk2"}));
  for (const auto& name : names) {
    const auto machine = tile_machine(name);
    EXPECT_EQ(machine.name, name);
    use_tile_machine(machine);
    EXPECT_EQ(used_tile_machine().name, name);
  }
  use_tile_machine(TileMachine{});
  EXPECT_EQ(tile_machine("ipu-mk2").tiles, TileMachine{}.tiles);
  EXPECT_EQ(tile_machine("ipu-mk2").memory_per_tile, TileMachine{}.memory_per_tile);
  EXPECT_EQ(tile_machine("bow").clock_hz, 1.85e9);
}

TEST(Machine, FromText) {
  const auto machine =
      parse_tile_machine("# a machine\n" + whole + "name = mine  # so\n overlap=true\r\n\nworkers = 2");
  EXPECT_EQ(machine.name, "mine");
  EXPECT_EQ(machine.tiles, 4);
  EXPECT_TRUE(machine.overlap);
  EXPECT_EQ(machine.workers, 2);
  EXPECT_EQ(machine.sync_cycles, 600);  // an IPU's
  const auto other = parse_tile_machine("tiles = 9", "text", &machine);
  EXPECT_EQ(other.tiles, 9);
  EXPECT_EQ(other.workers, 2);
}

TEST(Machine, FromAFile) {
  const auto path = ::testing::TempDir() + "small.machine";
  std::ofstream(path) << whole;
  EXPECT_EQ(tile_machine(path).tiles, 4);
  EXPECT_THROW(tile_machine(path + "x"), Error);
  std::ofstream(path) << "\xEF\xBB\xBF" << whole;
  EXPECT_EQ(tile_machine(path).tiles, 4);
  std::ofstream(path) << "";
  try {
    tile_machine(path);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("tiles: not given"), std::string::npos) << error.what();
  }
  EXPECT_THROW(read_tile_machine(::testing::TempDir()), Error);
  std::ofstream(path) << whole << "clok = 3\n";
  EXPECT_THROW(tile_machine(path), Error);
}

TEST(Machine, WrongFiles) {
  EXPECT_EQ(line_of("memory_per_tile = 1000\nclock_hz = 1"), "file: tiles: not given, expected a number");
  EXPECT_EQ(line_of(whole + "clok = 3"), "file: clok: no such key");
  EXPECT_EQ(line_of(whole + "tiles = 5"), "file: tiles: given twice");
  EXPECT_EQ(line_of(whole + "workers"), "file: workers: expected key = value");
  EXPECT_EQ(line_of(whole + "workers ="), "file: workers: no value, expected one after =");
  EXPECT_EQ(line_of(whole + "workers = six"), "file: workers: six, expected a number");
  EXPECT_EQ(line_of(whole + "workers = 1.5"), "file: workers: 1.5, expected a whole number");
  EXPECT_EQ(line_of(whole + "workers = 0"), "file: workers: 0, expected 1 to 65536");
  EXPECT_EQ(line_of(whole + "sync_cycles = -1"), "file: sync_cycles: -1, expected 0 to 1000000000");
  EXPECT_EQ(line_of(whole + "sync_cycles = nan"), "file: sync_cycles: nan, expected a number");
  EXPECT_EQ(line_of(whole + "overlap = maybe"), "file: overlap: maybe, expected true or false");
  EXPECT_EQ(line_of(whole + "reserved_per_tile = 65536"),
            "file: reserved_per_tile: 65536, expected less than the 65536 of memory_per_tile");
  EXPECT_EQ(line_of(whole + "mesh_rows = 3\nmesh_columns = 2"),
            "file: mesh_rows: a mesh of 3 x 2, expected 4 tiles as in tiles");
  EXPECT_EQ(line_of("tiles = 1e30\nmemory_per_tile = 1\nclock_hz = 1"), "file: tiles: 1e30, expected 1 to 65536");
  EXPECT_EQ(line_of("tiles = 1e999\nmemory_per_tile = 1\nclock_hz = 1"), "file: tiles: 1e999, expected 1 to 65536");
  EXPECT_EQ(line_of("tiles = 65537\nmemory_per_tile = 1\nclock_hz = 1"), "file: tiles: 65537, expected 1 to 65536");
  EXPECT_EQ(line_of("tiles = 1\nmemory_per_tile = 1073741825\nclock_hz = 1"),
            "file: memory_per_tile: 1073741825, expected 1 to 1073741824");
  EXPECT_EQ(line_of("tiles = 1\nmemory_per_tile = 1\nclock_hz = 1e13"), "file: clock_hz: 1e+13, expected 1 to 1e+12");
  EXPECT_EQ(line_of(""), "file: tiles: not given, expected a number");
}

TEST(Machine, Names) {
  const std::string expected = ", expected 1 to 64 letters, digits, spaces and -_.()";
  EXPECT_EQ(line_of(whole + "name = Mk_2 (half) 1.5-x"), "no error");
  EXPECT_EQ(line_of(whole + "name = a/b"), "file: name: a/b" + expected);
  EXPECT_NE(line_of(whole + "name = a\x01"), "no error");
  EXPECT_EQ(line_of(whole + "name = " + std::string(65, 'a')).substr(0, 12), "file: name: ");
  TileMachine machine;
  machine.name = "a\ntiles = 3";
  EXPECT_THROW(use_tile_machine(machine), Error);
  EXPECT_EQ(parse_tile_machine(whole, "/tmp/a+b.machine").name, "a-b.machine");
}

TEST(Machine, WrongNumbersInCode) {
  TileMachine machine;
  machine.tiles = 0;
  EXPECT_THROW(use_tile_machine(machine), Error);
  EXPECT_THROW(use_tile_machine(TileMachine{}, {.grid_rows = -1}), Error);
  EXPECT_EQ(used_tile_machine().tiles, 1472);
}

TEST(Machine, ProductsByTheClosedForm) {
  TileMachine machine;
  machine.unit_load_cycles = 10, machine.unit_rows = 2;
  // 2 x 3 blocks of 16 x 16; 5 rows count as 6.
  EXPECT_EQ(tile_product_cycles(machine, ElementType::float16, 5, 17, 48), 6 * (6 * 256 / 64.0 + 10));
  EXPECT_EQ(tile_product_cycles(machine, ElementType::float32, 5, 17, 48), 6 * (6 * 256 / 16.0 + 10));
  EXPECT_THROW(tile_product_cycles(machine, ElementType::float16, 5, -1, 48), Error);
  EXPECT_THROW(tile_step_cycles(machine, ElementType::float16, 5, 1, 48, -1), Error);
}

/// The line of a call that is refused. Its output stays as it was.
std::string line_of(TileCall& call, const TileChoice& choice = {}) {
  use_tile_machine(TileMachine{}, choice);
  call.draw();
  const auto before = call.out.bytes();
  std::string line = "no error";
  try {
    call.forward(false);
  } catch (const Error& error) {
    line = error.what();
  }
  EXPECT_EQ(call.out.bytes(), before);
  use_tile_machine(TileMachine{});
  return line;
}

TEST(WrongCall, ChunksThatDoNotDivide) {
  TileCall call;
  call.chunks_q = 3;
  EXPECT_EQ(line_of(call), "num_chunks_q: 3, expected a divisor of 16 queries: 1, 2, 4, 8, 16");
  call.chunks_q = 0, call.chunks_kv = 32;
  EXPECT_EQ(line_of(call), "num_chunks_kv: 32, expected a divisor of 16 keys: 1, 2, 4, 8, 16");
}

TEST(WrongCall, GridsThatAreTooLarge) {
  TileCall call;
  EXPECT_EQ(line_of(call, {.grid_rows = 100, .grid_columns = 100}), "grid: 100 x 100 tiles, the machine has 1472");
}

TEST(WrongCall, TypesAndDevices) {
  double numbers[64] = {};
  const auto line = [&](ElementType type, int index) -> std::string {
    const TensorView view(numbers, type, {1, 1, 4, 2}, Device{DeviceKind::tiles, index});
    auto out = view;
    out.data = numbers + 32;
    try {
      forward(view, view, view, {out, {}, {}, {}});
      return "no error";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_EQ(line(ElementType::float64, 0), "query: float64 on the tile machine, expected float16 or float32");
  EXPECT_EQ(line(ElementType::bfloat16, 0), "query: bfloat16 on the tile machine, expected float16 or float32");
  EXPECT_EQ(line(ElementType::float32, 1), "query: on tiles:1, expected tiles:0");
  EXPECT_EQ(line(ElementType::float32, 0), "no error");
}

}  // namespace
}  // namespace anyflash::testing
