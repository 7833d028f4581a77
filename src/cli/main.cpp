// The anyflash program: exact attention on tensor files, checks, timings and pictures.
//
// Every failure is one line on stderr, "anyflash: ...", and exit code 1.

#include <anyflash/names.h>
#include <anyflash/tensor.h>
#include <anyflash/version.h>

#include <CLI/CLI.hpp>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "owned_tensor.h"

namespace {

int failure(std::string line) {
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
  std::fprintf(stderr, "anyflash: %s\n", anyflash::cli::one_line(line).c_str());
  return 1;
}

/// The error line for the first argument that no option and no command accepts.
std::optional<std::string> unexpected_argument(const CLI::App& app) {
  const auto left = app.remaining(true);
  if (left.empty()) return {};
  const auto word = left.front().substr(0, left.front().find('='));
  const auto commands = app.get_subcommands();
  std::vector<std::string> known;
  if (word.starts_with("-")) {
    for (const CLI::App* one : {&app, commands.empty() ? &app : commands.front()}) {
      for (const auto* option : one->get_options()) {
        for (const auto& name : option->get_lnames()) known.push_back("--" + name);
      }
    }
  } else if (commands.empty()) {
    for (const auto* command : app.get_subcommands({})) known.push_back(command->get_name());
  } else {
    return "'" + anyflash::shown(word) + "': one argument too many";
  }
  return (word.starts_with("-") ? "no option '" : "no command '") + anyflash::shown(word) + "'" +
         anyflash::did_you_mean(word, anyflash::Names(known.begin(), known.end()));
}

int run(int argc, char** argv) {
  CLI::App app("Exact attention, forward and backward, under any mask rule.", "anyflash");
  app.set_version_flag("--version", "anyflash " ANYFLASH_VERSION);
  app.require_subcommand(0, 1);  // a missing command is handled below, after unknown words
  app.footer(
      "Examples:\n"
      "  anyflash run --input qkv.npz --rule \"causal() & local(256)\" --output out.npz\n"
      "  anyflash check --quick\n"
      "  anyflash explain --rule \"local(8)\" --shape 32x32\n"
      "'anyflash COMMAND --help' tells more.");
  anyflash::cli::add_run(app);
  anyflash::cli::add_check(app);
  anyflash::cli::add_bench(app);
  anyflash::cli::add_explain(app);
  anyflash::cli::add_devices(app);
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) return failure("no command; 'anyflash --help' lists them");
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) return failure(unexpected_argument(app).value_or(error.what()));
    app.exit(error);  // prints the help or the version
  }
  std::cout.flush();
  if (!std::cout || std::fflush(stdout) != 0) return failure("standard output cannot be written");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // exceeding the file size limit is then an error, as a full disk is
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    return failure("not enough memory");
  } catch (const std::exception& error) {
    return failure(error.what());
  }
}
