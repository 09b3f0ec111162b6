// mla-run run: load once, one run of the file in each mode asked for, and with both the comparison.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/loaded.h"
#include "apps/mla_run/options.h"
#include "lib/batch/output.h"
#include "lib/engine/run_batch.h"
#include "lib/eval/compare.h"

namespace mla {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct RunFlags {
  EngineFlags engine;
  SamplingFlags sampling;
  std::string prompts;
  std::string output = "mla-run-out";
  int64_t limit = -1;
  bool overwrite = false, quiet = false;
  double min_match = 1.0;
};

// A line on stderr every five seconds, and one at the end.
class Progress {
 public:
  Progress(std::string label, bool quiet) : label_(std::move(label)), quiet_(quiet) {}

  void update(const BatchProgress& progress) {
    last_ = progress;
    if (seconds_since(printed_) < 5.0) return;
    printed_ = Clock::now();
    print();
  }
  void print() const {
    if (quiet_) return;
    const double seconds = std::max(seconds_since(start_), 1e-9);
    say("{}: {} of {} requests read, {} failed; {:.0f} prefill tokens/s, {:.1f} decode "
        "tokens/s\n",
        label_, last_.done, last_.read, last_.failed,
        static_cast<double>(last_.prefill_tokens) / seconds,
        static_cast<double>(last_.decode_tokens) / seconds);
  }

 private:
  std::string label_;
  bool quiet_;
  BatchProgress last_;
  Clock::time_point start_ = Clock::now(), printed_ = start_;
};

OrderedJson options_json(const RunFlags& flags, const Loaded& loaded, const MemoryPlan& plan) {
  const SamplingFlags& s = flags.sampling;
  OrderedJson sampling = {
      {"temperature", s.temperature}, {"top_p", s.top_p}, {"top_k", s.top_k},
      {"min_tokens", s.min_tokens},   {"stop", s.stop},   {"stop_token_ids", s.stop_token_ids},
      {"ignore_eos", s.ignore_eos},   {"seed", s.seed}};
  sampling["max_tokens"] = s.max_tokens ? OrderedJson(*s.max_tokens) : OrderedJson(nullptr);
  sampling["prompt_logprobs"] =
      s.prompt_logprobs ? OrderedJson(*s.prompt_logprobs) : OrderedJson(nullptr);
  sampling["generation_config"] = s.generation_config;
  sampling["add_bos"] = s.add_bos;
  sampling["return_token_ids"] = s.return_token_ids;
  sampling["logprobs"] = s.logprobs ? OrderedJson(*s.logprobs) : OrderedJson(nullptr);
  return {{"chunked_prefill", plan.chunked ? "on" : "off"},
          {"max_num_batched_tokens", plan.limits.max_rows},
          {"max_num_seqs", plan.limits.max_seqs},
          {"max_model_len", plan.limits.max_model_len},
          {"mla_workspace_tokens", plan.limits.workspace_rows},
          {"kv_tokens", plan.kv_tokens()},
          {"dtype", std::string(name_of(loaded.dtype))},
          {"device", loaded.backend->name()},
          {"load_format", flags.engine.load_format},
          {"enforce_eager", flags.engine.enforce_eager},
          {"gpu_memory_utilization", loaded.device == DeviceKind::cuda
                                         ? OrderedJson(flags.engine.gpu_memory_utilization)
                                         : OrderedJson(nullptr)},
          {"threads", flags.engine.run_threads()},
          {"limit", flags.limit < 0 ? OrderedJson(nullptr) : OrderedJson(flags.limit)},
          {"sampling", std::move(sampling)}};
}

RunRecord first_record(const RunFlags& flags, const Loaded& loaded, const MemoryPlan& plan) {
  RunRecord record;
  record.version = MLA_VERSION;
  record.build = {{"compiler", __VERSION__},
                  {"backend", loaded.backend->name()},
                  {"device", loaded.memory.name}};
  record.options = options_json(flags, loaded, plan);
  record.model = {{"path", flags.engine.model}, {"fingerprint", loaded.fingerprint}};
  record.input_path = flags.prompts;
  record.memory_plan = to_json(plan);
  record.load_time_s = loaded.load_seconds;
  record.warmup_time_s = loaded.warm_up_seconds;
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

int64_t peak_memory_bytes() {
  struct rusage usage {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

// The input, opened anew for each mode. What can be read only once, standard input or a pipe, is
// kept when it is needed twice. It is opened at once, so that a wrong path is told before anything
// loads.
class Input {
 public:
  Input(const std::string& path, bool twice) : path_(path) {
    if (path_ != "-") first_ = open_file();
    const bool once = path_ == "-" || !std::filesystem::is_regular_file(path_);
    if (!once || !twice) return;
    std::istream& in = first_ ? *first_ : std::cin;
    kept_.emplace(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    check_read();
  }
  std::istream& open() {
    if (kept_) {
      stream_ = std::make_unique<std::istringstream>(*kept_);
    } else if (path_ == "-") {
      return std::cin;
    } else {
      stream_ = first_ ? std::move(first_) : open_file();
    }
    return *stream_;
  }
  // std::cin takes a read error for the end.
  void check_read() const {
    if (path_ == "-" && std::ferror(stdin)) fail("standard input: it could not be read");
  }

 private:
  std::unique_ptr<std::istream> open_file() const {
    if (std::filesystem::is_directory(path_)) fail("{}: expected a file, found a folder", path_);
    auto file = std::make_unique<std::ifstream>(path_, std::ios::binary);
    if (!*file) fail("{}: the prompts cannot be opened: {}", path_, std::strerror(errno));
    return file;
  }

  std::string path_;
  std::optional<std::string> kept_;
  std::unique_ptr<std::istream> first_, stream_;
};

// One mode over the input. True when every line was answered.
bool run_mode(const RunFlags& flags, Loaded& loaded, const MemoryPlan& plan, Input& input,
              OutputWriter writer, const std::string& dir) {
  ReaderOptions reader_options;
  reader_options.defaults = flags.sampling.params(loaded.config.vocab_size);
  reader_options.model = std::filesystem::absolute(flags.engine.model).lexically_normal().string();
  reader_options.vocab_size = loaded.config.vocab_size;
  reader_options.has_tokenizer = loaded.text.tokenizer.has_value();
  RequestReader reader(input.open(), flags.prompts, reader_options);
  const TextSetup text{loaded.text.tokenizer ? &*loaded.text.tokenizer : nullptr,
                       loaded.text.chat_template ? &*loaded.text.chat_template : nullptr};
  Engine engine(loaded.config, *loaded.model, text, plan,
                static_cast<uint64_t>(flags.sampling.seed), loaded.device == DeviceKind::cuda);

  RunRecord record = first_record(flags, loaded, plan);
  const uint64_t memory_at_start = loaded.backend->memory_in_use();
  if (!dir.empty()) write_run_record(dir, record);
  try {
    Progress progress(plan.chunked ? "chunked prefill on" : "chunked prefill off", flags.quiet);
    const BatchOutcome outcome = run_batch(
        reader, engine,
        {.limit = flags.limit, .progress = [&](const BatchProgress& p) { progress.update(p); }},
        [&](int64_t index, const OrderedJson& result) { writer.write(index, result); });
    progress.print();
    input.check_read();  // before the run calls itself finished
    writer.finish();
    warn_of_lines(reader, record);
    record.counts = outcome.counts;
    record.summary = outcome.summary;
    record.summary["peak_memory_bytes"] = peak_memory_bytes();
    if (const uint64_t in_use = loaded.backend->memory_in_use(); in_use > 0) {
      record.summary["device_memory_bytes"] = in_use;
      record.summary["device_memory_bytes_at_start"] = memory_at_start;
    }
    record.input_sha256 = reader.input_hash();
    record.input_bytes = reader.bytes_read();
    record.state = "finished";
    if (!dir.empty()) write_run_record(dir, record);
    return outcome.counts.failed == 0;
  } catch (const std::exception& e) {
    record.state = "failed";
    record.error = e.what();
    try {
      if (!dir.empty()) write_run_record(dir, record);
    } catch (const Error&) {
      // The disk may be what failed; the first error is the one to tell.
    }
    throw;
  }
}

int run(const RunFlags& flags) {
  choose_device(flags.engine.device);  // refuses what this build has not
  const bool both = flags.engine.chunked == "both", to_stdout = flags.output == "-";
  if (both && to_stdout)
    usage_fail("--chunked-prefill both writes two runs: give --output a folder");
  if (!(flags.min_match >= 0 && flags.min_match <= 1))
    usage_fail("--min-match: expected a number in [0, 1], found {}", flags.min_match);
  Input input(flags.prompts, both);
  const std::unique_ptr<Loaded> loaded = prepare(flags.engine);
  flags.sampling.params(loaded->config.vocab_size);  // refuses what is out of range

  std::vector<std::string> dirs;
  for (const bool chunked : flags.engine.modes())
    dirs.push_back(to_stdout ? ""
                   : both    ? flags.output + (chunked ? "/on" : "/off")
                             : flags.output);
  std::vector<OutputWriter> writers;
  for (const std::string& dir : dirs)
    writers.push_back(
        to_stdout ? OutputWriter::to_descriptor(STDOUT_FILENO, "standard output")
                  : OutputWriter(
                        {.dir = dir, .input_path = flags.prompts, .overwrite = flags.overwrite}));

  load(flags.engine, flags.quiet, *loaded);
  bool all_answered = true;
  for (size_t i = 0; i < dirs.size(); ++i) {
    all_answered &=
        run_mode(flags, *loaded, loaded->plans[i], input, std::move(writers[i]), dirs[i]);
  }
  if (both) {
    const CompareReport report = compare_runs(dirs[0], dirs[1]);
    write_file_atomically(flags.output + "/compare.json",
                          to_json(report, flags.min_match).dump(2) + "\n");
    fmt::print("{}", to_text(report, flags.min_match));
    // No request in either run: every line was answered.
    const bool nothing = report.a.requests == 0 && report.b.requests == 0;
    if (!nothing && !passes(report, flags.min_match)) return kExitThreshold;
  } else if (!to_stdout && !flags.quiet) {
    say("wrote {}/{}\n", dirs[0], kOutputsName);
  }
  return all_answered ? kExitOk : kExitSomeFailed;
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
  app.add_flag("--overwrite", flags->overwrite, "Replace the outputs of an earlier run");
  app.add_flag("--quiet", flags->quiet, "No plan and no progress on standard error");
  app.add_option("--min-match", flags->min_match,
                 "With both: exit 4 when a smaller share of tokens or logprob hashes is identical")
      ->capture_default_str();
  return [flags] {
    flags->sampling.take_generation_config(flags->engine.model);
    return run(*flags);
  };
}

}  // namespace mla
