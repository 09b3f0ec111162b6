#include "lib/eval/gsm8k.h"

#include <fstream>

#include "lib/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/small_gsm8k.h"

namespace mla::test::gsm8k_test {
namespace {

std::string text_of(const EvalQuestion& question) {
  return std::get<std::string>(question.context);
}

// A small data set in a folder; its texts below are those that lm-evaluation-harness 0.4.13 makes
// of it.
struct Small {
  TempDir dir;
  Small() { write_small_gsm8k(dir.path()); }
  EvalTask task(int64_t num_fewshot, int64_t limit = -1, bool chat = false) const {
    return gsm8k_task(
        {.dir = dir.path(), .num_fewshot = num_fewshot, .limit = limit, .chat = chat});
  }
};

TEST_CASE("Examples stand in front of a question as the tool puts them") {
  const Small small;
  const EvalTask task = small.task(2);
  REQUIRE(task.questions.size() == 3);
  CHECK(text_of(task.questions[0]) ==
        "Question: What is 25 plus 25?\nAnswer: It is <<25+25=50>>50.\n#### 50\n\nQuestion: What "
        "is 15 plus 15?\nAnswer: It is <<15+15=30>>30.\n#### 30\n\nQuestion: What is 20 plus "
        "1?\tNow “really”.\nAnswer:");
  CHECK(text_of(task.questions[1]) ==
        "Question: What is 4 plus 4?\nAnswer: It is <<4+4=8>>8.\n#### 8\n\nQuestion: What is 1 "
        "plus 1?\nAnswer: It is <<1+1=2>>2.\n#### 2\n\nQuestion: How many?\nAnswer:");
  CHECK(text_of(task.questions[2]) ==
        "Question: What is 3 plus 3?\nAnswer: It is <<3+3=6>>6.\n#### 6\n\nQuestion: What is 30 "
        "plus 30?\nAnswer: It is <<30+30=60>>60.\n#### 60\n\nQuestion: Cost?\nAnswer:");
  CHECK(task.questions[1].id == 1);
  CHECK(task.questions[1].target == "a \"lot\"\\\n#### 1,000");
  CHECK(task.questions[1].doc.dump() ==
        R"({"question":"How many?","answer":"a \"lot\"\\\n#### 1,000"})");
  CHECK(task.questions[1].stop == std::vector<std::string>{"Question:", "</s>", "<|im_end|>"});
  CHECK(task.questions[1].max_tokens == 256);
  CHECK(task.num_fewshot == 2);
  CHECK(task.version == 3.0);
}

TEST_CASE("Without examples the training file is not needed") {
  const Small small;
  std::filesystem::remove(small.dir / "train.jsonl");
  const EvalTask task = small.task(0);
  REQUIRE(task.questions.size() == 3);
  CHECK(text_of(task.questions[1]) == "Question: How many?\nAnswer:");
}

TEST_CASE("A limit takes the first questions and leaves their examples") {
  const Small small;
  const EvalTask all = small.task(2), two = small.task(2, 2);
  REQUIRE(two.questions.size() == 2);
  CHECK(two.available == 3);
  for (size_t i = 0; i < 2; ++i) CHECK(text_of(two.questions[i]) == text_of(all.questions[i]));
  CHECK(small.task(2, 7).questions.size() == 3);
}

TEST_CASE("Of a chat the examples are turns and the question is the last of the user's") {
  const Small small;
  const EvalTask task = small.task(2, 1, true);
  const auto& messages = std::get<std::vector<ChatMessage>>(task.questions.at(0).context);
  REQUIRE(messages.size() == 5);
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"user", "Question: What is 25 plus 25?\nAnswer:"},
      {"assistant", "It is <<25+25=50>>50.\n#### 50"},
      {"user", "Question: What is 15 plus 15?\nAnswer:"},
      {"assistant", "It is <<15+15=30>>30.\n#### 30"},
      {"user", "Question: What is 20 plus 1?\tNow “really”.\nAnswer:"}};
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(messages[i].role == expected[i].first);
    CHECK(messages[i].content == expected[i].second);
  }
}

TEST_CASE("Data that is not GSM8K's is told with its file and line") {
  const Small small;
  const auto task = [&] { return small.task(2); };
  // Of another size than the published files: questions are asked, and it is said.
  REQUIRE(task().warnings.size() == 2);
  CHECK(task().warnings[0].find("test.jsonl: expected the 1319 rows of the published file, "
                                "found 3") != std::string::npos);
  CHECK_THROWS_AS(small.task(31), UsageError);
  CHECK(error_text([&] { small.task(31); }) ==
        "--num-fewshot: expected at most the 30 examples of " + (small.dir / "train.jsonl") +
            ", found 31");
  const auto with = [&](const std::string& name, const std::string& text) {
    std::ofstream(small.dir / name, std::ios::binary) << text;
    const std::string message = error_text(task);
    write_small_gsm8k(small.dir.path());
    const std::string begin = small.dir / name;
    return message.starts_with(begin) ? message.substr(begin.size()) : "another: " + message;
  };
  const std::string good = "{\"question\": \"q\", \"answer\": \"a\"}\n";
  CHECK(with("test.jsonl", "") == ": expected at least one question, found none");
  CHECK(with("test.jsonl", good + "\n{\"question\": \"q\"}\n") ==
        ":3: field 'answer': expected a string, found nothing");
  CHECK(with("train.jsonl", good + "{\"question\": 7, \"answer\": \"a\"}") ==
        ":2: field 'question': expected a string, found the number 7");
  CHECK(
      with("train.jsonl", good + "{\"question\": \"q\", \"ans").starts_with(":2: not valid JSON"));
  CHECK(with("test.jsonl", "[1]\n") == ":1: expected an object, found a list");
  std::filesystem::remove(small.dir / "train.jsonl");
  CHECK(error_text(task) == (small.dir / "train.jsonl") +
                                ": expected GSM8K's questions (JSONL, fields question and answer), "
                                "found no such file");
}

TEST_CASE("The prompts of GSM8K are the tool's, byte for byte") {
  if (assets().empty()) MLA_SKIP("no test assets");
  const EvalTask task = gsm8k_task({.dir = assets() + "/gsm8k"});
  CHECK(task.warnings.empty());
  REQUIRE(task.questions.size() == 1319);
  std::ifstream in(assets() + "/gsm8k/prompts_5shot_first40.jsonl");
  size_t rows = 0;
  for (std::string line; std::getline(in, line); ++rows) {
    const Json expected = parse_json(line, "prompts");
    CHECK(task.questions[rows].id == expected.at("doc_id"));
    CHECK(text_of(task.questions[rows]) == expected.at("prompt").get<std::string>());
    CHECK(task.questions[rows].target == expected.at("answer").get<std::string>());
  }
  CHECK(rows == 40);
}

}  // namespace
}  // namespace mla::test::gsm8k_test
