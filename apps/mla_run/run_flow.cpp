#include "apps/mla_run/run_flow.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>

#include "apps/mla_run/interrupt.h"
#include "lib/batch/output.h"
#include "lib/eval/compare.h"
#include "lib/report/report.h"

namespace mla {

void add_flow_options(CLI::App& app, RunFlags& flags) {
  app.add_flag("--resume", flags.resume,
               "Go on with a run that ended early: keep what was finished, run what failed and "
               "the rest");
  app.add_flag("--overwrite", flags.overwrite, "Replace the outputs of an earlier run");
  app.add_flag("--fail-fast", flags.fail_fast,
               "Stop at the first failed line, exit 3; --resume goes on");
  app.add_option("--progress", flags.progress,
                 "On standard error, a bar on a terminal, else a line every 5 s; always: with "
                 "--quiet too")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  app.add_flag("--quiet", flags.quiet, "No plan and no progress on standard error");
  app.add_option("--min-match", flags.min_match,
                 "With both: exit 4 when a smaller share of tokens or logprob hashes is identical")
      ->capture_default_str();
  app.add_option("--html", flags.html,
                 "With both: where to write the comparison as a page; default report.html in the "
                 "output folder");
}

void check_flags(const RunFlags& flags) {
  choose_device(flags.engine.device);  // refuses what this build has not
  if (flags.engine.chunked == "both" && flags.to_stdout())
    usage_fail("--chunked-prefill both writes two runs: give --output a folder");
  if (!(flags.min_match >= 0 && flags.min_match <= 1))
    usage_fail("--min-match: expected a number in [0, 1], found {}", flags.min_match);
  if (!flags.html.empty() && flags.engine.chunked != "both")
    usage_fail("--html: expected --chunked-prefill both with it, found {}", flags.engine.chunked);
  if (!flags.shard.empty() && !parse_shard(flags.shard))
    usage_fail("--shard: expected I/N with 0 <= I < N, found '{}'", flags.shard);
  if (!flags.resume) return;
  if (flags.overwrite) usage_fail("expected one of --resume and --overwrite, found both");
  if (flags.to_stdout())
    usage_fail("--resume: expected --output DIR, found -: what was written cannot be read again");
  std::error_code ignored;
  if (flags.prompts == "-" || (std::filesystem::exists(flags.prompts, ignored) &&
                               !std::filesystem::is_regular_file(flags.prompts, ignored)))
    usage_fail("--resume: expected a file of prompts, found {}: it cannot be read again",
               flags.prompts == "-" ? "standard input" : flags.prompts);
}

std::deque<ModeRun> make_modes(const RunFlags& flags, const Loaded& loaded, const Input& input) {
  std::deque<ModeRun> modes;
  const bool both = flags.engine.chunked == "both";
  for (const MemoryPlan& plan : loaded.plans)
    modes.emplace_back(flags, loaded, plan, input,
                       flags.to_stdout() ? ""
                       : both            ? flags.output + (plan.chunked ? "/on" : "/off")
                                         : flags.output);
  return modes;
}

bool run_modes(const RunFlags& flags, Loaded& loaded, Input& input, std::deque<ModeRun>& modes,
               Progress& progress, const std::function<void()>& opened) {
  const auto end = [&](const std::string& state, const std::string& error) {
    for (ModeRun& mode : modes) mode.end(state, error);
  };
  try {
    bool to_run = false, all_answered = true;
    for (ModeRun& mode : modes) {
      mode.open();
      to_run |= !mode.complete();
    }
    if (opened) opened();
    if (to_run) load(flags.engine, flags.quiet, progress, loaded);
    for (ModeRun& mode : modes) {
      check_interrupt();
      if (!mode.complete()) all_answered &= mode.run(loaded, input, progress);
    }
    return all_answered;
  } catch (const Stopped& e) {
    end("stopped", e.what());
    throw;
  } catch (const std::exception& e) {
    progress.clear();
    // A signal may show as an error of what it ended.
    end(interrupted() ? "interrupted" : "failed", interrupted() ? "" : e.what());
    throw;
  }
}

int compare_modes(const RunFlags& flags, const std::deque<ModeRun>& modes) {
  const CompareReport report = compare_runs(modes[0].dir(), modes[1].dir());
  write_file_atomically(flags.output + "/compare.json",
                        to_json(report, flags.min_match).dump(2) + "\n");
  const std::string page = flags.html.empty() ? flags.output + "/report.html" : flags.html;
  write_file_atomically(page, report_html(report, flags.min_match));
  fmt::print("{}", to_text(report, flags.min_match));
  // No request in either run: every line was answered.
  const bool nothing = report.a.requests == 0 && report.b.requests == 0;
  return nothing || passes(report, flags.min_match) ? kExitOk : kExitThreshold;
}

int run_guarded(const RunFlags& flags, const std::function<int()>& all) {
  check_flags(flags);
  catch_signals();
  const std::string goes_on = flags.to_stdout() || flags.prompts == "-" ? "" : "; --resume goes on";
  try {
    return all();
  } catch (const Stopped& e) {
    say("mla-run: {}{}\n", e.what(), goes_on);
    return kExitSomeFailed;
  } catch (const std::exception&) {
    if (!interrupted()) throw;
    say("mla-run: interrupted; what was finished is kept{}\n", goes_on);
    return kExitInterrupted;
  }
}

}  // namespace mla
