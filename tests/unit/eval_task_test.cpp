#include "lib/eval/task.h"

#include <sstream>

#include "lib/base/error.h"
#include "lib/eval/gsm8k.h"
#include "lib/eval/task_file.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/small_gsm8k.h"
#include "tests/unit/tokenizer_fixture.h"

namespace mla::test::eval_task_test {
namespace {

std::vector<Json> lines_of(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(parse_json(line, "line"));
  return lines;
}

// One token a byte, and a BOS.
Tokenizer byte_tokenizer() {
  Json json = small_tokenizer({});
  json["added_tokens"] = {small_added(300, "<s>", true)};
  return make_tokenizer(json, R"({"add_bos_token": true, "bos_token": "<s>"})");
}

EvalTask one_question(const Prompt& context) {
  EvalTask task{.name = "one"};
  task.questions.push_back({.id = "q",
                            .doc = {},
                            .target = "4",
                            .context = context,
                            .stop = {"Question:"},
                            .max_tokens = 10});
  return task;
}

TEST_CASE("Whole requests are lines of the simple form") {
  TempDir dir;
  write_small_gsm8k(dir.path());
  const EvalTask text = gsm8k_task({.dir = dir.path(), .num_fewshot = 0, .max_tokens = 8});
  CHECK(whole_requests(text).starts_with(
      R"({"id":0,"prompt":"Question: What is 20 plus 1?\tNow “really”.\nAnswer:",)"
      R"("max_tokens":8,"stop":["Question:","</s>","<|im_end|>"],"answer":"#### 21"})"
      "\n"));
  CHECK(lines_of(whole_requests(text)).size() == 3);
  const EvalTask chat = gsm8k_task({.dir = dir.path(), .num_fewshot = 0, .chat = true});
  const Json line = lines_of(whole_requests(chat)).at(1);
  CHECK(line.at("messages") ==
        Json{{{"role", "user"}, {"content", "Question: How many?\nAnswer:"}}});
  CHECK(line.at("max_tokens") == 256);
}

TEST_CASE("A context that leaves its answer no room is cut from the left, its BOS first") {
  const Tokenizer tokenizer = byte_tokenizer();
  const auto cut = [&](const Prompt& context, int32_t max_model_len,
                       AddBos add_bos = AddBos::automatic) {
    const CutRequests requests =
        cut_requests(one_question(context),
                     {.max_model_len = max_model_len, .add_bos = add_bos, .tokenizer = &tokenizer});
    const Json line = lines_of(requests.lines).at(0);
    CHECK(requests.cut == (line.at("prompt").is_array() ? 1 : 0));
    CHECK(line.at("max_tokens") == 10);
    return line.at("prompt");
  };
  // Four tokens and the BOS, and room for 6, 5, 4 and 1.
  CHECK(cut("abcd", 16) == "abcd");
  CHECK(cut("abcd", 15) == "abcd");
  CHECK(cut("abcd", 14) == Json{'a', 'b', 'c', 'd'});
  CHECK(cut("abcd", 11) == Json::array({'d'}));
  CHECK(cut("abcd", 14, AddBos::never) == "abcd");
  CHECK(cut("<s>abcd", 15) == "<s>abcd");  // it has its BOS
  CHECK(cut("<s>abcd", 14) == Json{'a', 'b', 'c', 'd'});
  CHECK_THROWS_AS(cut("abcd", 10), UsageError);
}

TEST_CASE("Lines with answers are a task, and one without is refused") {
  const auto task = [](const std::string& text, int64_t limit = -1) {
    std::istringstream in(text);
    RequestReader reader(in, "t.jsonl",
                         {.defaults = {.max_tokens = kAnswerTokens}, .vocab_size = 100});
    return file_task(reader, "dir/sums.jsonl", limit);
  };
  const std::string good =
      "{\"id\": \"a\", \"prompt\": \"1+1=\", \"answer\": \"2\", \"stop\": \"\\n\"}\n\n"
      "{\"prompt\": [5, 6], \"answer\": \"3\", \"max_tokens\": 7, \"temperature\": 0.7}\n"
      "{\"messages\": [{\"role\": \"user\", \"content\": \"4?\"}], \"answer\": \"4\"}\n"
      "{\"prompt\": 5}\n";
  const EvalTask all = task(good);
  CHECK(all.name == "sums");
  CHECK_FALSE(all.version);
  REQUIRE(all.questions.size() == 4);
  CHECK(all.questions[0].id == "a");
  CHECK(all.questions[0].doc.dump() == R"({"prompt":"1+1=","answer":"2"})");
  CHECK(generation_arguments(all.questions[0]).dump() ==
        R"({"until":["\n"],"do_sample":false,"temperature":0.0})");
  CHECK(all.questions[1].id == 3);  // its line
  CHECK(generation_arguments(all.questions[1]).dump() ==
        R"({"until":[],"do_sample":true,"temperature":0.7,"max_gen_toks":7})");
  CHECK(all.questions[2].doc.dump() ==
        R"({"messages":[{"role":"user","content":"4?"}],"answer":"4"})");
  CHECK(all.questions[3].id.is_null());
  REQUIRE(all.warnings.size() == 1);
  CHECK(all.warnings[0].starts_with("dir/sums.jsonl: line 5: field 'prompt'"));
  // Of the settings those that all lines have.
  CHECK(all.config.at("generation_kwargs").empty());
  const EvalTask alike = task(
      "{broken\n{\"prompt\": \"a\", \"answer\": \"1\", \"stop\": \"#\"}\n"
      "{\"prompt\": \"b\", \"answer\": \"2\", \"stop\": \"#\", \"max_tokens\": 7}\n");
  CHECK(alike.config.at("generation_kwargs").dump() ==
        R"({"until":["#"],"do_sample":false,"temperature":0.0})");
  CHECK(task(good, 2).questions.size() == 2);
  CHECK(task(good, 2).available == 4);
  CHECK(error_text([&] { task(good + "{\"prompt\": \"x\"}\n"); }) ==
        "dir/sums.jsonl:6: field 'answer': expected a string, found nothing");
  CHECK(error_text([&] { task("{\"prompt\": \"x\", \"answer\": \"1\", \"n\": 2}\n"); }) ==
        "dir/sums.jsonl:1: field 'n': expected 1, as one answer is scored, found 2");
  CHECK(error_text([&] {
          task(R"({"custom_id":"c","method":"POST","url":"/v1/completions",)"
               R"("body":{"prompt":"x","answer":"1","echo":true}})"
               "\n");
        }) ==
        "dir/sums.jsonl:1: field 'echo': expected false, as the text after the prompt is scored, "
        "found true");
  CHECK(error_text([&] { task("\n"); }) ==
        "dir/sums.jsonl: expected at least one question, found none");
}

}  // namespace
}  // namespace mla::test::eval_task_test
