#include "lib/batch/merge.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>

#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "lib/batch/resume.h"
#include "lib/batch/run_record.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

struct ShardRun {
  std::string dir;
  Shard shard;
  Json run;
};

ShardRun read_shard(const std::string& dir) {
  const std::string path = dir + "/" + kRunRecordName;
  if (!fs::exists(path))
    fail("{}: expected the folder of a shard, found no {}", dir, kRunRecordName);
  ShardRun result{.dir = dir, .shard = {}, .run = read_run_record(path)};
  const std::string state = get_string(result.run, "state", path);
  if (state != "finished" || !fs::exists(dir + "/" + kOutputsName))
    fail("{}: expected a finished shard, found one that is {}; run it again with --resume", dir,
         state == "finished" ? fmt::format("without {}", kOutputsName) : state);
  const Json options = result.run.value("options", Json());
  const std::optional<std::string> text =
      options.is_object() ? find_string(options, "shard", path) : std::nullopt;
  const std::optional<Shard> shard = text ? parse_shard(*text) : std::nullopt;
  if (!shard) fail("{}: expected a run with --shard I/N, found {}", dir, text ? *text : "none");
  result.shard = *shard;
  return result;
}

// In the order of I, all of them there.
std::vector<ShardRun> read_shards(const std::vector<std::string>& dirs) {
  std::map<int64_t, ShardRun> shards;
  int64_t count = 0;
  std::string first;
  for (const std::string& dir : dirs) {
    ShardRun run = read_shard(dir);
    if (count == 0) count = run.shard.count, first = dir;
    if (run.shard.count != count)
      fail("{}: expected one of {} shards as {}, found shard {}", dir, count, first,
           run.shard.name());
    const auto [it, fresh] = shards.insert({run.shard.index, run});
    if (!fresh)
      fail("{}: expected each shard once, found shard {} again, which is {} too", dir,
           run.shard.name(), it->second.dir);
  }
  std::vector<ShardRun> result;
  for (int64_t i = 0; i < count; ++i) {
    const auto it = shards.find(i);
    if (it == shards.end())
      fail("expected all {} shards, found {}: shard {}/{} is missing", count, shards.size(), i,
           count);
    result.push_back(it->second);
  }
  for (const ShardRun& run : result) {
    const std::string text = difference(result.front().run, run.run, false);
    if (!text.empty()) fail("{}: not of the run of {}; {}", run.dir, result.front().dir, text);
  }
  return result;
}

int64_t count_of(const ShardRun& run, const char* name) {
  const Json value = run.run.value(Json::json_pointer(fmt::format("/counts/{}", name)), Json());
  return value.is_null() ? 0 : value.get<int64_t>();
}

double summary_number(const ShardRun& run, const char* name) {
  const Json value = run.run.value(Json::json_pointer(fmt::format("/summary/{}", name)), Json());
  return value.is_number() ? value.get<double>() : 0.0;
}

// As if all shards had run at once: the time of the longest.
OrderedJson merged_summary(const std::vector<ShardRun>& shards) {
  double elapsed = 0, requests = 0, input = 0, output = 0, flop = 0, bytes = 0;
  for (const ShardRun& run : shards) {
    elapsed = std::max(elapsed, summary_number(run, "elapsed_time"));
    requests += summary_number(run, "num_requests");
    input += summary_number(run, "total_input_tokens");
    output += summary_number(run, "total_output_tokens");
    flop += summary_number(run, "flop");
    bytes += summary_number(run, "bytes");
  }
  const auto rate = [&](double amount) { return elapsed > 0 ? amount / elapsed : 0.0; };
  return {{"elapsed_time", elapsed},
          {"num_requests", static_cast<int64_t>(requests)},
          {"total_num_tokens", static_cast<int64_t>(input + output)},
          {"total_input_tokens", static_cast<int64_t>(input)},
          {"total_output_tokens", static_cast<int64_t>(output)},
          {"requests_per_second", rate(requests)},
          {"tokens_per_second", rate(input + output)},
          {"request_throughput", rate(requests)},
          {"output_throughput", rate(output)},
          {"total_token_throughput", rate(input + output)},
          {"flop", flop},
          {"bytes", bytes},
          {"tflop_per_second", rate(flop) / 1e12},
          {"gbyte_per_second", rate(bytes) / 1e9}};
}

RunRecord merged_record(const std::vector<ShardRun>& shards) {
  // Read again in the order it was written in.
  const std::string path = shards.front().dir + "/" + kRunRecordName;
  const OrderedJson first = parse_ordered_json(read_file(path), path);
  const auto field = [&](const char* name) {
    const auto it = first.find(name);
    return it == first.end() ? OrderedJson() : *it;
  };
  RunRecord record;
  record.state = "finished";
  record.version = find_string(shards.front().run, "version", path).value_or("");
  record.build = field("build");
  record.options = field("options");
  record.options["shard"] = nullptr;
  record.model = field("model");
  record.memory_plan = field("memory_plan");
  const Json input = shards.front().run.value("input", Json::object());
  record.input_path = find_string(input, "path", path).value_or("");
  record.input_sha256 = find_string(input, "sha256", path).value_or("");
  record.input_bytes = find_int(input, "bytes", path).value_or(0);
  record.input_records = find_int(input, "records", path).value_or(0);
  record.shards = OrderedJson::array();
  RunCounts& c = record.counts;
  const std::pair<const char*, int64_t*> counts[] = {{"requests", &c.requests},
                                                     {"kept", &c.kept},
                                                     {"ok", &c.ok},
                                                     {"failed", &c.failed},
                                                     {"chunks", &c.chunks},
                                                     {"prompts_split", &c.prompts_split},
                                                     {"passes", &c.passes},
                                                     {"steps", &c.steps},
                                                     {"preemptions", &c.preemptions},
                                                     {"cached_tokens", &c.cached_tokens}};
  for (const ShardRun& run : shards) {
    for (const auto& [name, sum] : counts) *sum += count_of(run, name);
    record.shards.push_back({{"shard", run.shard.name()},
                             {"folder", run.dir},
                             {"load_time", run.run.value("load_time", Json())},
                             {"summary", run.run.value("summary", Json())}});
  }
  record.summary = merged_summary(shards);
  return record;
}

void check_output(const MergeOptions& options) {
  for (const std::string& dir : options.dirs) {
    std::error_code ignored;
    if (fs::equivalent(dir, options.output, ignored))
      usage_fail("--output {}: expected a folder other than those of the shards", options.output);
  }
}

// Each record of the input once, whatever the folders say of themselves.
void copy_records(const std::vector<ShardRun>& shards, int64_t records, OutputWriter& writer) {
  std::vector<bool> seen(static_cast<size_t>(records));
  for (const ShardRun& run : shards) {
    const std::string path = run.dir + "/" + kOutputsName;
    const auto copy = [&](const RecordKey& key, const RecordPlace&, std::string_view line) {
      if (!run.shard.has(key.index) || key.index >= records)
        fail("{}: expected records of shard {} of {} records, found index {}", path,
             run.shard.name(), records, key.index);
      if (seen[static_cast<size_t>(key.index)])
        fail("{}: expected each record once, found index {} again", path, key.index);
      seen[static_cast<size_t>(key.index)] = true;
      writer.write_line(key.index, line);
    };
    if (for_each_record(path, copy) != static_cast<int64_t>(fs::file_size(path)))
      fail("{}: expected whole records, found a torn last line", path);
  }
  const auto missing = std::find(seen.begin(), seen.end(), false);
  if (missing != seen.end()) {
    const int64_t index = missing - seen.begin();
    const ShardRun& run = shards[static_cast<size_t>(index) % shards.size()];
    fail("{}/{}: expected a record with index {}, found none", run.dir, kOutputsName, index);
  }
}

}  // namespace

MergeOutcome merge_shards(const MergeOptions& options) {
  check_output(options);
  const std::vector<ShardRun> shards = read_shards(options.dirs);
  const RunRecord record = merged_record(shards);
  for (const ShardRun& run : shards) {
    const Json found = run.run.value(Json::json_pointer("/input/records"), Json());
    const int64_t records = found.is_null() ? -1 : found.get<int64_t>();
    if (records != record.input_records)
      fail("{}: expected an input of {} records as in {}, found {}", run.dir, record.input_records,
           shards.front().dir, records);
  }
  OutputWriter writer({.dir = options.output,
                       .input_path = record.input_path,
                       .overwrite = options.overwrite,
                       .earlier = nullptr});
  try {
    copy_records(shards, record.input_records, writer);
  } catch (const Error&) {
    writer.discard();
    throw;
  }
  writer.finish();
  write_run_record(options.output, record);
  return {.records = record.counts.requests, .failed = record.counts.failed};
}

}  // namespace mla
