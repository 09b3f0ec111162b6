// One mode of a run: its folder, what an earlier run left there, its records and its run.json.
#pragma once

#include <optional>
#include <string>

#include "apps/mla_run/input.h"
#include "apps/mla_run/loaded.h"
#include "apps/mla_run/options.h"
#include "apps/mla_run/progress.h"
#include "lib/batch/output.h"
#include "lib/batch/resume.h"
#include "lib/eval/compare.h"

namespace mla {

struct RunFlags {
  EngineFlags engine;
  SamplingFlags sampling;
  std::string prompts;
  std::string output = "mla-run-out";
  std::string shard;  // I/N; "": the whole file
  std::string progress = "auto";
  int64_t limit = -1;
  bool overwrite = false, resume = false, fail_fast = false, quiet = false;
  // Of both:
  int32_t repeat = 1;  // runs of each mode
  Thresholds thresholds;
  std::string html;  // where the page goes; "": report.html in the output folder

  bool both() const { return engine.chunked == "both"; }
  bool to_stdout() const { return output == "-"; }
};

// How a run reads its requests, from `input`, which stays where it is while it is read.
ReaderOptions reader_options(const RunFlags& flags, const Loaded& loaded, const Input& input);

class ModeRun {
 public:
  // `dir`: "" for standard output; `label`: for the progress. With --resume it looks at what is
  // there: throws UsageError where that is of another run.
  ModeRun(const RunFlags& flags, const Loaded& loaded, const MemoryPlan& plan, const Input& input,
          std::string dir, std::string label);

  // Whether an earlier run has answered every line.
  bool complete() const { return earlier_.complete; }
  const std::string& dir() const { return dir_; }

  // Opens the output, after which run.json says "running". Of a complete run only run.json is
  // brought to its end, where it is not.
  void open();
  // True when every line was answered. Throws Interrupted after a signal, and Stopped.
  bool run(Loaded& loaded, Input& input, Progress& progress, StepTrace& trace);
  // run.json says how it ended, unless it does already. Never throws.
  void end(const std::string& state, const std::string& error);

 private:
  void finish(const RequestReader& reader, const Loaded& loaded, uint64_t memory_at_start);
  void close_complete() const;
  void write_record() const;

  const RunFlags& flags_;
  const MemoryPlan& plan_;
  std::string dir_, label_;
  Shard shard_;
  RunRecord record_;
  EarlierOutput earlier_;
  std::optional<OutputWriter> writer_;
  bool ended_ = false;
};

// --fail-fast after the first failed line.
class Stopped : public Error {
 public:
  using Error::Error;
};

}  // namespace mla
