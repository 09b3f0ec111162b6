#include "apps/mla_run/run_mode.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <unordered_set>

#include "apps/mla_run/interrupt.h"
#include "lib/engine/run_batch.h"
#include "lib/engine/work_count.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

OrderedJson sampling_json(const SamplingFlags& s) {
  OrderedJson sampling = {
      {"temperature", s.temperature}, {"top_p", s.top_p}, {"top_k", s.top_k},
      {"min_tokens", s.min_tokens},   {"stop", s.stop},   {"stop_token_ids", s.stop_token_ids},
      {"ignore_eos", s.ignore_eos},   {"seed", s.seed}};
  sampling["min_p"] = s.min_p;
  sampling["presence_penalty"] = s.presence_penalty;
  sampling["frequency_penalty"] = s.frequency_penalty;
  sampling["repetition_penalty"] = s.repetition_penalty;
  sampling["max_tokens"] = s.max_tokens ? OrderedJson(*s.max_tokens) : OrderedJson(nullptr);
  sampling["prompt_logprobs"] =
      s.prompt_logprobs ? OrderedJson(*s.prompt_logprobs) : OrderedJson(nullptr);
  sampling["generation_config"] = s.generation_config;
  sampling["add_bos"] = s.add_bos;
  sampling["return_token_ids"] = s.return_token_ids;
  sampling["logprobs"] = s.logprobs ? OrderedJson(*s.logprobs) : OrderedJson(nullptr);
  return sampling;
}

// What is added here is checked by --resume, unless resume.cpp says that it changes no bit.
OrderedJson options_json(const RunFlags& flags, const Loaded& loaded, const MemoryPlan& plan) {
  return {{"chunked_prefill", mode_name(plan.chunked)},
          {"max_num_batched_tokens", plan.limits.max_rows},
          {"max_num_seqs", plan.limits.max_seqs},
          {"max_model_len", plan.limits.max_model_len},
          {"mla_workspace_tokens", plan.limits.workspace_rows},
          {"kv_tokens", plan.kv_tokens()},
          {"dtype", std::string(name_of(loaded.dtype))},
          {"device", loaded.backend->name()},
          {"load_format", flags.engine.load_format},
          {"enforce_eager", flags.engine.enforce_eager},
          {"enable_prefix_caching", plan.prefix_caching},
          {"gpu_memory_utilization", loaded.device == DeviceKind::cuda
                                         ? OrderedJson(flags.engine.gpu_memory_utilization)
                                         : OrderedJson(nullptr)},
          {"tensor_parallel_size", plan.limits.ranks},
          {"data_parallel_size", flags.engine.data_parallel},
          {"threads", flags.engine.run_threads()},
          {"limit", flags.limit < 0 ? OrderedJson(nullptr) : OrderedJson(flags.limit)},
          {"shard", flags.shard.empty() ? OrderedJson(nullptr) : OrderedJson(flags.shard)},
          {"sampling", sampling_json(flags.sampling)}};
}

RunRecord first_record(const RunFlags& flags, const Loaded& loaded, const MemoryPlan& plan,
                       const std::optional<InputScan>& scan) {
  RunRecord record;
  record.version = MLA_VERSION;
  record.build = {{"compiler", __VERSION__},
                  {"backend", loaded.backend->name()},
                  {"device", loaded.memory.name}};
  record.options = options_json(flags, loaded, plan);
  record.model = {
      {"path", flags.engine.model}, {"fingerprint", loaded.fingerprint}, {"files", loaded.files}};
  record.input_path = flags.prompts;
  if (scan) {
    record.input_sha256 = scan->sha256;
    record.input_bytes = scan->bytes;
    record.input_records = scan->records;
    if (flags.limit >= 0) record.input_records = std::min(record.input_records, flags.limit);
  }
  record.memory_plan = to_json(plan);
  record.warnings = loaded.warnings;
  if (!plan.note.empty()) record.warnings.push_back(plan.note);
  return record;
}

void warn_of_lines(const RequestReader& reader, RunRecord& record) {
  const auto warn = [&](const char* what, const auto& names) {
    for (const auto& [name, field] : names) {
      record.warnings.push_back(fmt::format("{} '{}' in {} lines, first in line {}", what, name,
                                            field.lines, field.first_line));
      print_warnings({record.warnings.back()});
    }
  };
  warn("unknown field", reader.unknown_fields());
  warn("this model answers for the model", reader.other_models());
}

bool is_answer(const OrderedJson& record) {
  return record.contains("response") ? !record.at("response").at("body").contains("error")
                                     : record.at("status") == "ok";
}

int64_t peak_memory_bytes() {
  struct rusage usage {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

// The indices of the records that an earlier run has finished.
std::unordered_set<int64_t> finished_indices(const EarlierOutput& earlier) {
  std::unordered_set<int64_t> indices;
  for (const auto* places : {&earlier.partial, &earlier.outputs})
    for (const RecordPlace& place : *places) indices.insert(place.index);
  return indices;
}

// What the engines computed together, each counted on its own thread.
void add_work(const std::deque<Work>& of_engines, OrderedJson& summary) {
  Work work;
  for (const Work& one : of_engines) work += one;
  const double seconds = summary.at("elapsed_time");
  summary["flop"] = work.flop;
  summary["bytes"] = work.bytes;
  summary["tflop_per_second"] = work.tflop_per_second(seconds);
  summary["gbyte_per_second"] = work.gbyte_per_second(seconds);
}

// The most of any device.
uint64_t memory_in_use(const Loaded& loaded) {
  uint64_t most = 0;
  for (const auto& model : loaded.models) most = std::max(most, model->memory_in_use());
  return most;
}

}  // namespace

ReaderOptions reader_options(const RunFlags& flags, const Loaded& loaded, const Input& input) {
  ReaderOptions options;
  options.defaults = flags.sampling.params(loaded.config.vocab_size);
  options.model = fs::absolute(flags.engine.model).lexically_normal().string();
  options.vocab_size = loaded.config.vocab_size;
  options.has_tokenizer = loaded.text.tokenizer.has_value();
  options.ready = [&input] { return input.ready(); };
  return options;
}

ModeRun::ModeRun(const RunFlags& flags, const Loaded& loaded, const MemoryPlan& plan,
                 const Input& input, std::string dir, std::string label)
    : flags_(flags), plan_(plan), dir_(std::move(dir)), label_(std::move(label)) {
  if (!flags.shard.empty()) {
    const std::optional<Shard> shard = parse_shard(flags.shard);
    if (!shard) usage_fail("--shard: expected I/N with 0 <= I < N, found '{}'", flags.shard);
    shard_ = *shard;
  }
  record_ = first_record(flags, loaded, plan, input.scan());
  if (!flags.resume) return;
  earlier_ = read_earlier_output(dir_);
  if (!earlier_.empty()) check_same_run(dir_, record_);
  record_.counts.requests = record_.counts.ok = record_.counts.kept = earlier_.kept();
}

void ModeRun::write_record() const {
  if (!dir_.empty()) write_run_record(dir_, record_);
}

void ModeRun::open() {
  if (complete()) return close_complete();
  if (dir_.empty()) {
    writer_.emplace(OutputWriter::to_descriptor(STDOUT_FILENO, "standard output"));
  } else {
    writer_.emplace(OutputWriter({.dir = dir_,
                                  .input_path = flags_.prompts,
                                  .overwrite = flags_.overwrite,
                                  .earlier = flags_.resume ? &earlier_ : nullptr}));
  }
  write_record();
}

// The earlier run was ended between the rename of its outputs and its last word in run.json.
void ModeRun::close_complete() const {
  const std::string path = dir_ + "/" + kRunRecordName;
  OrderedJson run = OrderedJson::parse(read_file(path));
  if (run["state"] != "finished") {
    run["state"] = "finished";
    run.erase("error");
    run["counts"]["requests"] = run["counts"]["ok"] = run["counts"]["kept"] = earlier_.kept();
    write_file_atomically(path, run.dump(2) + "\n");
  }
  for (const std::string& left : {std::string(kPartialName), std::string(kOutputsName) + ".tmp"}) {
    std::error_code ignored;
    fs::remove(dir_ + "/" + left, ignored);
  }
}

bool ModeRun::run(Loaded& loaded, Input& input, Progress& progress, StepTrace& trace) {
  record_.load_time_s = loaded.load_seconds;
  record_.warmup_time_s = loaded.warm_up_seconds;
  const std::string communication = loaded.models.front()->communication();
  if (!communication.empty()) record_.build["communication"] = communication;
  write_record();
  RequestReader reader(input.open(), flags_.prompts, reader_options(flags_, loaded, input));
  const TextSetup text{loaded.text.tokenizer ? &*loaded.text.tokenizer : nullptr,
                       loaded.text.chat_template ? &*loaded.text.chat_template : nullptr};
  const WorkCounter counter = work_counter(loaded);
  std::deque<Work> work;  // of each engine
  std::deque<Engine> engines;
  std::vector<Engine*> all;
  for (const auto& model : loaded.models) {
    const bool alone = loaded.models.size() == 1;
    Engine& engine = engines.emplace_back(loaded.config, *model, text, plan_,
                                          static_cast<uint64_t>(flags_.sampling.seed),
                                          loaded.device == DeviceKind::cuda);
    engine.observe([&counter, &sum = work.emplace_back()](const StepPlan& plan) {
      sum += counter.step(plan);
    });
    engine.trace(trace, alone ? label_ : fmt::format("{}, engine {}", label_, all.size()));
    all.push_back(&engine);
  }
  const uint64_t memory_at_start = memory_in_use(loaded);

  const std::unordered_set<int64_t> finished = finished_indices(earlier_);
  progress.running(label_, input.scan() ? shard_.size(record_.input_records) - earlier_.kept() : -1,
                   earlier_.kept());
  const BatchOutcome outcome = run_batch(
      reader, all,
      {.limit = flags_.limit,
       .skip = [&](int64_t index) { return !shard_.has(index) || finished.count(index) > 0; },
       .stop = interrupted,
       .fail_fast = flags_.fail_fast,
       .progress = [&](const BatchProgress& p) { progress.update(p); }},
      [&](int64_t index, const OrderedJson& result) {
        writer_->write(index, result);
        ++record_.counts.requests;  // for a run that fails; of one that ends, the outcome has all
        ++(is_answer(result) ? record_.counts.ok : record_.counts.failed);
      });
  progress.finish();
  record_.counts = outcome.counts;
  record_.counts.kept = earlier_.kept();
  record_.counts.requests += earlier_.kept();
  record_.counts.ok += earlier_.kept();
  record_.summary = outcome.summary;
  add_work(work, record_.summary);
  record_.timeline = outcome.timeline;
  if (outcome.end == BatchEnd::stopped) check_interrupt();
  if (outcome.end == BatchEnd::failed_fast)
    throw Stopped("stopped at the first failed line (--fail-fast): " + outcome.first_failure);
  input.check_read();  // before the run calls itself finished
  finish(reader, loaded, memory_at_start);
  return outcome.counts.failed == 0;
}

void ModeRun::finish(const RequestReader& reader, const Loaded& loaded, uint64_t memory_at_start) {
  // All of a file was read but for its end behind --limit.
  if (record_.input_sha256.empty() || flags_.limit < 0) {
    if (!record_.input_sha256.empty() && record_.input_sha256 != reader.input_hash())
      fail("{}: expected the bytes there were at the start, found others: it was changed",
           flags_.prompts);
    record_.input_sha256 = reader.input_hash();
    record_.input_bytes = reader.bytes_read();
    record_.input_records = reader.records();
  }
  writer_->finish();
  warn_of_lines(reader, record_);
  record_.summary["peak_memory_bytes"] = peak_memory_bytes();
  if (const uint64_t in_use = memory_in_use(loaded); in_use > 0) {
    record_.summary["device_memory_bytes"] = in_use;
    record_.summary["device_memory_bytes_at_start"] = memory_at_start;
  }
  record_.state = "finished";
  write_record();
  ended_ = true;
}

void ModeRun::end(const std::string& state, const std::string& error) {
  if (ended_ || !writer_) return;
  ended_ = true;
  record_.state = state;
  record_.error = error;
  try {
    write_record();
  } catch (const std::exception&) {
    // The disk may be what failed; the first error is the one to tell.
  }
}

}  // namespace mla
