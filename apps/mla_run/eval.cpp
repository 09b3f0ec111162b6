// mla-run eval: ask the questions of a task in each mode asked for, and score the answers.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/interrupt.h"
#include "apps/mla_run/loaded.h"
#include "apps/mla_run/named_file.h"
#include "apps/mla_run/options.h"
#include "apps/mla_run/run_flow.h"
#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "lib/eval/gsm8k.h"
#include "lib/eval/results.h"
#include "lib/eval/task_file.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

struct EvalFlags {
  RunFlags run;      // run.prompts: the requests, a file of the user's or requests.jsonl
  std::string name;  // of the task; "": run.prompts is its file
  std::string data, requests_only;
  int64_t num_fewshot = 5;
  bool chat = false;

  bool from_file() const { return name.empty(); }
  int32_t max_tokens() const { return run.sampling.max_tokens.value_or(kAnswerTokens); }
};

void check_eval_flags(const EvalFlags& flags) {
  if (flags.from_file() == flags.run.prompts.empty())
    usage_fail("eval: expected a task (gsm8k) or --task FILE, found {}",
               flags.from_file() ? "neither" : "both");
  if (!flags.from_file() && flags.data.empty())
    usage_fail("eval gsm8k: expected --data DIR with GSM8K's train.jsonl and test.jsonl");
  if (flags.requests_only.empty() && flags.run.engine.model.empty())
    usage_fail("eval: expected --model DIR");
  if (flags.run.to_stdout())
    usage_fail("eval writes several files: expected --output DIR, found -");
  for (const std::string& dir : run_folders(flags.run))
    for (const char* name : kScoreNames)
      if (flags.from_file() && same_file(flags.run.prompts, dir + "/" + name))
        usage_fail("{}: the task is one of the files to be written; expected another --output",
                   flags.run.prompts);
}

EvalTask make_gsm8k(const EvalFlags& flags) {
  return gsm8k_task({.dir = flags.data,
                     .num_fewshot = flags.num_fewshot,
                     .limit = flags.run.limit,
                     .chat = flags.chat,
                     .max_tokens = flags.max_tokens()});
}

int write_requests(const EvalFlags& flags) {
  flags.run.engine.check();
  flags.run.sampling.params(std::numeric_limits<int32_t>::max());  // no model: any token
  check_values(flags.run);
  const EvalTask task = make_gsm8k(flags);
  print_warnings(task.warnings);
  const std::string lines = whole_requests(task);
  if (flags.requests_only == "-") {
    fmt::print("{}", lines);
    return kExitOk;
  }
  check_named_files({{"--requests-only", flags.requests_only}},
                    {flags.data + "/train.jsonl", flags.data + "/test.jsonl"});
  if (fs::exists(flags.requests_only) && !flags.run.overwrite)
    usage_fail("--requests-only: {} exists; --overwrite replaces it", flags.requests_only);
  write_file_atomically(flags.requests_only, lines);
  if (!flags.run.quiet) say("wrote {}: {} requests\n", flags.requests_only, task.questions.size());
  return kExitOk;
}

// A task and the requests that ask it, as one thing: what is asked is what is scored.
struct Asked {
  EvalTask task;
  Input input;
};

int32_t max_model_len(const Loaded& loaded) {
  int32_t least = loaded.plans.front().limits.max_model_len;
  for (const MemoryPlan& plan : loaded.plans) least = std::min(least, plan.limits.max_model_len);
  return least;
}

const ChatTemplate* chat_template(const Loaded& loaded) {
  return loaded.text.chat_template ? &*loaded.text.chat_template : nullptr;
}

Asked ask_gsm8k(const EvalFlags& flags, EvalTask task, Loaded& loaded) {
  const SamplingParams sampling = flags.run.sampling.params(loaded.config.vocab_size);
  CutRequests requests = cut_requests(task, {.max_model_len = max_model_len(loaded),
                                             .add_bos = sampling.add_bos,
                                             .tokenizer = &*loaded.text.tokenizer,
                                             .chat_template = chat_template(loaded)});
  if (requests.cut > 0)
    task.warnings.push_back(fmt::format(
        "{} of {} contexts are cut from the left to the {} tokens that max_model_len {} leaves",
        requests.cut, task.questions.size(), max_model_len(loaded) - flags.max_tokens(),
        max_model_len(loaded)));
  return {std::move(task), Input(flags.run.prompts, std::move(requests.lines))};
}

Asked ask_file(const EvalFlags& flags, const Loaded& loaded) {
  Input input(flags.run.prompts, true);  // read here and by each mode
  RequestReader reader(input.open(), flags.run.prompts, reader_options(flags.run, loaded, input));
  EvalTask task = file_task(reader, flags.run.prompts, flags.run.limit);
  input.check_read();
  return {std::move(task), std::move(input)};
}

OrderedJson tokenizer_json(const Loaded& loaded) {
  const Tokenizer& tokenizer = *loaded.text.tokenizer;
  const auto pair = [](const std::string& text, int32_t id) {
    return id < 0 ? OrderedJson::array({nullptr, "None"})
                  : OrderedJson::array({text, fmt::format("{}", id)});
  };
  OrderedJson j;
  j["tokenizer_eos_token"] = pair(tokenizer.eos_text(), tokenizer.eos_id());
  j["tokenizer_bos_token"] = pair(tokenizer.bos_text(), tokenizer.bos_id());
  j["eot_token_id"] =
      tokenizer.eos_id() < 0 ? OrderedJson(nullptr) : OrderedJson(tokenizer.eos_id());
  return j;
}

// What the reports say of one mode.
EvalRun describe_run(const EvalFlags& flags, const Loaded& loaded, const MemoryPlan& plan) {
  const RunFlags& run = flags.run;
  EvalRun result{.model = run.engine.model,
                 .model_args = {{"pretrained", run.engine.model}},
                 .fingerprint = loaded.fingerprint,
                 .dtype = std::string(name_of(loaded.dtype)),
                 .device = loaded.backend->name(),
                 .version = MLA_VERSION,
                 .tokenizer = tokenizer_json(loaded),
                 .max_length = plan.limits.max_model_len};
  result.model_args["dtype"] = result.dtype;
  result.model_args["max_length"] = result.max_length;
  result.model_args["chunked_prefill"] = mode_name(plan.chunked);
  if (run.sampling.add_bos != "auto") result.model_args["add_bos"] = run.sampling.add_bos;
  if (run.limit >= 0) result.limit = run.limit;
  if (!flags.from_file() && flags.max_tokens() != kAnswerTokens)
    result.gen_kwargs["max_gen_toks"] = flags.max_tokens();
  if (flags.chat) result.chat_template = chat_template(loaded)->text();
  return result;
}

// Of one mode: results.json and samples.jsonl beside its outputs, and the table. Returns how many
// requests failed.
int64_t report(const EvalTask& task, const std::string& dir, const EvalRun& run,
               const ChatTemplate* render) {
  const EvalScores scores = score_run(task, dir);
  const Samples all = samples(task, scores, render);
  write_file_atomically(dir + "/samples.jsonl", all.lines);
  write_file_atomically(dir + "/results.json",
                        results_json(task, scores, run, all.hash).dump(2) + "\n");
  fmt::print("{}\n{}\n", results_header(task, run), results_table(task, scores));
  if (scores.failed > 0)
    say("warning: {}: {} of {} requests failed and count as wrong\n", dir, scores.failed,
        task.questions.size());
  return scores.failed;
}

// Checks all that can be checked without weights.
std::unique_ptr<Loaded> prepare_eval(const EvalFlags& flags) {
  std::unique_ptr<Loaded> loaded = prepare(flags.run.engine);
  flags.run.sampling.params(loaded->config.vocab_size);
  loaded->text = load_text_files(flags.run.engine.model);
  if (!loaded->text.tokenizer)
    fail("{}: expected tokenizer.json, found none: answers are scored as text",
         flags.run.engine.model);
  return loaded;
}

int eval_all(const EvalFlags& flags) {
  const double date =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const auto start = std::chrono::steady_clock::now();
  Progress progress(flags.run.progress, flags.run.quiet);
  progress.checking(flags.run.engine.model + " and " +
                    (flags.from_file() ? flags.run.prompts : flags.data));
  EvalTask gsm8k;
  if (!flags.from_file()) gsm8k = make_gsm8k(flags);
  const std::unique_ptr<Loaded> loaded = prepare_eval(flags);
  Asked asked =
      flags.from_file() ? ask_file(flags, *loaded) : ask_gsm8k(flags, std::move(gsm8k), *loaded);
  progress.clear();
  print_warnings(asked.task.warnings);
  loaded->warnings.insert(loaded->warnings.end(), asked.task.warnings.begin(),
                          asked.task.warnings.end());
  std::deque<ModeRun> modes = make_modes(flags.run, *loaded, asked.input);
  check_interrupt();

  const ModesEnd end = run_modes(flags.run, *loaded, asked.input, modes, progress, [&] {
    std::error_code ignored;
    for (const std::string& dir : run_folders(flags.run))  // of an earlier run
      for (const char* name : kScoreNames) fs::remove(dir + "/" + name, ignored);
    if (!flags.from_file()) write_file_atomically(flags.run.prompts, *asked.input.kept());
  });
  int64_t failed = 0;
  for (size_t i = 0; i < loaded->plans.size(); ++i) {  // the first run of each mode
    EvalRun run = describe_run(flags, *loaded, loaded->plans[i]);
    run.date = date;
    run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    failed += report(asked.task, modes[i].dir(), run, chat_template(*loaded));
  }
  int code = failed == 0 ? kExitOk : kExitSomeFailed;
  if (flags.run.both()) {
    if (const int compared = compare_modes(flags.run); compared != kExitOk) code = compared;
  }
  if (code != kExitThreshold && !flags.run.quiet) say("wrote {}\n", flags.run.output);
  if (!end.trace_error.empty()) fail("{}", end.trace_error);
  return code;
}

void add_task_options(CLI::App& app, EvalFlags& flags) {
  app.add_option("NAME", flags.name, "The task: gsm8k")->check(CLI::IsMember({"gsm8k"}));
  CLI::Option* file = app.add_option("--task", flags.run.prompts,
                                     "Instead: a JSONL file of requests with prompt (or messages) "
                                     "and answer; - for standard input");
  app.add_option("--data", flags.data, "Folder of GSM8K's train.jsonl and test.jsonl")
      ->excludes(file);
  app.add_option("--num-fewshot", flags.num_fewshot,
                 "Examples in front of a question, drawn anew for each")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->excludes(file)
      ->capture_default_str();
  app.add_flag("--apply-chat-template", flags.chat,
               "Examples as turns of user and assistant, in the model's chat template")
      ->excludes(file);
  app.add_option(
         "--requests-only", flags.requests_only,
         "Only write the requests, their contexts whole, to this file (-: standard output); "
         "needs no model")
      ->excludes(file);
  app.add_option("--limit", flags.run.limit, "Only the first N questions")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 53));
}

void add_answer_options(CLI::App& app, SamplingFlags& flags) {
  const char* group = "Answers, which are greedy";
  app.add_option("--max-tokens", flags.max_tokens,
                 "Tokens of an answer at most; of a file, for lines that do not say; default 256")
      ->group(group);
  app.add_option("--logprobs", flags.logprobs,
                 "Log-probabilities of the k best tokens in the outputs, 0 to 20; from 2 on the "
                 "comparison shows how near a tie a divergence was")
      ->group(group);
  app.add_option("--add-bos", flags.add_bos,
                 "A BOS in front of text prompts; auto: as tokenizer_config.json's add_bos_token "
                 "says")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->group(group)
      ->capture_default_str();
  app.add_flag("--return-token-ids", flags.return_token_ids,
               "The prompt's token ids in the outputs")
      ->group(group);
}

}  // namespace

Command add_eval(CLI::App& app) {
  auto flags = std::make_shared<EvalFlags>();
  add_task_options(app, *flags);
  app.add_option(
         "-o,--output", flags->run.output,
         "Folder for outputs.jsonl, run.json, results.json and samples.jsonl (both: of off/ "
         "and on/, and compare.json), and requests.jsonl")
      ->capture_default_str();
  flags->run.engine.add_to(app);
  app.get_option("--model")->required(false);  // --requests-only has none
  add_answer_options(app, flags->run.sampling);
  add_flow_options(app, flags->run);
  return [flags] {
    check_eval_flags(*flags);
    if (!flags->requests_only.empty()) return write_requests(*flags);
    flags->run.sampling.max_tokens = flags->max_tokens();
    if (!flags->from_file()) flags->run.prompts = flags->run.output + "/requests.jsonl";
    return run_guarded(flags->run, [&] { return eval_all(*flags); });
  };
}

}  // namespace mla
