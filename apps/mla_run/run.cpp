// mla-run run: load once, one run of the file in each mode asked for, and with both the comparison.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/interrupt.h"
#include "apps/mla_run/loaded.h"
#include "apps/mla_run/options.h"
#include "apps/mla_run/run_flow.h"
#include "lib/base/error.h"
#include "lib/batch/output.h"

namespace mla {
namespace {

int run_all(const RunFlags& flags) {
  Progress progress(flags.progress, flags.quiet);
  progress.checking(flags.engine.model + " and " + flags.prompts);
  Input input(flags.prompts, flags.engine.chunked == "both");
  const std::unique_ptr<Loaded> loaded = prepare(flags.engine);
  flags.sampling.params(loaded->config.vocab_size);  // refuses what is out of range
  std::deque<ModeRun> modes = make_modes(flags, *loaded, input);
  progress.clear();
  check_interrupt();

  const ModesEnd end = run_modes(flags, *loaded, input, modes, progress);
  int code = end.all_answered ? kExitOk : kExitSomeFailed;
  if (flags.both()) {
    if (const int compared = compare_modes(flags); compared != kExitOk) code = compared;
  } else if (!flags.to_stdout() && !flags.quiet) {
    say("{} {}/{}\n", modes[0].complete() ? "complete already:" : "wrote", modes[0].dir(),
        kOutputsName);
  }
  if (!end.trace_error.empty()) fail("{}", end.trace_error);
  return code;
}

}  // namespace

Command add_run(CLI::App& app) {
  auto flags = std::make_shared<RunFlags>();
  app.add_option("PROMPTS", flags->prompts, "JSONL file, one request a line; - for standard input")
      ->required();
  app.add_option(
         "-o,--output", flags->output,
         "Folder for outputs.jsonl and run.json (both: off/, on/ and compare.json); - writes "
         "outputs to standard output")
      ->capture_default_str();
  flags->engine.add_to(app);
  flags->sampling.add_to(app);
  app.add_option("--limit", flags->limit, "Only the first N records")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 53));
  app.add_option("--shard", flags->shard,
                 "I/N: only the records I, I+N, I+2N … of the file (I from 0), under the ids and "
                 "indices they have there; mla-run merge puts the shards together");
  add_flow_options(app, *flags);
  return [flags] {
    flags->sampling.take_generation_config(flags->engine.model);
    return run_guarded(*flags, [&] { return run_all(*flags); });
  };
}

}  // namespace mla
