// anyflash devices: the devices that the library can use.

#include <anyflash/devices.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "commands.h"

namespace anyflash::cli {

namespace {

void devices_command(bool as_json) {
  nlohmann::ordered_json json;
  for (const auto& [device, model, threads] : devices()) {
    auto& entry = json.emplace_back();
    entry["device"] = device_name(device);
    entry["model"] = model;
    if (device.kind != DeviceKind::cpu) continue;
    entry["threads"] = threads;
    entry["instruction_sets"] = instruction_sets();
    entry["instruction_set"] = instruction_set();
  }
  if (as_json) {
    std::printf("%s\n", json.dump(2).c_str());
    return;
  }
  for (const auto& entry : json) {
    for (const auto& [key, value] : entry.items()) {
      std::string text, name = key;
      std::replace(name.begin(), name.end(), '_', ' ');
      for (const auto& part : value.is_array() ? value : nlohmann::ordered_json::array({value}))
        text += (text.empty() ? "" : ", ") + (part.is_string() ? part.get<std::string>() : part.dump());
      std::printf("%-17s %s\n", name.c_str(), text.c_str());
    }
  }
}

}  // namespace

void add_devices(CLI::App& app) {
  auto* command = app.add_subcommand("devices", "List what the library can run on.");
  const auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "print as JSON");
  command->footer(
      "Instruction sets are those built into the program that this machine can run; ANYFLASH_ISA=NAME chooses one of "
      "them.\n\n"
      "Examples:\n"
      "  anyflash devices\n"
      "  ANYFLASH_ISA=AVX2 anyflash devices --json");
  command->callback([as_json] { devices_command(*as_json); });
}

}  // namespace anyflash::cli
