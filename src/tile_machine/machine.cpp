// Machines: their files, and the one that calls use.
#include "tile_machine/machine.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <fstream>
#include <initializer_list>
#include <mutex>
#include <sstream>
#include <utility>

#include "tile_machine/machine_files.h"
#include "tile_machine/cost.h"

namespace anyflash {
namespace simulator {
namespace {

thread_local TileContext* context_of_thread = nullptr;

std::mutex used_mutex;
UsedMachine& used() {
  static auto& machine = *new UsedMachine;  // never destroyed: calls may come while the process ends
  return machine;
}

/// A member of TileMachine: its name in files, and the numbers that make sense.
template <typename Visit>
void for_each_number(TileMachine& machine, const Visit& visit) {
  constexpr double most = 1e15;
  visit("tiles", machine.tiles, 1, 1 << 16);
  visit("memory_per_tile", machine.memory_per_tile, 1, 1 << 30);
  visit("reserved_per_tile", machine.reserved_per_tile, 0, 1 << 30);
  visit("clock_hz", machine.clock_hz, 1, 1e12);
  visit("multiply_adds_float16", machine.multiply_adds_float16, 1e-3, 1e9);
  visit("multiply_adds_float32", machine.multiply_adds_float32, 1e-3, 1e9);
  visit("unit_rows", machine.unit_rows, 1, 1 << 16);
  visit("unit_columns", machine.unit_columns, 1, 1 << 16);
  visit("unit_depth", machine.unit_depth, 1, 1 << 16);
  visit("unit_load_cycles", machine.unit_load_cycles, 0, 1e9);
  visit("unit_start_cycles", machine.unit_start_cycles, 0, 1e9);
  visit("exp_per_cycle", machine.exp_per_cycle, 1e-3, 1e9);
  visit("vector_per_cycle", machine.vector_per_cycle, 1e-3, 1e9);
  visit("exp_per_cycle_float32", machine.exp_per_cycle_float32, 1e-3, 1e9);
  visit("vector_per_cycle_float32", machine.vector_per_cycle_float32, 1e-3, 1e9);
  visit("exchange_bytes_per_cycle", machine.exchange_bytes_per_cycle, 1e-3, 1e9);
  visit("sync_cycles", machine.sync_cycles, 0, 1e9);
  visit("workers", machine.workers, 1, 1 << 16);
  visit("mesh_rows", machine.mesh_rows, 0, 1 << 16);
  visit("mesh_columns", machine.mesh_columns, 0, 1 << 16);
  visit("hop_cycles", machine.hop_cycles, 0, 1e9);
  visit("memory_bytes_per_cycle", machine.memory_bytes_per_cycle, 0, most);
}

std::string number_text(double number) {
  std::ostringstream text;
  text.precision(12);
  text << number;
  return text.str();
}

[[noreturn]] void fail(std::string_view origin, const std::string& line) {
  throw Error(Error::Kind::value, std::string(origin) + ": " + line);
}

bool in_names(char letter) {
  return std::isalnum(static_cast<unsigned char>(letter)) ||
         std::string_view(" -_.()").find(letter) != std::string_view::npos;
}

void check_name(std::string_view name, std::string_view origin) {
  if (name.empty() || name.size() > 64 || !std::all_of(name.begin(), name.end(), in_names))
    fail(origin, "name: " + shown(name) + ", expected 1 to 64 letters, digits, spaces and -_.()");
}

/// The name of a machine whose text gives none: the last part of its origin.
std::string name_of(std::string_view origin) {
  auto name = std::string(origin.substr(origin.find_last_of('/') + 1)).substr(0, 64);
  std::replace_if(name.begin(), name.end(), [](char letter) { return !in_names(letter); }, '-');
  return name.empty() ? "machine" : name;
}

void check_sizes(std::initializer_list<std::pair<const char*, std::int64_t>> sizes) {
  for (const auto& [name, size] : sizes) {
    if (size < 0)
      throw Error(Error::Kind::value, std::string(name) + ": " + std::to_string(size) + ", expected 0 or more");
  }
}

[[noreturn]] void out_of_range(std::string_view origin, const std::string& key, const std::string& number, double least,
                               double most) {
  fail(origin, key + ": " + number + ", expected " + number_text(least) + " to " + number_text(most));
}

void check(const TileMachine& machine, std::string_view origin) {
  check_name(machine.name, origin);
  auto copy = machine;
  for_each_number(copy, [&](const char* key, auto& value, double least, double most) {
    if (!(double(value) >= least && double(value) <= most))
      out_of_range(origin, key, number_text(double(value)), least, most);
  });
  if (machine.reserved_per_tile >= machine.memory_per_tile) {
    fail(origin, "reserved_per_tile: " + std::to_string(machine.reserved_per_tile) + ", expected less than the " +
                     std::to_string(machine.memory_per_tile) + " of memory_per_tile");
  }
  if (machine.mesh_rows * machine.mesh_columns != 0 || machine.mesh_rows + machine.mesh_columns > 0) {
    if (machine.mesh_rows * machine.mesh_columns != machine.tiles)
      fail(origin, "mesh_rows: a mesh of " + std::to_string(machine.mesh_rows) + " x " +
                       std::to_string(machine.mesh_columns) + ", expected " + std::to_string(machine.tiles) +
                       " tiles as in tiles");
  }
}

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
  return first == std::string_view::npos ? std::string_view{} : text.substr(first, last - first + 1);
}

bool truth(std::string_view key, std::string_view value, std::string_view origin) {
  const bool yes = value == "true" || value == "1", no = value == "false" || value == "0";
  if (!yes && !no) fail(origin, std::string(key) + ": " + shown(value) + ", expected true or false");
  return yes;
}

void assign(TileMachine& machine, std::string_view key, std::string_view value, std::string_view origin) {
  const auto name = std::string(key);
  if (value.empty()) fail(origin, shown(name) + ": no value, expected one after =");
  if (key == "name") return check_name(value, origin), void(machine.name = value);
  if (key == "overlap") {
    return void(machine.overlap = truth(key, value, origin));
  }
  if (key == "separate_vector") return void(machine.separate_vector = truth(key, value, origin));
  bool found = false;
  for_each_number(machine, [&](const char* member, auto& number, double least, double most) {
    if (key != member) return;
    found = true;
    double parsed = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    const bool too_large = error == std::errc::result_out_of_range;
    if ((error != std::errc() && !too_large) || end != value.data() + value.size() || std::isnan(parsed))
      fail(origin, name + ": " + shown(value) + ", expected a number");
    if (too_large || std::abs(parsed) > 1e15) out_of_range(origin, name, shown(value), least, most);
    using Number = std::remove_reference_t<decltype(number)>;
    if (std::is_integral_v<Number> && parsed != std::floor(parsed))
      fail(origin, name + ": " + shown(value) + ", expected a whole number");
    number = Number(parsed);
  });
  if (!found) fail(origin, shown(name) + ": no such key");
}

}  // namespace

UsedMachine used_machine() {
  if (context_of_thread) return {context_of_thread->machine, context_of_thread->choice};
  const std::lock_guard lock(used_mutex);
  return used();
}

TileContext* tile_context() { return context_of_thread; }

void check_used(const TileMachine& machine, const TileChoice& choice) {
  check(machine, "machine");
  check_sizes({{"grid_rows", choice.grid_rows},
               {"grid_columns", choice.grid_columns},
               {"chunks_in_flight", choice.chunks_in_flight}});
  constexpr std::int64_t most_in_flight = 1 << 16;
  if (choice.chunks_in_flight > most_in_flight)
    out_of_range("machine", "chunks_in_flight", std::to_string(choice.chunks_in_flight), 0, most_in_flight);
  if (choice.grid_rows > machine.tiles || choice.grid_columns > machine.tiles) {
    throw Error(Error::Kind::value, "grid: " + std::to_string(choice.grid_rows) + " x " +
                                        std::to_string(choice.grid_columns) + " tiles, the machine has " +
                                        std::to_string(machine.tiles));
  }
}

}  // namespace simulator

TileMachine parse_tile_machine(std::string_view text, std::string_view origin, const TileMachine* base) {
  TileMachine machine;
  machine.name = simulator::name_of(origin);
  if (base) machine = *base;
  constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
  if (text.substr(0, 3) == byte_order_mark) text.remove_prefix(3);
  std::vector<std::string> keys;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    const auto line = simulator::trimmed(text.substr(at, end - at).substr(0, text.substr(at, end - at).find('#')));
    at = end + 1;
    if (line.empty()) continue;
    const auto equals = line.find('=');
    if (equals == std::string_view::npos) simulator::fail(origin, shown(line) + ": expected key = value");
    const auto key = simulator::trimmed(line.substr(0, equals));
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) simulator::fail(origin, shown(key) + ": given twice");
    keys.emplace_back(key);
    simulator::assign(machine, key, simulator::trimmed(line.substr(equals + 1)), origin);
  }
  for (const auto* needed : {"tiles", "memory_per_tile", "clock_hz"})
    if (!base && std::find(keys.begin(), keys.end(), needed) == keys.end())
      simulator::fail(origin, std::string(needed) + ": not given, expected a number");
  simulator::check(machine, origin);
  return machine;
}

TileMachine read_tile_machine(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  const bool empty = file.peek() == std::ifstream::traits_type::eof();
  if (!file.is_open() || file.bad() || (!empty && !(text << file.rdbuf())))
    throw Error(Error::Kind::value, shown(path, 200) + ": cannot be read");
  return parse_tile_machine(text.str(), shown(path, 200));
}

std::vector<std::string> tile_machine_names() {
  std::vector<std::string> names;
  for (const auto& [name, text] : simulator::machine_files) names.emplace_back(name);
  return names;
}

TileMachine tile_machine(const std::string& name_or_path) {
  std::string names;
  for (const auto& [known, text] : simulator::machine_files) {
    if (known == name_or_path) return parse_tile_machine(text, known);
    names += std::string(known) + ", ";
  }
  if (!std::ifstream(name_or_path))
    throw Error(Error::Kind::value, "machine: " + shown(name_or_path, 200) + ", expected " + names + "or a file");
  return read_tile_machine(name_or_path);
}

void use_tile_machine(const TileMachine& machine, const TileChoice& choice) {
  simulator::check_used(machine, choice);
  const std::lock_guard lock(simulator::used_mutex);
  simulator::used() = {machine, choice};
}

TileContext* use_tile_context(TileContext* context) {
  if (context) simulator::check_used(context->machine, context->choice);
  return std::exchange(simulator::context_of_thread, context);
}

TileMachine used_tile_machine() { return simulator::used_machine().machine; }
TileChoice used_tile_choice() { return simulator::used_machine().choice; }

double tile_product_cycles(const TileMachine& machine, ElementType type, std::int64_t m, std::int64_t n,
                           std::int64_t k) {
  simulator::check_sizes({{"m", m}, {"n", n}, {"k", k}});
  const auto blocks = [](std::int64_t size, std::int64_t of) { return double(size / of + (size % of != 0)); };
  const auto rate = type == ElementType::float16 ? machine.multiply_adds_float16 : machine.multiply_adds_float32;
  const double rows = blocks(m, machine.unit_rows) * double(machine.unit_rows);
  const double block = double(machine.unit_columns * machine.unit_depth);
  return blocks(n, machine.unit_columns) * blocks(k, machine.unit_depth) *
             (rows * block / rate + machine.unit_load_cycles) +
         machine.unit_start_cycles;
}

TileStep tile_step_cycles(const TileMachine& machine, ElementType type, std::int64_t rows, std::int64_t keys,
                          std::int64_t d_qk, std::int64_t d_v) {
  simulator::check_sizes({{"rows", rows}, {"keys", keys}, {"d_qk", d_qk}, {"d_v", d_v}});
  const double products =
      tile_product_cycles(machine, type, rows, keys, d_qk) + tile_product_cycles(machine, type, rows, d_v, keys);
  const double others = simulator::exp_cycles(machine, type, rows, keys) +
                        simulator::vector_cycles(machine, type, rows, d_v) +
                        simulator::vector_cycles(machine, type, rows, keys) * simulator::forward_score_operations;
  return {products, simulator::both_cycles(machine, products, others)};
}

}  // namespace anyflash
