// The subcommands. Each adds itself to the program; its work is done in the callback, which throws on failure.
#pragma once

namespace CLI {
class App;
}

namespace anyflash::cli {

void add_run(CLI::App& app);
void add_check(CLI::App& app);
void add_bench(CLI::App& app);
void add_explain(CLI::App& app);
void add_devices(CLI::App& app);

}  // namespace anyflash::cli
