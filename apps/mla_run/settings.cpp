#include "apps/mla_run/settings.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <set>

#include "apps/mla_run/options.h"
#include "lib/base/config_file.h"
#include "lib/base/error.h"
#include "lib/base/json.h"

namespace mla {
namespace {

constexpr const char* kPrefix = "MLA_RUN_";
constexpr const char* kCommands[] = {"run", "eval", "plan", "bench"};

struct Setting {
  std::vector<std::string> values;
  std::string source;
};
using SettingMap = std::map<std::string, Setting>;  // by the option's long name

// MAX_NUM_SEQS, max_num_seqs → max-num-seqs
std::string option_name(std::string name) {
  for (char& c : name)
    c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

bool has_option(const CLI::App& command, const std::string& name) {
  return name != "help" && name != "version" && command.get_option_no_throw("--" + name) != nullptr;
}

bool is_known(const CLI::App& app, const std::string& name) {
  return std::any_of(std::begin(kCommands), std::end(kCommands), [&](const char* command) {
    return has_option(*app.get_subcommand(command), name);
  });
}

// What is said for no command in particular is said for all that have the option; but where `run`
// writes is not where others do.
bool is_shared(const CLI::App& command, const std::string& name) {
  return has_option(command, name) && (command.get_name() == "run" || name != "output");
}

SettingMap environment(const CLI::App& app, const CLI::App& command) {
  SettingMap settings;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (!text.starts_with(kPrefix) || equals == std::string::npos || equals + 1 == text.size())
      continue;
    const std::string variable = text.substr(0, equals);
    const std::string name = option_name(variable.substr(std::string(kPrefix).size()));
    if (!is_known(app, name)) say("warning: {} is set, and there is no --{}\n", variable, name);
    if (is_shared(command, name))
      settings[name] = {.values = {text.substr(equals + 1)}, .source = variable};
  }
  return settings;
}

// Of the command's own section, and of no section.
std::pair<SettingMap, SettingMap> config_file(const CLI::App& app, const CLI::App& command,
                                              const std::string& path) {
  SettingMap settings, own;
  std::vector<ConfigEntry> entries;
  try {
    entries = parse_config_file(read_file(path), path);
  } catch (const Error& e) {
    usage_fail("--config: {}", e.what());
  }
  for (const ConfigEntry& entry : entries) {
    const std::string name = option_name(entry.key);
    const std::string source = fmt::format("{}: line {}", path, entry.line);
    const bool is_command = std::count(std::begin(kCommands), std::end(kCommands), entry.section);
    if (!entry.section.empty() && !is_command)
      usage_fail("--config: {}: expected a section run, eval, plan or bench, found '{}'", source,
                 entry.section);
    const bool known =
        is_command ? has_option(*app.get_subcommand(entry.section), name) : is_known(app, name);
    if (!known || name == "config")
      usage_fail("--config: {}: expected the name of an option, found '{}'", source, entry.key);
    if (entry.section == command.get_name()) {
      own[name] = {.values = entry.values, .source = source};
    } else if (entry.section.empty() && is_shared(command, name)) {
      settings[name] = {.values = entry.values, .source = source};
    }
  }
  return {own, settings};
}

std::string as_argument(const std::string& name, const std::string& value) {
  const bool mode = name == "chunked-prefill";
  return "--" + name + "=" +
         (mode && value == "true"    ? "on"
          : mode && value == "false" ? "off"
                                     : value);
}

// `taken`: what stronger sources have said; an option may have several names.
void add(const SettingMap& map, const CLI::App& command, std::set<const CLI::Option*>& taken,
         Settings& settings) {
  const std::set<const CLI::Option*> stronger = taken;
  for (const auto& [name, setting] : map) {
    const std::string option = "--" + name;
    const CLI::Option* const known = command.get_option_no_throw(option);
    const auto is_given = [&](const CLI::Option* other) {
      return other->count() > 0 || stronger.count(other);
    };
    const auto& excluded = known->get_excludes();  // by what a stronger source says
    if (is_given(known) || std::any_of(excluded.begin(), excluded.end(), is_given)) continue;
    taken.insert(known);
    settings.sources[option] = setting.source;
    for (const std::string& value : setting.values)
      settings.arguments.push_back(as_argument(name, value));
  }
}

}  // namespace

std::string Settings::sources_in(const std::string& message) const {
  std::string text;
  for (const auto& [option, source] : sources) {
    const size_t at = message.find(option);
    if (at == std::string::npos) continue;
    const size_t end = at + option.size();
    const bool whole =
        end == message.size() ||
        (!std::isalnum(static_cast<unsigned char>(message[end])) && message[end] != '-');
    if (whole) text += fmt::format(" ({} comes from {})", option, source);
  }
  return text;
}

void add_config_option(CLI::App& command) {
  command.add_option("--config",
                     "File of options, name = value a line (TOML or INI); flags and "
                     "MLA_RUN_* of the environment win over it");
}

Settings read_settings(CLI::App& app, const CLI::App& command) {
  Settings settings;
  if (!command.get_option_no_throw("--config")) return settings;
  SettingMap from_environment = environment(app, command);
  std::string path;
  if (command.count("--config") > 0) {
    path = command.get_option("--config")->results().back();
  } else if (const auto it = from_environment.find("config"); it != from_environment.end()) {
    path = it->second.values.front();
  }
  from_environment.erase("config");
  std::set<const CLI::Option*> taken;
  add(from_environment, command, taken, settings);
  if (path.empty()) return settings;
  const auto [own, shared] = config_file(app, command, path);
  add(own, command, taken, settings);
  add(shared, command, taken, settings);
  return settings;
}

}  // namespace mla
