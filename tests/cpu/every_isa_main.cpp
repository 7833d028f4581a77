// Runs the program's tests once for each instruction set that was compiled in and runs here, each in a process of its
// own, since GoogleTest runs once in a process. With ANYFLASH_ISA set, runs them on that one. With
// ANYFLASH_TEST_SETS=best only on the best one: under sanitizers the scalar one takes ten times as long. The nightly
// run (ANYFLASH_TEST_EXAMPLES) has the time.
#include <cstdlib>
#include <iostream>
#include <string>

#include <anyflash/devices.h>
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  if (std::getenv("ANYFLASH_ISA") || anyflash::instruction_sets().size() == 1) {
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  }
  std::string command;
  for (int i = 0; i < argc; ++i) command += std::string(" '") + argv[i] + "'";
  auto names = anyflash::instruction_sets();
  const char* sets = std::getenv("ANYFLASH_TEST_SETS");
  const bool nightly = std::getenv("ANYFLASH_TEST_EXAMPLES") != nullptr;
  if (!nightly && sets != nullptr && std::string(sets) == "best" && !names.empty()) names.resize(1);
  bool passed = !names.empty();
  for (const char* name : names) {
    std::cout << "instruction set " << name << std::endl;
    passed &= std::system(("ANYFLASH_ISA=" + std::string(name) + command).c_str()) == 0;
  }
  return passed ? 0 : 1;
}
