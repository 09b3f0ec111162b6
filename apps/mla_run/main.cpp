#include <fcntl.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/options.h"
#include "lib/base/error.h"

namespace {

int run_program(int argc, char** argv) {
  CLI::App app{
      "mla-run: batch generation with DeepSeek-V2-Lite, chunked prefill on or off, to the same "
      "bits.\n"
      "Usage: mla-run [run] [OPTIONS] PROMPTS.jsonl -m MODEL",
      "mla-run"};
  app.set_version_flag("--version", "mla-run " MLA_VERSION);
  app.require_subcommand(1);

  std::vector<std::pair<CLI::App*, mla::Command>> commands;
  const auto add = [&](const char* name, const char* what, mla::Command (*make)(CLI::App&)) {
    CLI::App* command = app.add_subcommand(name, what);
    commands.emplace_back(command, make(*command));
  };
  add("run", "Generate for every line of a JSONL file (the default command)", mla::add_run);
  add("compare", "Two finished runs: tokens, log-probabilities, accuracy, timing",
      mla::add_compare);
  add("merge", "Outputs of shards, put back into input order, checked to be complete",
      mla::add_merge);
  add("plan", "The memory plan of a run, without loading weights", mla::add_plan);
  add("inspect", "Check a checkpoint: config, index, shapes, dtypes, missing or extra tensors",
      mla::add_inspect);
  add("bench", "Measure synthetic work: prefill, decode or both", mla::add_bench);

  std::vector<std::string> arguments =
      mla::normalize_arguments(std::vector<std::string>(argv + 1, argv + argc));
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? mla::kExitOk : mla::kExitUsage;
  }
  int code = mla::kExitUsage;
  for (const auto& [command, run] : commands)
    if (command->parsed()) code = run();
  if (std::fflush(stdout) != 0 || std::ferror(stdout))
    mla::fail("standard output: it could not be written");
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  // A file opened later must not take the place of a closed standard descriptor.
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) < 0)
      return mla::kExitFatal;
  // A reader of our standard output that goes away is an error of write(), with a message.
  // So is a file that grows beyond what the user may write.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    return run_program(argc, argv);
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
