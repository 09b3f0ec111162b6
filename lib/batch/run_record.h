// run.json: what ran, on what, how fast.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/batch/result.h"

namespace mla {

// Many values in bounded memory: exact up to kExactValues, beyond that percentiles come from
// buckets 1% wide. Count, mean, standard deviation and maximum are always of all values.
class Distribution {
 public:
  static constexpr size_t kExactValues = size_t{1} << 20;

  explicit Distribution(size_t exact_values = kExactValues) : exact_values_(exact_values) {}
  void add(double value);  // finite
  int64_t count() const { return count_; }
  double mean() const { return mean_; }  // 0 without values, as vLLM's bench; the rest likewise
  double std_dev() const;                // of the population (numpy's std)
  double max() const { return max_; }
  // p in [0, 100], linear interpolation as numpy.percentile.
  double percentile(double p) const;

 private:
  size_t exact_values_;
  int64_t count_ = 0;
  double mean_ = 0, sum_squares_ = 0, max_ = 0;  // Welford
  mutable std::vector<double> values_;           // while there are at most exact_values_
  mutable bool sorted_ = true;
  std::map<int32_t, int64_t> buckets_;  // floor(log(value) / log(1.01)) → count
};

// numpy.percentile(values, p), linear; `sorted` is ascending and not empty.
double percentile(const std::vector<double>& sorted, double p);

// Collects finished requests into the figures of vLLM's throughput and serving benches. A prompt
// counts once a request; generated tokens and times are those of every choice.
class SummaryBuilder {
 public:
  void add(const Result& result);
  // `elapsed_s`: from the first arrival to the last token, loading and warm-up not included.
  OrderedJson summary(double elapsed_s) const;

 private:
  int64_t requests_ = 0, prompt_tokens_ = 0, output_tokens_ = 0;
  Distribution ttft_, tpot_, itl_, e2el_;
};

struct RunCounts {
  int64_t requests = 0;  // ok + failed at the end
  int64_t kept = 0;      // of them, finished by an earlier run that this one resumed
  int64_t ok = 0;
  int64_t failed = 0;
  int64_t prompts_split = 0;  // prompts that ran in more than one step; one of each choice
  int64_t chunks = 0;         // prefill spans over all steps
  int64_t cached_tokens = 0;  // of prompts, whose KV pages were there already
  int64_t passes = 0;         // passes over the workspace
  int64_t preemptions = 0;
  int64_t steps = 0;
};

// States: "running", then "finished" (every line has its record), "interrupted" (a signal),
// "stopped" (--fail-fast) or "failed".
struct RunRecord {
  std::string state = "running";
  std::string version;  // of the program
  OrderedJson build;    // compiler, backends, drivers; as the application has them
  OrderedJson options;  // effective, as the application has them
  OrderedJson model;    // path, fingerprint, hashes of the files beside the weights
  std::string input_path;
  std::string input_sha256;  // of the whole file; "" until it is known (a stream: at the end)
  int64_t input_bytes = 0;
  int64_t input_records = 0;  // lines that are not blank, those of other shards included
  OrderedJson memory_plan;
  RunCounts counts;
  std::optional<double> load_time_s, warmup_time_s;
  OrderedJson summary;   // of SummaryBuilder, and what the engine adds; null while running
  OrderedJson timeline;  // what steps computed, see lib/engine/timeline.h; null while running
  std::vector<std::string> warnings;
  std::string error;   // of a failed or stopped run
  OrderedJson shards;  // of a merged run: folder, time and summary of each; else null
};

OrderedJson to_json(const RunRecord& record);

// Reads a run.json. Throws Error that names the file where it is not JSON, or where a field that is
// read anywhere has another type than to_json gives it. Fields may be absent or null.
Json read_run_record(const std::string& path);

// DIR/run.json, atomically.
void write_run_record(const std::string& dir, const RunRecord& record);

}  // namespace mla
