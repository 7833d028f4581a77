// anyflash devices: what the library would run on.

#include <omp.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "commands.h"
#include "cpu/backend.h"

namespace anyflash::cli {

namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0)
      if (const auto colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "unknown";
}

void devices_command(bool as_json) {
  const auto sets = cpu::instruction_sets();
  const std::string chosen = cpu::instruction_set();
  const int threads = omp_get_max_threads();
  if (as_json) {
    const nlohmann::ordered_json json = {{{"device", "cpu"},
                                          {"model", cpu_model()},
                                          {"threads", threads},
                                          {"instruction_sets", sets},
                                          {"instruction_set", chosen}}};
    std::printf("%s\n", json.dump(2).c_str());
    return;
  }
  std::string list;
  for (const auto* set : sets) list += (list.empty() ? "" : ", ") + std::string(set);
  std::printf("cpu               %s\n", cpu_model().c_str());
  std::printf("threads           %d\n", threads);
  std::printf("instruction sets  %s\n", list.c_str());
  std::printf("chosen            %s\n", chosen.c_str());
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
