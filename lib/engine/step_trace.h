// Steps as Chrome's trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show.
//
// A run is a process with a track each for prefill, decode, sampling, detokenising and planning. A
// step with rows of both kinds computes them together and stands in both tracks. Times are those of
// the host's steady clock; what the device does is told by its own clock.
#pragma once

#include <cstdint>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "lib/base/json.h"

namespace mla {

struct TracedStep {
  int64_t number = 0;  // of the run, from 0
  // A prompt, or a part of it.
  struct Prompt {
    Json id;
    int32_t context, tokens;  // that were there, and that are computed
  };
  static constexpr size_t kMaxPrompts = 16;  // that are named
  std::vector<Prompt> prompts;               // the first of them
  int64_t num_prompts = 0, prefill_tokens = 0, decode_tokens = 0, sampled = 0, finished = 0;
  // Nanoseconds of the steady clock:
  int64_t plan_begin = 0, plan_end = 0;                        // on the host, launching included
  int64_t compute_begin = 0, compute_end = 0, sample_end = 0;  // on the device
  int64_t take_begin = 0, take_end = 0;                        // on the host
};

// Engines on several threads may write one.
class StepTrace {
 public:
  // Nothing is written to "". Throws Error where the file cannot be opened.
  explicit StepTrace(const std::string& path);

  bool on() const { return !path_.empty(); }
  // The number of a run that begins.
  int64_t begin_run(const std::string& name);
  void add(int64_t run, const TracedStep& step);
  // Throws Error where something could not be written.
  void close();

 private:
  void track(int64_t run, int32_t number, const char* name);
  void event(int64_t run, int32_t track, const char* name, int64_t begin, int64_t end,
             OrderedJson arguments);
  void write(const OrderedJson& event);

  std::string path_;
  std::mutex mutex_;
  std::ofstream out_;
  int64_t runs_ = 0;
  int64_t start_ = 0;  // of the trace
  bool first_ = true;
};

// Of the steady clock, in nanoseconds.
int64_t steady_ns();

}  // namespace mla
