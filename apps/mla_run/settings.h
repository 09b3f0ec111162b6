// Options from MLA_RUN_* variables of the environment and from a config file. What the command line
// gives wins over the environment, and that over the file.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace mla {

struct Settings {
  std::vector<std::string> arguments;          // --name=value, of options not on the command line
  std::map<std::string, std::string> sources;  // "--name" → "MLA_RUN_NAME", "FILE: line 3"

  // For an error message about options: where those that it names come from; else "".
  std::string sources_in(const std::string& message) const;
};

// Commands that take settings get --config.
void add_config_option(CLI::App& command);

// `app` has parsed the command line. Throws UsageError: a file that cannot be read, or a name in it
// that is no option. A variable that is no option is warned of.
Settings read_settings(CLI::App& app, const CLI::App& command);

}  // namespace mla
