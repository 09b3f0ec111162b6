#include "lib/eval/gsm8k.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "lib/base/error.h"
#include "lib/eval/python_random.h"

namespace mla {
namespace {

constexpr double kVersion = 3.0;
constexpr uint32_t kFewshotSeed = 1234;
constexpr int64_t kTrainRows = 7473, kTestRows = 1319;  // of openai/gsm8k, main
const std::vector<std::string> kStops = {"Question:", "</s>", "<|im_end|>"};

struct Row {
  std::string question, answer;

  std::string asked() const { return "Question: " + question + "\nAnswer:"; }
};

std::vector<Row> read_rows(const std::string& path) {
  if (!std::filesystem::exists(path))
    fail("{}: expected GSM8K's questions (JSONL, fields question and answer), found no such file",
         path);
  const std::string text = read_file(path);
  std::vector<Row> rows;
  int64_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    const std::string what = fmt::format("{}:{}", path, number);
    const Json object = parse_json(line, what);
    rows.push_back({get_string(object, "question", what), get_string(object, "answer", what)});
  }
  if (rows.empty()) fail("{}: expected at least one question, found none", path);
  return rows;
}

// A check of `found` rows against those of the published file.
void check_rows(int64_t found, int64_t published, const std::string& path, EvalTask& task) {
  if (found != published)
    task.warnings.push_back(
        fmt::format("{}: expected the {} rows of the published file, found {}: the score is not "
                    "comparable with others",
                    path, published, found));
}

Prompt chat_context(const std::vector<const Row*>& shots, const Row& row) {
  std::vector<ChatMessage> messages;
  for (const Row* shot : shots) {
    messages.push_back({"user", shot->asked()});
    messages.push_back({"assistant", shot->answer});
  }
  messages.push_back({"user", row.asked()});
  return messages;
}

Prompt text_context(const std::vector<const Row*>& shots, const Row& row) {
  std::string text;
  for (const Row* shot : shots) text += shot->asked() + " " + shot->answer + "\n\n";
  return text + row.asked();
}

OrderedJson describe_question(const Gsm8kOptions& options, const EvalQuestion& question) {
  OrderedJson config;
  config["task"] = "gsm8k";
  config["dataset_path"] = "json";
  config["dataset_kwargs"]["data_files"] = {{"train", options.dir + "/train.jsonl"},
                                            {"test", options.dir + "/test.jsonl"}};
  config["training_split"] = "train";
  config["test_split"] = "test";
  config["fewshot_split"] = "train";
  config["doc_to_text"] = "Question: {{question}}\nAnswer:";
  config["doc_to_target"] = "{{answer}}";
  config["description"] = "";
  config["target_delimiter"] = " ";
  config["fewshot_delimiter"] = "\n\n";
  config["fewshot_config"] = {{"sampler", "default"}, {"split", "train"}};
  for (const char* key : {"doc_to_text", "doc_to_target", "fewshot_delimiter", "target_delimiter"})
    config["fewshot_config"][key] = config[key];
  config["num_fewshot"] = options.num_fewshot;
  config["output_type"] = "generate_until";
  config["generation_kwargs"] = generation_arguments(question);
  config["repeats"] = 1;
  describe_scoring(config);
  config["metadata"] = {{"version", kVersion}};
  return config;
}

}  // namespace

EvalTask gsm8k_task(const Gsm8kOptions& options) {
  const std::string train_path = options.dir + "/train.jsonl";
  const std::string test_path = options.dir + "/test.jsonl";
  const std::vector<Row> test = read_rows(test_path);
  const std::vector<Row> train =
      options.num_fewshot > 0 ? read_rows(train_path) : std::vector<Row>();
  if (options.num_fewshot > std::ssize(train))
    usage_fail("--num-fewshot: expected at most the {} examples of {}, found {}", train.size(),
               train_path, options.num_fewshot);

  EvalTask task{.name = "gsm8k",
                .version = kVersion,
                .num_fewshot = options.num_fewshot,
                .chat = options.chat,
                .available = std::ssize(test)};
  check_rows(std::ssize(test), kTestRows, test_path, task);
  if (options.num_fewshot > 0) check_rows(std::ssize(train), kTrainRows, train_path, task);

  PythonRandom random(kFewshotSeed);
  for (const Row& row : test) {
    const int64_t index = std::ssize(task.questions);
    if (options.limit >= 0 && index >= options.limit) break;
    std::vector<const Row*> shots;
    for (const int64_t drawn : random.sample(std::ssize(train), options.num_fewshot))
      shots.push_back(&train[static_cast<size_t>(drawn)]);
    task.questions.push_back(
        {.id = index,
         .doc = {{"question", row.question}, {"answer", row.answer}},
         .target = row.answer,
         .context = options.chat ? chat_context(shots, row) : text_context(shots, row),
         .stop = kStops,
         .max_tokens = options.max_tokens});
  }
  if (!task.questions.empty()) task.config = describe_question(options, task.questions.front());
  return task;
}

}  // namespace mla
