#include "lib/eval/task_file.h"

#include <filesystem>

#include "lib/base/error.h"

namespace mla {
namespace {

OrderedJson doc_of(const Request& request) {
  const bool chat = std::holds_alternative<std::vector<ChatMessage>>(request.prompt);
  OrderedJson doc;
  doc[chat ? "messages" : "prompt"] = context_json(request.prompt);
  doc["answer"] = *request.answer;
  return doc;
}

EvalQuestion question_of(Request request, const std::string& path) {
  const std::string what = fmt::format("{}:{}", path, request.line);
  if (!request.answer) fail("{}: field 'answer': expected a string, found nothing", what);
  if (request.sampling.n > 1)
    fail("{}: field 'n': expected 1, as one answer is scored, found {}", what, request.sampling.n);
  if (request.sampling.echo)
    fail("{}: field 'echo': expected false, as the text after the prompt is scored, found true",
         what);
  EvalQuestion question{.id = request.id,
                        .doc = doc_of(request),
                        .target = *request.answer,
                        .stop = request.sampling.stop,
                        .max_tokens = request.sampling.max_tokens,
                        .temperature = request.sampling.temperature};
  question.context = std::move(request.prompt);
  return question;
}

// What all questions have; where lines differ, their samples say it.
OrderedJson shared_arguments(const EvalTask& task) {
  std::optional<OrderedJson> shared;
  for (const EvalQuestion& question : task.questions) {
    if (question.id.is_null()) continue;  // no request
    const OrderedJson own = generation_arguments(question);
    if (!shared) shared = own;
    for (auto it = shared->begin(); it != shared->end();)
      it = own.contains(it.key()) && own.at(it.key()) == *it ? std::next(it) : shared->erase(it);
  }
  return shared.value_or(OrderedJson::object());
}

OrderedJson describe(const EvalTask& task, const std::string& path) {
  OrderedJson config;
  config["task"] = task.name;
  config["dataset_path"] = "json";
  config["dataset_kwargs"]["data_files"] = {{"test", path}};
  config["test_split"] = "test";
  config["doc_to_text"] = "{{prompt}}";
  config["doc_to_target"] = "{{answer}}";
  config["num_fewshot"] = 0;
  config["output_type"] = "generate_until";
  config["generation_kwargs"] = shared_arguments(task);
  config["repeats"] = 1;
  describe_scoring(config);
  return config;
}

}  // namespace

EvalTask file_task(RequestReader& reader, const std::string& path, int64_t limit) {
  EvalTask task{.name = path == "-" ? "stdin" : std::filesystem::path(path).stem().string()};
  while (std::optional<Record> record = reader.next()) {
    ++task.available;
    if (limit >= 0 && task.available > limit) continue;
    if (const auto* bad = std::get_if<BadLine>(&*record)) {
      task.questions.push_back({.doc = {{"line", bad->line}}, .context = std::string()});
      task.warnings.push_back(fmt::format("{}: {}", path, bad->message));
    } else {
      task.questions.push_back(question_of(std::get<Request>(std::move(*record)), path));
    }
  }
  if (task.questions.empty()) fail("{}: expected at least one question, found none", path);
  task.config = describe(task, path);
  return task;
}

}  // namespace mla
