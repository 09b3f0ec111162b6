// What run and eval have in common: one run of the requests in each mode asked for, how it ends,
// and with both the comparison.
#pragma once

#include <deque>
#include <functional>
#include <string>

#include "apps/mla_run/run_mode.h"

namespace mla {

// How a run goes on, shows itself and is judged: --resume to --html.
void add_flow_options(CLI::App& app, RunFlags& flags);
// The thresholds of a comparison; `prefix` goes in front of the description of each option.
void add_threshold_options(CLI::App& app, Thresholds& thresholds, const std::string& prefix);

// The folder of every run, in no order that matters; none with standard output.
std::vector<std::string> run_folders(const RunFlags& flags);

inline constexpr const char* kScoreNames[] = {"results.json", "samples.jsonl"};  // eval's of a run

// What can be said of the options by themselves. Throws UsageError.
void check_values(const RunFlags& flags);
// The same, of the device and of the files too, without opening anything.
void check_flags(const RunFlags& flags);

// The runs in their order, of each mode as many as --repeat says, looked at but not opened. The
// first ones are those of the plans in their order.
std::deque<ModeRun> make_modes(const RunFlags& flags, const Loaded& loaded, const Input& input);

struct ModesEnd {
  bool all_answered = true;
  std::string trace_error;  // why the trace is not whole; what else is to be made comes first
};

// Opens the outputs, loads the weights where there is something to run, and runs. `opened` is
// called once the outputs are there. On an exception run.json says it.
ModesEnd run_modes(const RunFlags& flags, Loaded& loaded, Input& input, std::deque<ModeRun>& modes,
                   Progress& progress, const std::function<void()>& opened = {});

// After runs of both modes: prints the comparison, writes compare.json and the page. Returns
// kExitOk or kExitThreshold.
int compare_modes(const RunFlags& flags);

// Checks the flags, installs the signal handlers, then calls `all`. What ends it early, --fail-fast
// or a signal, becomes a message and an exit code.
int run_guarded(const RunFlags& flags, const std::function<int()>& all);

}  // namespace mla
