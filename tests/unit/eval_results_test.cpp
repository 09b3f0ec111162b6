#include "lib/eval/results.h"

#include <cmath>
#include <fstream>
#include <sstream>

#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "lib/batch/result.h"
#include "lib/eval/gsm8k.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/small_gsm8k.h"

namespace mla::test::eval_results_test {
namespace {

// The small data set, and a run that gave these texts; an absent one failed.
struct SmallRun {
  TempDir dir;
  EvalTask task;
  explicit SmallRun(const std::vector<std::optional<std::string>>& texts) {
    write_small_gsm8k(dir / "data");
    task = gsm8k_task({.dir = dir / "data", .num_fewshot = 2});
    OutputWriter out({.dir = dir / "run", .input_path = ""});
    for (size_t i = 0; i < texts.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      Result result;
      result.index = index;
      result.id = i;
      result.choices[0].text = texts[i];
      result.choices[0].finish_reason = "stop";
      result.choices[0].timing.token(1);
      const BadLine bad{.index = index, .line = index + 1, .id = i, .code = "logits_not_finite"};
      out.write(index, texts[i] ? to_json(result) : to_json(bad));
    }
    out.finish();
  }
  EvalScores scores() const { return score_run(task, dir / "run"); }
};

const std::vector<std::optional<std::string>> kTexts = {"so 21", "It is\n#### 1000", "#### 6"};

bool near(double x, double expected) { return std::fabs(x - expected) <= 1e-15; }

FilterScore score_of(int64_t questions, int64_t right) {
  return {.filter = "strict-match", .questions = questions, .right = right};
}

TEST_CASE("A filter's mean and standard error are the tool's") {
  CHECK(score_of(100, 66).mean() == 0.66);
  CHECK(near(*score_of(100, 66).std_error(), 0.04760952285695234));
  CHECK(near(*score_of(3, 1).std_error(), 0.33333333333333337));
  CHECK(near(*score_of(1319, 874).std_error(), 0.013023665136222093));
  CHECK(*score_of(5, 5).std_error() == 0);
  CHECK_FALSE(score_of(1, 1).std_error());
  CHECK(score_of(0, 0).mean() == 0);
}

// Tables of lm-evaluation-harness 0.4.13.
TEST_CASE("The table is set as the tool sets it") {
  const auto table = [](const EvalTask& task, std::pair<int64_t, int64_t> right, int64_t n) {
    EvalScores scores;
    scores.flexible.questions = scores.strict.questions = n;
    std::tie(scores.flexible.right, scores.strict.right) = right;
    return results_table(task, scores);
  };
  EvalTask gsm8k{.name = "gsm8k", .version = 3.0, .num_fewshot = 5};
  CHECK(table(gsm8k, {885, 874}, 1319) ==
        R"(|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value |   |Stderr|
|-----|------:|----------------|-----:|-----------|---|-----:|---|-----:|
|gsm8k|      3|flexible-extract|     5|exact_match|↑  |0.6710|±  |0.0129|
|     |       |strict-match    |     5|exact_match|↑  |0.6626|±  |0.0130|
)");
  CHECK(table(gsm8k, {67, 66}, 100) ==
        R"(|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
|-----|------:|----------------|-----:|-----------|---|----:|---|-----:|
|gsm8k|      3|flexible-extract|     5|exact_match|↑  | 0.67|±  |0.0473|
|     |       |strict-match    |     5|exact_match|↑  | 0.66|±  |0.0476|
)");
  CHECK(table(gsm8k, {0, 0}, 7) ==
        R"(|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
|-----|------:|----------------|-----:|-----------|---|----:|---|-----:|
|gsm8k|      3|flexible-extract|     5|exact_match|↑  |    0|±  |     0|
|     |       |strict-match    |     5|exact_match|↑  |    0|±  |     0|
)");
  CHECK(table(gsm8k, {0, 1}, 1) ==
        R"(|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
|-----|------:|----------------|-----:|-----------|---|----:|---|------|
|gsm8k|      3|flexible-extract|     5|exact_match|↑  |    0|±  |   N/A|
|     |       |strict-match    |     5|exact_match|↑  |    1|±  |   N/A|
)");
  CHECK(table(gsm8k, {10, 9}, 10) ==
        R"(|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
|-----|------:|----------------|-----:|-----------|---|----:|---|-----:|
|gsm8k|      3|flexible-extract|     5|exact_match|↑  |  1.0|±  |   0.0|
|     |       |strict-match    |     5|exact_match|↑  |  0.9|±  |   0.1|
)");
  CHECK(table({.name = "frühling|x", .num_fewshot = 0}, {1, 1}, 4) ==
        R"(|  Tasks   |Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
|----------|-------|----------------|-----:|-----------|---|----:|---|-----:|
|frühling\|x|    N/A|flexible-extract|     0|exact_match|↑  | 0.25|±  |  0.25|
|          |       |strict-match    |     0|exact_match|↑  | 0.25|±  |  0.25|
)");
}

TEST_CASE("Answers are scored by both filters and a request that failed is wrong") {
  const EvalScores scores = SmallRun(kTexts).scores();
  CHECK(scores.strict.right == 1);
  CHECK(scores.flexible.right == 2);
  CHECK(scores.failed == 0);
  CHECK(scores.answers[0].strict.extracted == "[invalid]");
  CHECK(scores.answers[0].flexible.extracted == "21");
  const EvalScores failed = SmallRun({kTexts[0], std::nullopt, kTexts[2]}).scores();
  CHECK(failed.failed == 1);
  CHECK(failed.flexible.right == 1);
  CHECK(failed.flexible.questions == 3);
  CHECK(failed.answers[1].error_code == "logits_not_finite");
}

TEST_CASE("Outputs that do not answer the task's questions are refused") {
  const auto message = [](const SmallRun& run) { return error_text([&] { run.scores(); }); };
  const auto ends = [](const std::string& text, const std::string& end) {
    INFO(text);
    CHECK(text.ends_with(end));
  };
  ends(message(SmallRun({"a", "b"})),
       "/outputs.jsonl:3: expected 3 records, one a question, found "
       "the end");
  ends(message(SmallRun({"a", "b", "c", "d"})),
       "/outputs.jsonl: expected 3 records, one a question, found more");
  SmallRun other(kTexts);
  other.task.questions[1].id = "other";
  ends(message(other),
       "/outputs.jsonl:2: expected the answer to question \"other\", found that to 1");
}

// Hashes of lm-evaluation-harness 0.4.13 for the same data and answers.
TEST_CASE("Samples have the tool's keys and hashes") {
  SmallRun run(kTexts);
  const Samples all = samples(run.task, run.scores(), nullptr);
  CHECK(all.hash == "257f20fb2994270bed3790124ea64e3dbafebcceb4cc10e9a40804f24b17eba7");
  std::istringstream in(all.lines);
  std::vector<OrderedJson> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(OrderedJson::parse(line));
  REQUIRE(lines.size() == 6);
  const OrderedJson expected = OrderedJson::parse(R"({"doc_id": 0,
    "doc": {"question": "What is 20 plus 1?\tNow “really”.", "answer": "#### 21"},
    "target": "#### 21",
    "arguments": {"gen_args_0": {"arg_0": "Question: What is 25 plus 25?\nAnswer: It is <<25+25=50>>50.\n#### 50\n\nQuestion: What is 15 plus 15?\nAnswer: It is <<15+15=30>>30.\n#### 30\n\nQuestion: What is 20 plus 1?\tNow “really”.\nAnswer:",
      "arg_1": {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": false, "temperature": 0.0}}},
    "resps": [["so 21"]], "filtered_resps": ["[invalid]"], "filter": "strict-match",
    "metrics": ["exact_match"],
    "doc_hash": "3b150fbd693ca706df392348eacc3bb0e5740f93976af68846f220c0395eacca",
    "prompt_hash": "55ac3f9e3a4ad63c2efcfd74bcee8958885d8f28739ca1f04b91fca31ce3d991",
    "target_hash": "44e04aac8b128e3a58fe451a153feb79ba45ce8c59d7f5b24bf56bbde8b1ffb0",
    "exact_match": 0.0})");
  CHECK(lines[0].dump() == expected.dump());  // in the same order too
  CHECK(lines[4].at("filter") == "flexible-extract");
  CHECK(lines[4].at("doc_id") == 1);
  CHECK(lines[4].at("filtered_resps") == OrderedJson::array({"1000"}));
  CHECK(lines[4].at("exact_match") == 1.0);
  CHECK(lines[5].at("doc_hash").get<std::string>().starts_with("cedeb7968279"));
}

TEST_CASE("Results have the tool's keys") {
  SmallRun run(kTexts);
  const OrderedJson j =
      results_json(run.task, run.scores(),
                   {.model = "a/b:c", .model_args = {{"pretrained", "a/b:c"}}, .limit = 3}, "hash");
  const OrderedJson& metrics = j.at("results").at("gsm8k");
  CHECK(near(metrics.at("exact_match,strict-match").get<double>(), 1.0 / 3));
  CHECK(near(metrics.at("exact_match_stderr,flexible-extract").get<double>(), 1.0 / 3));
  CHECK(metrics.at("alias") == "gsm8k");
  CHECK(metrics.at("sample_len") == 3);
  CHECK(j.at("versions") == OrderedJson{{"gsm8k", 3.0}});
  CHECK(j.at("n-shot") == OrderedJson{{"gsm8k", 2}});
  CHECK(j.at("higher_is_better").dump() == R"({"gsm8k":{"exact_match":true}})");
  CHECK(j.at("n-samples").dump() == R"({"gsm8k":{"original":3,"effective":3}})");
  CHECK(j.at("task_hashes").dump() == R"({"gsm8k":"hash"})");
  CHECK(j.at("configs").at("gsm8k").at("doc_to_text") == "Question: {{question}}\nAnswer:");
  CHECK(j.at("configs").at("gsm8k").at("filter_list").size() == 2);
  CHECK(j.at("configs").at("gsm8k").at("metric_list").at(0).at("regexes_to_ignore").size() == 4);
  CHECK(j.at("config").at("limit") == 3.0);
  CHECK(j.at("model_name_sanitized") == "a__b__c");
  CHECK(j.at("chat_template").is_null());
  CHECK_FALSE(j.contains("failed_requests"));
  run.task.questions.resize(1);
  const SmallRun one({std::nullopt});
  const EvalScores scores = score_run(run.task, one.dir / "run");
  const OrderedJson failed = results_json(run.task, scores, {}, "");
  CHECK(failed.at("results").at("gsm8k").at("exact_match_stderr,strict-match") == "N/A");
  CHECK(failed.at("failed_requests") == 1);
}

TEST_CASE("The line above the table says what ran") {
  const EvalTask task{.name = "gsm8k", .num_fewshot = 5};
  EvalRun run{
      .model_args = {{"pretrained", "DIR"}, {"chunked_prefill", "on"}, {"max_length", 512}}};
  CHECK(results_header(task, run) ==
        "mla-run (pretrained=DIR,chunked_prefill=on,max_length=512), gen_kwargs: (None), limit: "
        "None, num_fewshot: 5, batch_size: auto");
  run.limit = 100;
  run.gen_kwargs = {{"max_gen_toks", 64}};
  CHECK(results_header(task, run).ends_with(
      "), gen_kwargs: (max_gen_toks=64), limit: 100.0, num_fewshot: 5, batch_size: auto"));
}

}  // namespace
}  // namespace mla::test::eval_results_test
