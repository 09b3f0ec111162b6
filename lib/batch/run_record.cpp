#include "lib/batch/run_record.h"

#include <algorithm>
#include <cmath>

#include "lib/base/error.h"
#include "lib/batch/output.h"

namespace mla {
namespace {

const double kLogBucket = std::log(1.01);
constexpr int32_t kZeroBucket = INT32_MIN;  // of values that are not above 0

int32_t bucket_of(double value) {
  if (!(value > 0)) return kZeroBucket;
  return static_cast<int32_t>(std::floor(std::log(value) / kLogBucket));
}

// The geometric middle, so that a percentile is off by 0.5% at most.
double bucket_value(int32_t bucket) {
  return bucket == kZeroBucket ? 0.0 : std::exp((bucket + 0.5) * kLogBucket);
}

}  // namespace

double percentile(const std::vector<double>& sorted, double p) {
  const double place = p / 100 * static_cast<double>(sorted.size() - 1);
  const auto below = std::min(static_cast<size_t>(place), sorted.size() - 1);
  const auto above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (place - static_cast<double>(below));
}

void Distribution::add(double value) {
  if (!std::isfinite(value)) fail("a timing: expected a finite number, found {}", value);
  ++count_;
  max_ = count_ == 1 ? value : std::max(max_, value);
  const double delta = value - mean_;
  mean_ += delta / static_cast<double>(count_);
  sum_squares_ += delta * (value - mean_);
  if (buckets_.empty() && values_.size() < exact_values_) {
    sorted_ = false;
    values_.push_back(value);
    return;
  }
  for (const double kept : values_) ++buckets_[bucket_of(kept)];
  values_ = {};
  ++buckets_[bucket_of(value)];
}

double Distribution::std_dev() const {
  return count_ == 0 ? 0 : std::sqrt(sum_squares_ / static_cast<double>(count_));
}

double Distribution::percentile(double p) const {
  if (count_ == 0) return 0;
  if (buckets_.empty()) {
    if (!sorted_) std::sort(values_.begin(), values_.end());
    sorted_ = true;
    return mla::percentile(values_, p);
  }
  const double place = p / 100 * static_cast<double>(count_ - 1);
  double seen = 0;
  for (const auto& [bucket, count] : buckets_) {
    seen += static_cast<double>(count);
    if (place < seen) return std::min(bucket_value(bucket), max_);
  }
  return max_;
}

void SummaryBuilder::add(const Result& result) {
  ++requests_;
  prompt_tokens_ += result.prompt_tokens;
  output_tokens_ += result.completion_tokens();
  for (const Choice& choice : result.choices) {
    ttft_.add(choice.timing.ttft_ms());
    e2el_.add(choice.timing.e2e_ms());
    if (const auto tpot = choice.timing.tpot_ms()) tpot_.add(*tpot);
    for (const float itl : choice.timing.itl_ms()) itl_.add(itl);
  }
}

OrderedJson SummaryBuilder::summary(double elapsed_s) const {
  const auto total = static_cast<double>(prompt_tokens_ + output_tokens_);
  const auto rate = [&](double amount) { return elapsed_s > 0 ? amount / elapsed_s : 0.0; };
  OrderedJson s;
  s["elapsed_time"] = elapsed_s;
  s["num_requests"] = requests_;
  s["total_num_tokens"] = prompt_tokens_ + output_tokens_;
  s["total_input_tokens"] = prompt_tokens_;
  s["total_output_tokens"] = output_tokens_;
  s["requests_per_second"] = rate(static_cast<double>(requests_));
  s["tokens_per_second"] = rate(total);
  s["request_throughput"] = rate(static_cast<double>(requests_));
  s["output_throughput"] = rate(static_cast<double>(output_tokens_));
  s["total_token_throughput"] = rate(total);
  const std::pair<const char*, const Distribution*> all[] = {
      {"ttft", &ttft_}, {"tpot", &tpot_}, {"itl", &itl_}, {"e2el", &e2el_}};
  for (const auto& [name, values] : all) {
    s[fmt::format("mean_{}_ms", name)] = values->mean();
    s[fmt::format("median_{}_ms", name)] = values->percentile(50);
    s[fmt::format("std_{}_ms", name)] = values->std_dev();
    for (const int p : {90, 95, 99}) s[fmt::format("p{}_{}_ms", p, name)] = values->percentile(p);
  }
  return s;
}

OrderedJson to_json(const RunRecord& record) {
  const auto number = [](const std::optional<double>& value) {
    return value ? OrderedJson(*value) : OrderedJson(nullptr);
  };
  const RunCounts& c = record.counts;
  OrderedJson j;
  j["state"] = record.state;
  j["version"] = record.version;
  j["build"] = record.build;
  j["options"] = record.options;
  j["model"] = record.model;
  j["input"] = {{"path", record.input_path},
                {"sha256", record.input_sha256.empty() ? OrderedJson(nullptr)
                                                       : OrderedJson(record.input_sha256)},
                {"bytes", record.input_bytes},
                {"records", record.input_records}};
  j["memory_plan"] = record.memory_plan;
  j["counts"] = {{"requests", c.requests},
                 {"kept", c.kept},
                 {"ok", c.ok},
                 {"failed", c.failed},
                 {"prompts_split", c.prompts_split},
                 {"chunks", c.chunks},
                 {"cached_tokens", c.cached_tokens},
                 {"passes", c.passes},
                 {"preemptions", c.preemptions},
                 {"steps", c.steps}};
  j["load_time"] = number(record.load_time_s);
  j["warmup_time"] = number(record.warmup_time_s);
  j["summary"] = record.summary;
  if (!record.timeline.is_null()) j["timeline"] = record.timeline;
  if (!record.shards.is_null()) j["shards"] = record.shards;
  j["warnings"] = record.warnings;
  if (!record.error.empty()) j["error"] = record.error;
  return j;
}

namespace {

bool is_integer(const Json& value) { return value.is_number_integer(); }
bool is_number(const Json& value) { return value.is_number(); }
bool is_string(const Json& value) { return value.is_string(); }
bool is_object(const Json& value) { return value.is_object(); }
bool is_numbers(const Json& value) {
  return value.is_array() && std::all_of(value.begin(), value.end(), is_number);
}
bool is_sizes(const Json& value) {
  return value.is_object() && std::all_of(value.begin(), value.end(), is_number);
}

struct Field {
  const char* pointer;
  bool (*has_type)(const Json&);
  const char* expected;
};

// Objects before what is in them.
constexpr Field kFields[] = {{"", is_object, "an object"},
                             {"/state", is_string, "a string"},
                             {"/version", is_string, "a string"},
                             {"/options", is_object, "an object"},
                             {"/options/load_format", is_string, "a string"},
                             {"/options/shard", is_string, "a string"},
                             {"/model", is_object, "an object"},
                             {"/model/fingerprint", is_string, "a string"},
                             {"/model/files", is_object, "an object"},
                             {"/input", is_object, "an object"},
                             {"/input/path", is_string, "a string"},
                             {"/input/sha256", is_string, "a string"},
                             {"/input/bytes", is_integer, "an integer"},
                             {"/input/records", is_integer, "an integer"},
                             {"/memory_plan", is_object, "an object"},
                             {"/memory_plan/bytes", is_sizes, "an object of numbers"},
                             {"/counts", is_object, "an object"},
                             {"/counts/requests", is_integer, "an integer"},
                             {"/counts/kept", is_integer, "an integer"},
                             {"/counts/ok", is_integer, "an integer"},
                             {"/counts/failed", is_integer, "an integer"},
                             {"/counts/prompts_split", is_integer, "an integer"},
                             {"/counts/chunks", is_integer, "an integer"},
                             {"/counts/cached_tokens", is_integer, "an integer"},
                             {"/counts/passes", is_integer, "an integer"},
                             {"/counts/preemptions", is_integer, "an integer"},
                             {"/counts/steps", is_integer, "an integer"},
                             {"/summary", is_object, "an object"},
                             {"/timeline", is_object, "an object"},
                             {"/timeline/seconds", is_numbers, "a list of numbers"},
                             {"/timeline/prefill_tokens", is_numbers, "a list of numbers"},
                             {"/timeline/decode_tokens", is_numbers, "a list of numbers"},
                             {"/timeline/steps_per_entry", is_number, "a number"}};

}  // namespace

Json read_run_record(const std::string& path) {
  Json run = parse_json(read_file(path), path);
  for (const Field& field : kFields) {
    const Json::json_pointer at(field.pointer);
    if (!run.contains(at) || run.at(at).is_null()) continue;
    if (!field.has_type(run.at(at)))
      fail("{}: field '{}': expected {}, found {}", path, field.pointer, field.expected,
           describe(run.at(at)));
  }
  if (run.is_null()) fail("{}: expected an object, found null", path);
  return run;
}

void write_run_record(const std::string& dir, const RunRecord& record) {
  std::string text;
  try {
    text = to_json(record).dump(2) + "\n";
  } catch (const OrderedJson::exception& e) {
    fail("{}/{}: a value is not UTF-8: {}", dir, kRunRecordName, e.what());
  }
  write_file_atomically(dir + "/" + kRunRecordName, text);
}

}  // namespace mla
