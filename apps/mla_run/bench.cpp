// mla-run bench: synthetic work through the engine, and what the device could do at best.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/loaded.h"
#include "apps/mla_run/named_file.h"
#include "apps/mla_run/options.h"
#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "lib/engine/workload.h"

namespace mla {
namespace {

constexpr int64_t kMaxCount = 1 << 28;

struct BenchFlags {
  EngineFlags engine;
  SamplingFlags sampling;
  bool prefill = false, decode = false, json = false, quiet = false;
  std::optional<int64_t> input_len, output_len, num_prompts, batch;
  int64_t repeats = 5;
  std::vector<std::string> workloads;
  std::string output;
};

void check_count(const char* option, std::optional<int64_t> value) {
  if (value && (*value < 1 || *value > kMaxCount))
    usage_fail("{}: expected 1 to {}, found {}", option, kMaxCount, *value);
}

// The workload of --prefill, --decode, --input-len …
Workload single_workload(const BenchFlags& f) {
  if (f.prefill && f.decode) usage_fail("expected one of --prefill and --decode, found both");
  check_count("--input-len", f.input_len);
  check_count("--output-len", f.output_len);
  check_count("--num-prompts", f.num_prompts);
  check_count("--batch", f.batch);
  if (f.prefill && f.output_len.value_or(1) != 1)
    usage_fail("--prefill generates one token a prompt: expected --output-len 1, found {}",
               *f.output_len);
  if (f.decode && f.batch && f.num_prompts && *f.batch != *f.num_prompts)
    usage_fail("--decode runs --batch prompts at once: expected --num-prompts {}, found {}",
               *f.batch, *f.num_prompts);
  Workload w;
  w.kind = f.prefill  ? WorkloadKind::prefill
           : f.decode ? WorkloadKind::decode
                      : WorkloadKind::mixed;
  const int64_t prompts = f.num_prompts.value_or(f.decode ? f.batch.value_or(16) : 16);
  w.prompts = static_cast<int32_t>(prompts);
  w.input_len = static_cast<int32_t>(f.input_len.value_or(1024));
  w.output_len = static_cast<int32_t>(f.output_len.value_or(f.prefill ? 1 : 128));
  return w;
}

std::vector<Workload> choose_workloads(const BenchFlags& f) {
  if (f.repeats < 1 || f.repeats > 1000)
    usage_fail("--repeats: expected 1 to 1000, found {}", f.repeats);
  if (f.workloads.empty()) return {single_workload(f)};
  const auto beside = [](bool given, const char* option) {
    if (given) usage_fail("--workload says it all: expected no {} beside it", option);
  };
  beside(f.prefill, "--prefill");
  beside(f.decode, "--decode");
  beside(f.input_len.has_value(), "--input-len");
  beside(f.output_len.has_value(), "--output-len");
  beside(f.num_prompts.has_value(), "--num-prompts");
  beside(f.batch.has_value(), "--batch");
  std::vector<Workload> workloads;
  for (const std::string& text : f.workloads) workloads.push_back(parse_workload(text));
  return workloads;
}

// Limits that cover every workload, where the user gives none.
EngineFlags cover(const BenchFlags& f, const std::vector<Workload>& workloads,
                  const ModelConfig& config) {
  EngineFlags engine = f.engine;
  int64_t longest = 0;
  const Workload* widest = nullptr;  // of decode
  for (const Workload& w : workloads) {
    if (w.model_len() > config.max_position_embeddings)
      usage_fail("{} needs {} positions ({} prompt tokens and {} generated), the model has {}",
                 w.name(), w.model_len(), w.input_len, w.max_tokens(),
                 config.max_position_embeddings);
    longest = std::max(longest, w.model_len());
    if (w.kind == WorkloadKind::decode && (!widest || w.prompts > widest->prompts)) widest = &w;
  }
  if (!engine.max_model_len) engine.max_model_len = static_cast<int32_t>(longest);

  if (f.batch && !f.decode) {
    if (engine.max_seqs && *engine.max_seqs != *f.batch)
      usage_fail("--batch is --max-num-seqs here: expected {}, found {}", *f.batch,
                 *engine.max_seqs);
    engine.max_seqs = static_cast<int32_t>(*f.batch);
  }
  const int32_t together = widest ? widest->prompts : 1;
  if (!engine.max_seqs)
    engine.max_seqs =
        std::max(EngineFlags::default_max_seqs(choose_device(engine.device)), together);
  if (widest && *engine.max_seqs < together)
    usage_fail("--max-num-seqs: expected at least the {} sequences of {}, found {}", together,
               widest->name(), *engine.max_seqs);
  return engine;
}

struct Stats {
  double median, min, max;
};

template <class Of>
Stats stats_of(const std::vector<Measured>& runs, const Of& of) {
  std::vector<double> values;
  for (const Measured& run : runs) values.push_back(of(run));
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {(values[(n - 1) / 2] + values[n / 2]) / 2, values.front(), values.back()};
}

double tokens_per_second(const Measured& m) { return static_cast<double>(m.tokens) / m.seconds; }
double step_ms(const Measured& m) { return 1000 * m.seconds / static_cast<double>(m.steps); }

// A workload in one mode.
struct Outcome {
  Workload workload;
  bool chunked;
  std::vector<Measured> runs;

  double median(double (*of)(const Measured&)) const { return stats_of(runs, of).median; }
  double tflops() const {
    return median([](const Measured& m) { return m.work.tflop_per_second(m.seconds); });
  }
  double gbytes() const {
    return median([](const Measured& m) { return m.work.gbyte_per_second(m.seconds); });
  }
  bool has_limit() const { return runs.front().limit_seconds > 0; }
  double share() const {
    return median([](const Measured& m) { return m.limit_seconds / m.seconds; });
  }
  double host_share() const {
    return median([](const Measured& m) { return m.host_share; });
  }
};

constexpr const char* kKindNames[] = {"prefill", "decode", "mixed"};

OrderedJson to_json(const Outcome& o) {
  const Measured& first = o.runs.front();
  const Stats rate = stats_of(o.runs, tokens_per_second);
  OrderedJson repeats = OrderedJson::array();
  for (const Measured& m : o.runs)
    repeats.push_back({{"seconds", m.seconds},
                       {"tokens", m.tokens},
                       {"tokens_per_second", tokens_per_second(m)},
                       {"steps", m.steps},
                       {"step_ms", step_ms(m)},
                       {"host_share", m.host_share},
                       {"preemptions", m.preemptions}});
  OrderedJson limit = nullptr;
  if (o.has_limit())
    limit = {{"seconds", first.limit_seconds},
             {"tokens_per_second", static_cast<double>(first.tokens) / first.limit_seconds},
             {"share", o.share()}};
  return {{"workload", o.workload.name()},
          {"kind", kKindNames[static_cast<size_t>(o.workload.kind)]},
          {"chunked_prefill", mode_name(o.chunked)},
          {"num_prompts", o.workload.prompts},
          {"input_len", o.workload.input_len},
          {"output_len", o.workload.output_len},
          {"tokens", first.tokens},
          {"steps", first.steps},
          {"steps_not_counted", first.steps_apart},
          {"tokens_per_second", {{"median", rate.median}, {"min", rate.min}, {"max", rate.max}}},
          {"step_ms", o.median(step_ms)},
          {"host_share", o.host_share()},
          {"flop", first.work.flop},
          {"bytes", first.work.bytes},
          {"tflop_per_second", o.tflops()},
          {"gbyte_per_second", o.gbytes()},
          {"limit", std::move(limit)},
          {"repeats", std::move(repeats)}};
}

OrderedJson to_json(const BenchFlags& flags, const Loaded& loaded, const DevicePeaks& peaks,
                    const std::vector<Outcome>& outcomes) {
  OrderedJson plans = OrderedJson::array(), results = OrderedJson::array();
  for (const MemoryPlan& plan : loaded.plans) {
    plans.push_back(to_json(plan));
    plans.back()["chunked_prefill"] = mode_name(plan.chunked);
  }
  for (const Outcome& outcome : outcomes) results.push_back(to_json(outcome));
  OrderedJson peaks_json = nullptr;
  if (peaks.flops > 0)
    peaks_json = {{"tflop_per_second", peaks.flops / 1e12},
                  {"gbyte_per_second", peaks.bytes_per_second / 1e9}};
  const SamplingFlags& s = flags.sampling;
  return {{"version", MLA_VERSION},
          {"model", flags.engine.model},
          {"fingerprint", loaded.fingerprint},
          {"files", loaded.files},
          {"backend", loaded.backend->name()},
          {"device", loaded.memory.name},
          {"dtype", std::string(name_of(loaded.dtype))},
          {"load_format", flags.engine.load_format},
          {"enforce_eager", flags.engine.enforce_eager},
          {"tensor_parallel_size", flags.engine.tensor_parallel},
          {"communication", loaded.models.front()->communication()},
          {"threads", flags.engine.run_threads()},
          {"sampling",
           {{"temperature", s.temperature},
            {"top_p", s.top_p},
            {"top_k", s.top_k},
            {"min_p", s.min_p},
            {"presence_penalty", s.presence_penalty},
            {"frequency_penalty", s.frequency_penalty},
            {"repetition_penalty", s.repetition_penalty},
            {"seed", s.seed}}},
          {"load_time_s", loaded.load_seconds},
          {"warmup_time_s", loaded.warm_up_seconds},
          {"memory_plans", std::move(plans)},
          {"peaks", std::move(peaks_json)},
          {"results", std::move(results)}};
}

std::string to_text(const Loaded& loaded, const DevicePeaks& peaks,
                    const std::vector<Outcome>& outcomes) {
  const int32_t ranks = loaded.plans.front().limits.ranks;
  std::string text = fmt::format("{}{} ({}), {}", ranks > 1 ? fmt::format("{} x ", ranks) : "",
                                 loaded.memory.name, loaded.backend->name(), name_of(loaded.dtype));
  if (peaks.flops > 0)
    text += fmt::format("; measured peaks: {:.1f} TFLOP/s, {:.1f} GB/s", peaks.flops / 1e12,
                        peaks.bytes_per_second / 1e9);
  text += fmt::format("\n{:<24} {:>7} {:>7} {:>10} {:>10} {:>10} {:>10} {:>7} {:>9} {:>9} {:>9}\n",
                      "workload", "chunked", "steps", "step ms", "tok/s", "min", "max", "host %",
                      "TFLOP/s", "GB/s", "limit %");
  for (const Outcome& o : outcomes) {
    const Stats rate = stats_of(o.runs, tokens_per_second);
    text += fmt::format(
        "{:<24} {:>7} {:>7} {:>10.3f} {:>10.1f} {:>10.1f} {:>10.1f} {:>7.1f} {:>9.3f} {:>9.2f} "
        "{:>9}\n",
        o.workload.name(), mode_name(o.chunked), o.runs.front().steps, o.median(step_ms),
        rate.median, rate.min, rate.max, 100 * o.host_share(), o.tflops(), o.gbytes(),
        o.has_limit() ? fmt::format("{:.1f}", 100 * o.share()) : "-");
    text += "  tok/s of each repeat:";
    for (const Measured& m : o.runs) text += fmt::format(" {:.1f}", tokens_per_second(m));
    text += '\n';
    if (o.runs.front().preemptions > 0)
      text += fmt::format("  {} preemptions: the KV cache does not hold all sequences that run\n",
                          o.runs.front().preemptions);
    if (o.workload.kind == WorkloadKind::decode)
      text += fmt::format("  steps not counted, of prompts or of fewer than {} sequences: {}\n",
                          o.workload.prompts, o.runs.front().steps_apart);
  }
  return text;
}

// Of the ranks together.
DevicePeaks measure_peaks(const EngineFlags& flags, const Loaded& loaded) {
  const int32_t ranks = flags.tensor_parallel;
  if (ranks == 1) return loaded.backend->measure_peaks();
  DevicePeaks peaks =
      make_backend(loaded.device, loaded.dtype, flags.run_threads(), false)->measure_peaks();
  peaks.flops *= ranks;
  peaks.bytes_per_second *= ranks;
  return peaks;
}

int bench(const BenchFlags& flags) {
  const std::vector<Workload> workloads = choose_workloads(flags);
  check_named_files({{"--output", flags.output}}, {});
  const ModelConfig config = load_config(flags.engine.model);
  SamplingParams sampling = flags.sampling.params(config.vocab_size);
  const std::unique_ptr<Loaded> loaded = prepare(cover(flags, workloads, config));
  for (const MemoryPlan& plan : loaded->plans)
    for (const Workload& workload : workloads) check_fits(workload, plan);
  // While the memory that it takes for itself is free.
  const DevicePeaks peaks = measure_peaks(flags.engine, *loaded);
  Progress progress("auto", flags.quiet);
  load(flags.engine, flags.quiet, progress, *loaded);

  const WorkCounter counter = work_counter(*loaded);
  const TextSetup text{loaded->text.tokenizer ? &*loaded->text.tokenizer : nullptr,
                       loaded->text.chat_template ? &*loaded->text.chat_template : nullptr};
  std::vector<Outcome> outcomes;
  for (const Workload& workload : workloads) {
    for (const MemoryPlan& plan : loaded->plans) {
      const Bench setup{.config = loaded->config,
                        .model = *loaded->models.front(),
                        .text = text,
                        .plan = plan,
                        .sampling = sampling,
                        .seed = static_cast<uint64_t>(flags.sampling.seed),
                        .pipelined = loaded->device == DeviceKind::cuda,
                        .counter = counter,
                        .peaks = peaks};
      measure(workload, setup);  // to warm up
      Outcome outcome{.workload = workload, .chunked = plan.chunked, .runs = {}};
      for (int64_t i = 0; i < flags.repeats; ++i) {
        outcome.runs.push_back(measure(workload, setup));
        if (!flags.quiet)
          say("{}, chunked prefill {}: {} of {}: {:.1f} tokens/s\n", workload.name(),
              mode_name(plan.chunked), i + 1, flags.repeats,
              tokens_per_second(outcome.runs.back()));
      }
      outcomes.push_back(std::move(outcome));
    }
  }
  const std::string json = to_json(flags, *loaded, peaks, outcomes).dump(2) + "\n";
  if (!flags.output.empty()) write_file_atomically(flags.output, json);
  fmt::print("{}", flags.json ? json : to_text(*loaded, peaks, outcomes));
  return kExitOk;
}

}  // namespace

Command add_bench(CLI::App& app) {
  auto flags = std::make_shared<BenchFlags>();
  const char* group = "Work";
  app.add_flag("--prefill", flags->prefill, "Prompts alone, one token each")->group(group);
  app.add_flag("--decode", flags->decode,
               "Steps in which all sequences decode; their prompts are not counted")
      ->group(group);
  app.add_option("--input-len", flags->input_len, "Tokens of a prompt; default 1024")->group(group);
  app.add_option("--output-len", flags->output_len,
                 "Tokens generated for a prompt; default 128, with --prefill 1")
      ->group(group);
  app.add_option("--num-prompts", flags->num_prompts, "Prompts; default 16")->group(group);
  app.add_option("--batch", flags->batch,
                 "Sequences that run at once: with --decode the number of prompts, else "
                 "--max-num-seqs")
      ->group(group);
  app.add_option("--workload", flags->workloads,
                 "prefill:PROMPTSxINPUT, decode:BATCHxCONTEXTxOUTPUT or "
                 "mixed:PROMPTSxINPUTxOUTPUT instead of the options above; may be given several "
                 "times, the model is loaded once")
      ->group(group)
      ->expected(1)
      ->take_all();
  app.add_option("--repeats", flags->repeats, "Runs that count; one more goes before them")
      ->group(group)
      ->capture_default_str();
  flags->engine.add_to(app);
  flags->sampling.add_draw_to(app, "Sampling");
  app.add_flag("--json", flags->json, "Print one JSON object instead of a table");
  app.add_option("-o,--output", flags->output, "File for the JSON object");
  app.add_flag("--quiet", flags->quiet, "No plan and no progress on standard error");
  return [flags] { return bench(*flags); };
}

}  // namespace mla
