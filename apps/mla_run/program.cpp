// The command line from the outside: parsing, subcommands, signals and exit codes.
#include <fcntl.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/loaded.h"
#include "apps/mla_run/options.h"
#include "apps/mla_run/settings.h"
#include "lib/base/error.h"

namespace {

// CLI11 says "Could not convert: --max-num-seqs = 2.5".
std::string expected_and_found(const CLI::App& app, const std::string& message) {
  constexpr std::string_view kBefore = "Could not convert: ";
  const size_t equals = message.find(" = ");
  if (!message.starts_with(kBefore) || equals == std::string::npos) return message;
  const std::string name = message.substr(kBefore.size(), equals - kBefore.size());
  const char* expected = "another value";
  for (const CLI::App* command : app.get_subcommands()) {
    const CLI::Option* option = command->get_option_no_throw(name);
    if (!option) continue;
    const std::string type = option->get_type_name();
    if (type.starts_with("FLOAT")) expected = "a number";
    if (type.starts_with("INT")) expected = "an integer of 32 bits";
  }
  return fmt::format("{}: expected {}, found '{}'", name, expected, message.substr(equals + 3));
}

std::string failure_text(const CLI::App* app, const CLI::Error& e) {
  const bool nothing = e.get_name() == "RequiredError" && app->get_subcommands().empty();
  return fmt::format("mla-run: {}\nmla-run --help and mla-run COMMAND --help say more.\n",
                     nothing ? "expected a command or a file of prompts, found nothing"
                             : expected_and_found(*app, e.what()));
}

// The command line: the program with its subcommands, and what each runs.
struct CommandLine {
  CLI::App app{
      "mla-run: batch generation with DeepSeek-V2-Lite, chunked prefill on or off, to the same "
      "bits.\n"
      "Usage: mla-run [run] [OPTIONS] PROMPTS.jsonl -m MODEL",
      "mla-run"};
  std::vector<std::pair<CLI::App*, mla::Command>> commands;

  CommandLine() {
    app.set_version_flag("--version", "mla-run " MLA_VERSION);
    app.require_subcommand(1);
    app.failure_message(failure_text);
    add("run", "Generate for every line of a JSONL file (the default command)", mla::add_run);
    add("eval", "Ask the questions of GSM8K, or of a file, and score the answers", mla::add_eval);
    add("compare", "Two finished runs: tokens, log-probabilities, accuracy, timing",
        mla::add_compare);
    add("merge", "Outputs of shards, put back into input order, checked to be complete",
        mla::add_merge);
    add("plan", "The memory plan of a run, without loading weights", mla::add_plan);
    add("inspect", "Check a checkpoint: config, index, shapes, dtypes, missing or extra tensors",
        mla::add_inspect);
    add("bench", "Measure synthetic work: prefill, decode or both", mla::add_bench);
    for (const char* name : {"run", "eval", "plan", "bench"})
      mla::add_config_option(*app.get_subcommand(name));
  }
  void add(const char* name, const char* what, mla::Command (*make)(CLI::App&)) {
    CLI::App* command = app.add_subcommand(name, what);
    commands.emplace_back(command, make(*command));
  }
  void parse(std::vector<std::string> arguments) {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    app.parse(arguments);
  }
};

// What the environment and the config file add to the arguments. The command line is parsed once
// for this, with nothing required, to see what it has.
mla::Settings settings_of(const std::vector<std::string>& arguments) {
  CommandLine line;
  for (const auto& [command, run] : line.commands)
    for (CLI::Option* option : command->get_options()) option->required(false);
  try {
    line.parse(arguments);
  } catch (const CLI::ParseError&) {
    return {};  // the parse that counts says it
  }
  for (const auto& [command, run] : line.commands)
    if (command->parsed()) return mla::read_settings(line.app, *command);
  return {};
}

int run_command(const CommandLine& line, const mla::Settings& settings) {
  int code = mla::kExitUsage;
  try {
    for (const auto& [command, run] : line.commands)
      if (command->parsed()) code = run();
  } catch (const mla::UsageError& e) {
    throw mla::UsageError(e.what() + settings.sources_in(e.what()));
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    mla::fail("standard output: it could not be written");
  return code;
}

int parse_and_run(int argc, char** argv) {
  CommandLine line;
  std::vector<std::string> arguments =
      mla::normalize_arguments(std::vector<std::string>(argv + 1, argv + argc));
  mla::Settings settings;
  try {
    settings = settings_of(arguments);
    // Behind the command, before a -- that the user may have.
    if (!settings.arguments.empty())
      arguments.insert(arguments.begin() + 1, settings.arguments.begin(), settings.arguments.end());
    line.parse(arguments);
  } catch (const CLI::ParseError& e) {
    const int code = line.app.exit(e) == 0 ? mla::kExitOk : mla::kExitUsage;
    const std::string sources = settings.sources_in(e.what());
    if (code != mla::kExitOk && !sources.empty()) mla::say("mla-run:{}\n", sources);
    return code;
  }
  return run_command(line, settings);
}

int guarded(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const mla::UsageError& e) {
    mla::say("mla-run: {}\n", e.what());
    return mla::kExitUsage;
  } catch (const std::bad_alloc&) {
    mla::say("mla-run: out of memory\n");
  } catch (const std::exception& e) {
    mla::say("mla-run: {}\n", e.what());
  }
  return mla::kExitFatal;
}

}  // namespace

namespace mla {

int run_program(int argc, char** argv) {
  // A file opened later must not take the place of a closed standard descriptor.
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) < 0)
      return kExitFatal;
  // A reader of our standard output that goes away is an error of write(), with a message.
  // So is a file that grows beyond what the user may write.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  const int code = guarded(argc, argv);
  if (threads_abandoned()) {
    // They may wait for a device for ever, and destructors for them.
    std::fflush(nullptr);
    std::_Exit(code);
  }
  return code;
}

}  // namespace mla
