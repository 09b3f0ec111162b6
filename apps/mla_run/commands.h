// The subcommands. Each adds itself to the command line and returns what to run; the value is the
// program's exit code.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace mla {

// The whole program: parses, runs, says what went wrong, and returns the exit code.
int run_program(int argc, char** argv);

using Command = std::function<int()>;

Command add_run(CLI::App& app);
Command add_eval(CLI::App& app);
Command add_compare(CLI::App& app);
Command add_merge(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_inspect(CLI::App& app);
Command add_bench(CLI::App& app);

}  // namespace mla
