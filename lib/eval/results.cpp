#include "lib/eval/results.h"

#include <fmt/format.h>

#include <utility>

#include "lib/batch/hash.h"
#include "lib/batch/output.h"

namespace mla {
namespace {

constexpr const char* kMetric = "exact_match";

std::string sha256(std::string_view text) {
  Sha256 hash;
  hash.update(text);
  return hash.hex();
}

OrderedJson error_json(const FilterScore& score) {
  const auto error = score.std_error();
  return error ? OrderedJson(*error) : OrderedJson("N/A");
}

std::string as_python(const std::optional<int64_t>& limit) {
  return limit ? fmt::format("{}.0", *limit) : "None";  // there a limit may be a share too
}

// The text of a chat where it can be rendered.
OrderedJson prompt_json(const Prompt& context, const ChatTemplate* render) {
  const auto* messages = std::get_if<std::vector<ChatMessage>>(&context);
  return messages && render && render->usable() ? OrderedJson(render->render(*messages))
                                                : context_json(context);
}

struct Sample {
  OrderedJson json;
  std::string hashes;  // of document, prompt and target, one behind the other
};

Sample sample(int64_t doc_id, const EvalQuestion& question, const ScoredAnswer& answer,
              const char* filter, const FilteredAnswer& filtered, const ChatTemplate* render) {
  const OrderedJson prompt = prompt_json(question.context, render);
  const std::string doc_hash = sha256(question.doc.dump(2));
  const std::string prompt_hash =
      sha256(prompt.is_string() ? prompt.get<std::string>() : prompt.dump());
  const std::string target_hash = sha256(question.target);
  OrderedJson json;
  json["doc_id"] = doc_id;
  json["doc"] = question.doc;
  json["target"] = question.target;
  json["arguments"]["gen_args_0"] = {{"arg_0", prompt}, {"arg_1", generation_arguments(question)}};
  json["resps"] = OrderedJson::array({OrderedJson::array({answer.text.value_or("")})});
  json["filtered_resps"] = OrderedJson::array({filtered.extracted});
  json["filter"] = filter;
  json["metrics"] = OrderedJson::array({kMetric});
  json["doc_hash"] = doc_hash;
  json["prompt_hash"] = prompt_hash;
  json["target_hash"] = target_hash;
  json[kMetric] = filtered.right ? 1.0 : 0.0;
  if (!answer.text) json["error"] = answer.error_code;
  return {std::move(json), doc_hash + prompt_hash + target_hash};
}

// Runs of characters that file names had better not have become "__".
std::string file_name(const std::string& model) {
  constexpr std::string_view kUnsafe = "\"<>:/|\\?*[]";
  std::string name;
  bool unsafe = false;
  for (const char c : model) {
    const bool before = std::exchange(unsafe, kUnsafe.find(c) != kUnsafe.npos);
    if (!unsafe) name += c;
    if (unsafe && !before) name += "__";
  }
  return name;
}

// What lm-evaluation-harness says of the model and the tool itself.
void add_run(OrderedJson& j, const EvalRun& run) {
  const auto or_null = [](const auto& value) {
    return value ? OrderedJson(*value) : OrderedJson(nullptr);
  };
  j["config"] = {
      {"model", "mla-run"},
      {"model_args", run.model_args},
      {"model_dtype", run.dtype},
      {"model_sha", run.fingerprint},
      {"batch_size", "auto"},
      {"batch_sizes", OrderedJson::array()},
      {"device", run.device},
      {"use_cache", nullptr},
      {"limit", run.limit ? OrderedJson(static_cast<double>(*run.limit)) : OrderedJson(nullptr)},
      {"bootstrap_iters", nullptr},
      {"gen_kwargs", run.gen_kwargs},
      {"fewshot_seed", 1234}};
  j["git_hash"] = nullptr;
  j["date"] = run.date;
  j["mla_run_version"] = run.version;
  for (const auto& [name, value] : run.tokenizer.items()) j[name] = value;
  j["max_length"] = run.max_length;
  j["model_source"] = "mla-run";
  j["model_name"] = run.model;
  j["model_name_sanitized"] = file_name(run.model);
  j["system_instruction"] = nullptr;
  j["system_instruction_sha"] = nullptr;
  j["fewshot_as_multiturn"] = run.chat_template ? OrderedJson(true) : OrderedJson(nullptr);
  j["chat_template"] = or_null(run.chat_template);
  j["chat_template_sha"] =
      run.chat_template ? OrderedJson(sha256(*run.chat_template)) : OrderedJson(nullptr);
  j["total_evaluation_time_seconds"] = fmt::format("{}", run.seconds);
}

}  // namespace

std::string results_header(const EvalTask& task, const EvalRun& run) {
  std::string arguments, kwargs;
  for (const auto& [name, value] : run.model_args.items())
    arguments += fmt::format("{}{}={}", arguments.empty() ? "" : ",", name,
                             value.is_string() ? value.get<std::string>() : value.dump());
  for (const auto& [name, value] : run.gen_kwargs.items())
    kwargs += fmt::format("{}{}={}", kwargs.empty() ? "" : ",", name, value.dump());
  return fmt::format("mla-run ({}), gen_kwargs: ({}), limit: {}, num_fewshot: {}, batch_size: auto",
                     arguments, kwargs.empty() ? "None" : kwargs, as_python(run.limit),
                     task.num_fewshot);
}

Samples samples(const EvalTask& task, const EvalScores& scores, const ChatTemplate* render) {
  Samples all;
  std::string hashes;
  const auto add = [&](const FilterScore& score, FilteredAnswer ScoredAnswer::*filtered) {
    for (size_t i = 0; i < task.questions.size(); ++i) {
      const ScoredAnswer& answer = scores.answers[i];
      const Sample one = sample(static_cast<int64_t>(i), task.questions[i], answer, score.filter,
                                answer.*filtered, render);
      all.lines += dump_line(one.json) + "\n";
      hashes += one.hashes;
    }
  };
  add(scores.strict, &ScoredAnswer::strict);
  add(scores.flexible, &ScoredAnswer::flexible);
  all.hash = sha256(hashes);
  return all;
}

OrderedJson results_json(const EvalTask& task, const EvalScores& scores, const EvalRun& run,
                         const std::string& hash) {
  OrderedJson metrics = {
      {"name", task.name}, {"alias", task.name}, {"sample_len", task.questions.size()}};
  for (const FilterScore* score : {&scores.strict, &scores.flexible}) {
    metrics[fmt::format("{},{}", kMetric, score->filter)] = score->mean();
    metrics[fmt::format("{}_stderr,{}", kMetric, score->filter)] = error_json(*score);
  }
  const auto of_task = [&](OrderedJson value) {
    OrderedJson object = OrderedJson::object();
    object[task.name] = std::move(value);
    return object;
  };
  OrderedJson j;
  j["results"] = of_task(metrics);
  j["group_subtasks"] = OrderedJson::object();
  j["configs"] = of_task(task.config);
  j["versions"] = task.version ? of_task(*task.version) : OrderedJson::object();
  j["n-shot"] = of_task(task.num_fewshot);
  j["higher_is_better"] = of_task({{kMetric, true}});
  j["n-samples"] = of_task({{"original", task.available}, {"effective", task.questions.size()}});
  add_run(j, run);
  j["task_hashes"] = of_task(hash);
  if (scores.failed > 0) j["failed_requests"] = scores.failed;
  return j;
}

}  // namespace mla
