#include "apps/mla_run/run_flow.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>

#include "apps/mla_run/interrupt.h"
#include "apps/mla_run/named_file.h"
#include "lib/batch/output.h"
#include "lib/eval/compare.h"
#include "lib/report/report.h"

namespace mla {

namespace fs = std::filesystem;

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
  app.add_option("--data-parallel-size", flags.engine.data_parallel,
                 "Engines over the one file, each with a model on GPUs of its own, or a share of "
                 "the CPU threads. Also -dp")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--trace", flags.engine.trace,
                 "Where to write when each step ran, as Chrome's trace events (ui.perfetto.dev); "
                 "steps take a little longer");
  app.add_option("--repeat", flags.repeat,
                 "With both: run each mode so many times, in alternation, and say how their times "
                 "compare pair by pair")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  add_threshold_options(app, flags.thresholds, "With both: ");
  app.add_option("--html", flags.html,
                 "With both: where to write the comparison as a page; default report.html in the "
                 "output folder");
}

void add_threshold_options(CLI::App& app, Thresholds& thresholds, const std::string& prefix) {
  app.add_option("--min-match", thresholds.min_match,
                 prefix +
                     "exit 4 when a smaller share of requests has the same tokens and the "
                     "same logprob hash")
      ->capture_default_str();
  app.add_option("--max-logprob-diff", thresholds.max_logprob_diff,
                 prefix + "exit 4 when a logprob differs by more; needs --logprobs in the runs");
  app.add_option("--max-accuracy-drop", thresholds.max_accuracy_drop,
                 prefix + "exit 4 when the second run's accuracy is lower by more");
  app.add_option("--min-accuracy", thresholds.min_accuracy,
                 prefix + "exit 4 when the accuracy of a run is lower");
}

namespace {

// Of both: the folder of a run, repeats counted from 0; the first has the place of a single one.
std::string folder(const RunFlags& flags, int32_t repeat, bool chunked) {
  const std::string of_repeat = repeat == 0 ? "" : fmt::format("/repeat-{}", repeat + 1);
  return flags.output + of_repeat + "/" + mode_name(chunked);
}

}  // namespace

std::vector<std::string> run_folders(const RunFlags& flags) {
  if (flags.to_stdout()) return {};
  if (!flags.both()) return {flags.output};
  std::vector<std::string> all;
  for (int32_t repeat = 0; repeat < flags.repeat; ++repeat)
    for (const bool chunked : {false, true}) all.push_back(folder(flags, repeat, chunked));
  return all;
}

namespace {

std::string page_of(const RunFlags& flags) {
  return flags.both() && flags.html.empty() ? flags.output + "/report.html" : flags.html;
}

void check_files(const RunFlags& flags) {
  const std::string& trace = flags.engine.trace;
  std::vector<std::string> others = {flags.prompts};
  bool earlier = false;
  std::error_code ignored;
  for (const std::string& dir : run_folders(flags)) {
    for (const char* name : {kOutputsName, kPartialName, kRunRecordName})
      others.push_back(dir + "/" + name);
    for (const char* name : kScoreNames) others.push_back(dir + "/" + name);
    for (const char* name : {kOutputsName, kPartialName})
      earlier |= fs::exists(dir + "/" + name, ignored);
  }
  std::vector<std::string> made = run_folders(flags);
  if (!flags.to_stdout()) {
    made.push_back(flags.output);
    for (const char* name : {"compare.json", "requests.jsonl"})
      others.push_back(flags.output + "/" + name);
  }
  check_named_files({{"--html", page_of(flags)}, {"--trace", trace}}, others, made);
  if (flags.both() && same_file(flags.prompts, flags.output + "/compare.json"))
    usage_fail("{}: the input is one of the files to be written; expected another output folder",
               flags.prompts);
  if (fs::is_regular_file(trace, ignored) && !flags.overwrite && !(flags.resume && earlier))
    usage_fail("--trace: {} exists; --overwrite replaces it", trace);
}

// Not standard input and no pipe; a file that is not there is told later.
bool can_be_read_again(const std::string& prompts) {
  std::error_code ignored;
  return prompts != "-" && (!fs::exists(prompts, ignored) || fs::is_regular_file(prompts, ignored));
}

}  // namespace

void check_values(const RunFlags& flags) {
  check(flags.thresholds);
  const Thresholds& limits = flags.thresholds;
  const std::pair<const char*, bool> of_both[] = {
      {"--html", !flags.html.empty()},
      {"--repeat", flags.repeat > 1},
      {"--min-match", limits.min_match != Thresholds{}.min_match},
      {"--max-logprob-diff", limits.max_logprob_diff.has_value()},
      {"--max-accuracy-drop", limits.max_accuracy_drop.has_value()},
      {"--min-accuracy", limits.min_accuracy.has_value()}};
  for (const auto& [option, given] : of_both)
    if (given && !flags.both())
      usage_fail("{}: expected --chunked-prefill both with it, found {}", option,
                 flags.engine.chunked);
  if (!flags.shard.empty() && !parse_shard(flags.shard))
    usage_fail("--shard: expected I/N with 0 <= I < N, found '{}'", flags.shard);
  if (flags.resume && flags.overwrite)
    usage_fail("expected one of --resume and --overwrite, found both");
}

void check_flags(const RunFlags& flags) {
  choose_device(flags.engine.device);  // refuses what this build has not
  if (flags.both() && flags.to_stdout())
    usage_fail("--chunked-prefill both writes two runs: give --output a folder");
  check_values(flags);
  check_files(flags);
  if (!flags.resume) return;
  if (flags.to_stdout())
    usage_fail("--resume: expected --output DIR, found -: what was written cannot be read again");
  if (!can_be_read_again(flags.prompts))
    usage_fail("--resume: expected a file of prompts, found {}: it cannot be read again",
               flags.prompts == "-" ? "standard input" : flags.prompts);
}

namespace {

// --overwrite of both: what earlier runs have made together does not stand beside those of this
// one.
void remove_reports(const RunFlags& flags) {
  std::error_code ignored;
  for (const char* name : {"compare.json", "report.html"})
    fs::remove(flags.output + "/" + name, ignored);
  for (int32_t repeat = flags.repeat;; ++repeat) {
    const fs::path of_repeat = fs::path(folder(flags, repeat, false)).parent_path();
    if (!fs::is_directory(of_repeat, ignored)) return;
    for (const bool chunked : {false, true}) {
      const std::string dir = folder(flags, repeat, chunked);
      for (const char* name : {kOutputsName, kPartialName, kRunRecordName})
        fs::remove(dir + "/" + name, ignored);
      for (const char* name : kScoreNames) fs::remove(dir + "/" + name, ignored);
      fs::remove(dir, ignored);  // where nothing else is in it
    }
    fs::remove(of_repeat, ignored);
  }
}

}  // namespace

std::deque<ModeRun> make_modes(const RunFlags& flags, const Loaded& loaded, const Input& input) {
  std::deque<ModeRun> modes;
  for (int32_t repeat = 0; repeat < flags.repeat; ++repeat) {
    for (size_t i = 0; i < loaded.plans.size(); ++i) {
      // off on, on off, off on …: what drifts meets both alike.
      const MemoryPlan& plan = loaded.plans[repeat % 2 == 0 ? i : loaded.plans.size() - 1 - i];
      std::string dir = flags.to_stdout() ? "" : flags.output;
      if (flags.both()) dir = folder(flags, repeat, plan.chunked);
      std::string label = fmt::format("chunked prefill {}", mode_name(plan.chunked));
      if (flags.repeat > 1) label += fmt::format(", run {} of {}", repeat + 1, flags.repeat);
      modes.emplace_back(flags, loaded, plan, input, std::move(dir), std::move(label));
    }
  }
  return modes;
}

ModesEnd run_modes(const RunFlags& flags, Loaded& loaded, Input& input, std::deque<ModeRun>& modes,
                   Progress& progress, const std::function<void()>& opened) {
  const auto end = [&](const std::string& state, const std::string& error) {
    for (ModeRun& mode : modes) mode.end(state, error);
  };
  try {
    ModesEnd result;
    bool to_run = false;
    for (ModeRun& mode : modes) {
      mode.open();
      to_run |= !mode.complete();
    }
    if (flags.overwrite && flags.both()) remove_reports(flags);
    if (opened) opened();
    StepTrace trace(to_run ? flags.engine.trace : "");  // complete runs keep theirs
    if (to_run) load(flags.engine, flags.quiet, progress, loaded);
    for (ModeRun& mode : modes) {
      check_interrupt();
      if (!mode.complete()) result.all_answered &= mode.run(loaded, input, progress, trace);
    }
    try {
      trace.close();
    } catch (const Error& e) {
      result.trace_error = e.what();
    }
    return result;
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

int compare_modes(const RunFlags& flags) {
  CompareReport report = compare_runs(folder(flags, 0, false), folder(flags, 0, true));
  if (flags.repeat > 1) {
    std::vector<std::pair<std::string, std::string>> folders;
    for (int32_t repeat = 0; repeat < flags.repeat; ++repeat)
      folders.emplace_back(folder(flags, repeat, false), folder(flags, repeat, true));
    report.repeats = compare_repeats(folders);
  }
  write_file_atomically(flags.output + "/compare.json",
                        to_json(report, flags.thresholds).dump(2) + "\n");
  write_file_atomically(page_of(flags), report_html(report, flags.thresholds));
  fmt::print("{}", to_text(report, flags.thresholds));
  return failures(report, flags.thresholds).empty() ? kExitOk : kExitThreshold;
}

int run_guarded(const RunFlags& flags, const std::function<int()>& all) {
  check_flags(flags);
  catch_signals();
  const std::string goes_on =
      flags.to_stdout() || !can_be_read_again(flags.prompts) ? "" : "; --resume goes on";
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
