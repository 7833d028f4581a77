// Runs the program's tests once for each instruction set that was compiled in and runs here, each in a process of its
// own because the choice is made once. With ANYFLASH_ISA set, runs them on that one.
#include <cstdlib>
#include <iostream>
#include <string>

#include <gtest/gtest.h>

#include "cpu/backend.h"

int main(int argc, char** argv) {
  if (std::getenv("ANYFLASH_ISA")) {
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  }
  std::string command;
  for (int i = 0; i < argc; ++i) command += std::string(" '") + argv[i] + "'";
  int failed = 0;
  for (const char* name : anyflash::cpu::instruction_sets()) {
    std::cout << "instruction set " << name << std::endl;
    if (std::system(("ANYFLASH_ISA=" + std::string(name) + command).c_str()) != 0) ++failed;
  }
  return failed != 0;
}
