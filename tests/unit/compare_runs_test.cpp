#include <cmath>
#include <fstream>
#include <limits>

#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "lib/batch/result.h"
#include "lib/batch/run_record.h"
#include "lib/eval/compare.h"
#include "lib/report/report.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace mla::compare_runs_test {
namespace {

bool passes(const CompareReport& report, double min_match) {
  return failures(report, {.min_match = min_match}).empty();
}

// Relative; a NaN is near nothing.
bool near(double x, double expected, double relative = 1e-6) {
  UNSCOPED_INFO(x << ", expected " << expected);
  return std::fabs(x - expected) <= relative * std::fabs(expected);
}

// A run of requests q0, q1 … that can be changed before it is written.
class FakeRun {
 public:
  explicit FakeRun(int requests) {
    for (int i = 0; i < requests; ++i) results.push_back(make(i));
    record.state = "finished";
    record.options["chunked_prefill"] = "off";
    record.input_sha256 = "aa";
    record.summary["tokens_per_second"] = 12.5;
  }

  static Result make(int i) {
    Result r;
    r.index = i;
    r.id = fmt::format("q{}", i);
    r.choices[0].text = fmt::format("the answer is {}", i + 10);
    r.answer = fmt::format("#### {}", i % 2 ? i + 10 : 5);  // the odd ones are right
    r.prompt_tokens = 8;
    r.choices[0].finish_reason = "length";
    r.choices[0].logprobs.emplace();
    for (int t = 0; t < 4; ++t) add_token(r.choices[0], 100 * i + t, -0.5f);
    r.choices[0].timing.prefill_chunks = 1;
    return r;
  }

  static void add_token(Choice& choice, int32_t token, float logprob) {
    choice.token_ids.push_back(token);
    choice.logprob_hash.add(logprob);
    choice.logprobs->push_back({.token = token,
                                .logprob = logprob,
                                .top = {{token, logprob}, {token + 1, logprob - 0.25f}}});
    choice.timing.token(static_cast<double>(choice.token_ids.size()));
  }

  // Takes the tokens of a choice away and gives it others.
  static void retoken(Choice& choice, const std::vector<int32_t>& tokens, float logprob) {
    choice.token_ids.clear();
    choice.logprobs->clear();
    choice.logprob_hash = {};
    for (const int32_t t : tokens) add_token(choice, t, logprob);
  }
  static void retoken(Result& r, const std::vector<int32_t>& tokens, float logprob) {
    retoken(r.choices[0], tokens, logprob);
  }

  void write(const std::string& dir) const {
    OutputWriter out({.dir = dir, .input_path = ""});
    for (const Result& r : results) out.write(r.index, to_json(r));
    for (const BadLine& b : bad) out.write(b.index, to_json(b));
    out.finish();
    write_run_record(dir, record);
  }

  std::vector<Result> results;
  std::vector<BadLine> bad;
  RunRecord record;
};

struct Pair {
  FakeRun a{4}, b{4};
  test::TempDir dir;
  CompareReport report() {
    a.write(dir / "a");
    b.write(dir / "b");
    return compare_runs(dir / "a", dir / "b");
  }
};

using test::error_text;
using test::has;

TEST_CASE("two equal runs are identical") {
  Pair pair;
  const CompareReport r = pair.report();
  CHECK(r.in_both == 4);
  CHECK(r.compared == 4);
  CHECK(r.token_identical == 4);
  CHECK(r.logprob_identical == 4);
  CHECK(r.max_logprob_difference == 0.0);
  CHECK(r.logprob_positions == 16);
  CHECK(r.divergences.empty());
  CHECK(r.a.accuracy() == 0.5);
  CHECK(r.both_right == 2);
  CHECK(r.mcnemar_p() == 1.0);
  CHECK(passes(r, 1.0));
  CHECK(verdict(r) == "identical: 4 of 4 requests have the same tokens and the same logprob bits");
  CHECK(to_text(r, {}).starts_with(verdict(r) + "\nPASS"));
  CHECK(has(to_text(r, {}), "tokens_per_second                  12.500           12.500"));
  const OrderedJson j = to_json(r, {});
  CHECK(j["token_identical"] == 1.0);
  CHECK(j["passes"] == true);
  CHECK(j["a"]["summary"]["tokens_per_second"] == 12.5);
}

TEST_CASE("records in another order are joined by id") {
  Pair pair;
  for (Result& r : pair.b.results) r.index = 3 - r.index;
  const CompareReport r = pair.report();
  CHECK(r.logprob_identical == 4);
  CHECK(passes(r, 1.0));
}

TEST_CASE("another token is found with its place and margin") {
  Pair pair;
  FakeRun::retoken(pair.b.results[2], {200, 201, 77, 203}, -0.5f);
  const CompareReport r = pair.report();
  CHECK(r.token_identical == 3);
  CHECK(r.logprob_identical == 3);
  CHECK(r.token_identical_share() == 0.75);
  REQUIRE(r.divergences.size() == 1);
  CHECK(r.divergences[0].id == "q2");
  CHECK(r.divergences[0].position == 2);
  CHECK(r.divergences[0].token_a == 202);
  CHECK(r.divergences[0].token_b == 77);
  CHECK(r.divergences[0].margin_a == 0.25);
  CHECK(r.logprob_positions == 14);  // up to where they part
  CHECK_FALSE(passes(r, 1.0));
  CHECK(passes(r, 0.75));
  CHECK(verdict(r) == "different: 3 of 4 requests have the same tokens, 3 the same logprob bits");
  CHECK(has(to_text(r, {}), "\"q2\" at token 2: A 202, B 77; top-2 margin A 0.25, B 0.25"));
  CHECK(has(to_text(r, {}), "\nFAIL"));
}

TEST_CASE("a divergence shows both texts about where they part") {
  Pair pair;
  const std::string before = "Sixty-four marbles, ünd so he has ",
                    behind = " marbles left, he says…";
  pair.a.results[2].choices[0].text = before + "12" + behind;
  pair.b.results[2].choices[0].text = before + "13" + behind;
  FakeRun::retoken(pair.b.results[2], {200, 201, 77, 203}, -0.5f);
  FakeRun::retoken(pair.b.results[3], {300, 301, 302, 9}, -0.5f);
  pair.b.results[3].choices[0].text =
      pair.a.results[3].choices[0].text;  // a token that has no text
  FakeRun::retoken(pair.b.results[1], {100, 101, 102, 9}, -0.5f);
  pair.b.results[1].choices[0].text.reset();
  FakeRun::retoken(pair.b.results[0], {0, 1}, -0.5f);
  pair.b.results[0].choices[0].text = "the answ";
  const CompareReport r = pair.report();
  REQUIRE(r.divergences.size() == 4);
  const Divergence& d = r.divergences[2];
  CHECK(d.text_before == "…ty-four marbles, ünd so he has 1");
  CHECK(d.text_a == "2 marbles left, he says…");
  CHECK(d.text_b == "3 marbles left, he says…");
  CHECK(r.divergences[0].text_before == "the answ");
  CHECK(r.divergences[0].text_a == "er is 10");
  CHECK(r.divergences[0].text_b == "");
  CHECK_FALSE(r.divergences[1].text_before);
  CHECK_FALSE(r.divergences[3].text_before);
  CHECK(has(to_text(r, {}),
            "at token 2: A 202, B 77; top-2 margin A 0.25, B 0.25\n    after \"…ty-four marbles, "
            "ünd so he "
            "has 1\": A \"2 marbles left, he says…\", B \"3 marbles left, he says…\"\n"));
  const OrderedJson j = to_json(r, {})["divergences"];
  CHECK(j[2]["text_b"] == "3 marbles left, he says…");
  CHECK(j[1]["text_before"].is_null());
}

TEST_CASE("texts that part within a character are shown from its beginning") {
  Pair pair;
  FakeRun::retoken(pair.b.results[2], {200, 77}, -0.5f);
  pair.a.results[2].choices[0].text = "x é";   // c3 a9
  pair.b.results[2].choices[0].text = "x è!";  // c3 a8
  const std::string longer(100, 'y');
  pair.a.results[3].choices[0].text = "z" + longer;
  pair.b.results[3].choices[0].text = "a" + longer;
  FakeRun::retoken(pair.b.results[3], {77}, -0.5f);
  const CompareReport r = pair.report();
  CHECK(r.divergences.at(0).text_before == "x ");
  CHECK(r.divergences.at(0).text_a == "é");
  CHECK(r.divergences.at(0).text_b == "è!");
  CHECK(r.divergences.at(1).text_before == "");
  CHECK(r.divergences.at(1).text_a == "z" + longer.substr(0, 31) + "…");
}

TEST_CASE("an output that is a beginning of the other is different") {
  Pair pair;
  FakeRun::retoken(pair.b.results[0], {0, 1}, -0.5f);
  FakeRun::retoken(pair.a.results[1], {100}, -0.5f);
  const CompareReport r = pair.report();
  CHECK(r.token_identical == 2);
  REQUIRE(r.divergences.size() == 2);
  CHECK(r.divergences[0].position == 2);
  CHECK(r.divergences[0].token_a == 2);
  CHECK_FALSE(r.divergences[0].token_b);
  CHECK(r.divergences[1].position == 1);
  CHECK_FALSE(r.divergences[1].token_a);
}

TEST_CASE("one other bit of a logprob is seen with equal tokens") {
  Pair pair;
  FakeRun::retoken(pair.b.results[3], {300, 301, 302, 303}, std::nextafter(-0.5f, -1.0f));
  const CompareReport r = pair.report();
  CHECK(r.token_identical == 4);
  CHECK(r.logprob_identical == 3);
  CHECK(near(*r.max_logprob_difference, 5.9604645e-8));
  CHECK(r.max_logprob_difference_id == "q3");
  CHECK_FALSE(passes(r, 1.0));
}

TEST_CASE("runs without logprob lists are compared by their hash") {
  Pair pair;
  FakeRun::retoken(pair.b.results[3], {300, 301, 302, 303}, -0.75f);
  for (FakeRun* run : {&pair.a, &pair.b})
    for (Result& r : run->results) r.choices[0].logprobs.reset();
  const CompareReport r = pair.report();
  CHECK(r.logprob_identical == 3);
  CHECK_FALSE(r.max_logprob_difference);
}

// Request `i` of both runs gets a second choice of tokens 7 and 8.
void add_choice(Pair& pair, size_t i) {
  for (FakeRun* run : {&pair.a, &pair.b}) {
    Result& r = run->results[i];
    r.choices.push_back(r.choices[0]);
    FakeRun::retoken(r.choices[1], {7, 8}, -0.5f);
    r.choices[1].text = "so 5";
  }
}

TEST_CASE("a request is identical where all its choices are") {
  Pair pair;
  add_choice(pair, 1);
  const CompareReport r = pair.report();
  CHECK(r.logprob_identical == 4);
  CHECK(r.logprob_positions == 18);
  CHECK(r.a.requests == 4);
  CHECK(r.a.prompt_tokens == 32);
  CHECK(r.a.completion_tokens == 18);
  CHECK(r.a.correct == 2);  // by the first choice
  CHECK(passes(r, 1.0));
}

TEST_CASE("a choice that differs makes its request differ and is named") {
  Pair pair;
  add_choice(pair, 1);
  add_choice(pair, 2);
  FakeRun::retoken(pair.b.results[1].choices[1], {7, 9}, -0.5f);
  FakeRun::retoken(pair.b.results[2].choices[1], {7, 8}, std::nextafter(-0.5f, -1.0f));
  const CompareReport r = pair.report();
  CHECK(r.compared == 4);
  CHECK(r.token_identical == 3);
  CHECK(r.logprob_identical == 2);
  CHECK(r.max_logprob_difference_id == "q2");
  REQUIRE(r.divergences.size() == 1);
  CHECK(r.divergences[0].id == "q1");
  CHECK(r.divergences[0].choice == 1);
  CHECK(r.divergences[0].position == 1);
  CHECK(r.divergences[0].token_a == 8);
  CHECK(r.divergences[0].token_b == 9);
  CHECK(has(to_text(r, {}), "\"q1\" choice 1 at token 1: A 8, B 9;"));
  CHECK(to_json(r, {})["divergences"][0]["choice"] == 1);
  CHECK(has(report_html(r, {}), "q1&quot; choice 1, 1</td>"));
}

TEST_CASE("another number of choices is different whatever they are") {
  for (const bool in_a : {true, false}) {
    Pair pair;
    add_choice(pair, 3);
    (in_a ? pair.b : pair.a).results[3].choices.pop_back();
    const CompareReport r = pair.report();
    CHECK(r.token_identical == 3);
    CHECK(r.logprob_identical == 3);
    REQUIRE(r.divergences.size() == 1);
    CHECK(r.divergences[0].choice == 1);
    CHECK(r.divergences[0].position == 0);
    CHECK(r.divergences[0].token_a.has_value() == in_a);
    CHECK(r.divergences[0].token_b.has_value() == !in_a);
  }
}

TEST_CASE("a missing request fails the comparison on either side") {
  for (const bool in_a : {true, false}) {
    Pair pair;
    (in_a ? pair.b : pair.a).results.erase((in_a ? pair.b : pair.a).results.begin() + 1);
    const CompareReport r = pair.report();
    CHECK(r.in_both == 3);
    CHECK(r.logprob_identical == 3);
    CHECK((in_a ? r.only_a : r.only_b) == 1);
    CHECK((in_a ? r.only_b : r.only_a) == 0);
    CHECK((in_a ? r.only_a_ids : r.only_b_ids) == std::vector<Json>{"q1"});
    CHECK_FALSE(passes(r, 1.0));
    CHECK_FALSE(passes(r, 0.0));
    CHECK(has(verdict(r), in_a ? "; only in A: 1" : "; only in B: 1"));
    CHECK_FALSE(verdict(r).starts_with("identical"));
  }
}

TEST_CASE("a comparison of nothing is a pass only where there was nothing to answer") {
  Pair pair;
  pair.a.results.clear();
  const CompareReport one = pair.report();
  CHECK(one.token_identical_share() == 0);
  CHECK_FALSE(passes(one, 1.0));
  CHECK_FALSE(passes(one, 0.0));
  CHECK(has(verdict(one), "nothing compared: no request was answered in both"));

  Pair empty;
  empty.a.results.clear();
  empty.b.results.clear();
  const CompareReport r = empty.report();
  CHECK(passes(r, 1.0));
  CHECK(has(verdict(r), "nothing compared: the runs have no requests"));
  CHECK(failures(r, {.max_logprob_diff = 0.0}).empty());
  CHECK_FALSE(failures(r, {.min_accuracy = 0.5}).empty());
}

TEST_CASE("a comparison of failures only is not a pass") {
  Pair pair;
  for (FakeRun* run : {&pair.a, &pair.b}) {
    run->results.clear();
    run->bad = {{.index = 0, .line = 1, .id = "q0", .code = "x", .message = "m"}};
  }
  const CompareReport r = pair.report();
  CHECK(r.failed_both == 1);
  CHECK(r.compared == 0);
  CHECK_FALSE(passes(r, 0.0));
}

TEST_CASE("lines that fail alike are left out and others count as different") {
  Pair pair;
  const BadLine no_id{.index = 4, .line = 5, .code = "invalid_json", .message = "m"};
  const BadLine again{.index = 5, .line = 6, .id = "q1", .code = "duplicate_id", .message = "m"};
  pair.a.bad = {no_id, again};
  pair.b.bad = {no_id, again};
  {
    Pair same;
    same.a.bad = same.b.bad = pair.a.bad;
    const CompareReport r = same.report();
    CHECK(r.failed_both == 2);
    CHECK(r.compared == 4);
    CHECK(r.a.failed == 2);
    CHECK(passes(r, 1.0));
    CHECK(has(verdict(r), "; failed alike in both: 2"));
  }
  pair.b.results.pop_back();
  pair.b.bad.push_back(
      {.index = 3, .line = 4, .id = "q3", .code = "logits_not_finite", .message = "m"});
  const CompareReport r = pair.report();
  CHECK(r.in_both == 6);
  CHECK(r.failed_one == 1);
  CHECK(r.logprob_identical == 3);
  CHECK(r.compared == 4);
  CHECK_FALSE(passes(r, 1.0));
}

TEST_CASE("answers that turn are counted in pairs") {
  Pair pair;
  pair.b.results[0].choices[0].text = "so 5";    // right now
  pair.b.results[1].choices[0].text = "so 999";  // wrong now
  pair.b.results[3].choices[0].text = "so 999";
  const CompareReport r = pair.report();
  CHECK(r.a.correct == 2);
  CHECK(r.b.correct == 1);
  CHECK(r.only_a_right == 2);
  CHECK(r.only_b_right == 1);
  CHECK(r.both_wrong == 1);
  CHECK(near(*r.mcnemar_p(), 1.0));
  CompareReport many;  // binomial tail of 2 of 12 at one half, twice: 158 / 4096
  many.only_a_right = 10;
  many.only_b_right = 2;
  CHECK(near(*many.mcnemar_p(), 158.0 / 4096, 1e-10));
}

TEST_CASE("a request that failed is wrong where its answer is known") {
  Pair pair;
  const BadLine failed{
      .index = 4, .line = 5, .id = "q4", .code = "x", .message = "m", .answer = "#### 14"};
  pair.a.results.push_back(FakeRun::make(5));
  pair.a.results.back().index = 4;
  pair.a.results.back().id = "q4";
  BadLine openai = failed;
  openai.index = 5;
  openai.id = "q5";
  openai.openai = true;
  pair.a.bad = {openai};
  pair.b.bad = {failed, openai};
  const CompareReport r = pair.report();
  CHECK(r.a.answered == 6);
  CHECK(r.a.correct == 3);
  CHECK(r.b.answered == 6);
  CHECK(r.b.correct == 2);
  CHECK(r.only_a_right == 1);
  CHECK(r.both_wrong == 3);
  CHECK_FALSE(failures(r, {.min_match = 0, .max_accuracy_drop = 0.1}).empty());
}

TEST_CASE("split prompts and differing options are told") {
  Pair pair;
  pair.b.record.counts.prompts_split = 3;
  pair.b.record.options["chunked_prefill"] = "on";
  pair.b.record.input_sha256 = "bb";
  const CompareReport r = pair.report();
  CHECK(r.a.prompts_split == 0);
  CHECK(r.b.prompts_split == 3);
  REQUIRE(r.notes.size() == 2);
  CHECK(r.notes[0] == "the input files of the runs differ");
  CHECK(r.notes[1] == "option chunked_prefill: \"off\" | \"on\"");
}

TEST_CASE("checkpoints differ by their weights and files and not by their place") {
  const auto notes = [](const OrderedJson& other) {
    Pair pair;
    pair.a.record.model = {{"path", "m"}, {"fingerprint", "f"}, {"files", {{"config.json", "c"}}}};
    pair.b.record.model = pair.a.record.model;
    pair.b.record.model.update(other);
    return pair.report().notes;
  };
  CHECK(notes({{"path", "elsewhere"}}).empty());
  CHECK(notes({{"files", nullptr}}).empty());  // a run of an earlier version
  CHECK(notes({{"fingerprint", "g"}}) ==
        std::vector<std::string>{"the weights of the runs' checkpoints differ"});
  CHECK(notes({{"files", {{"config.json", "d"}}}}) ==
        std::vector<std::string>{"the files beside the weights of the runs' checkpoints differ"});
}

TEST_CASE("logprobs of prompts are compared where both runs have them") {
  const auto report = [](const std::vector<float>& in_a, const std::vector<float>& in_b,
                         bool echo) {
    Pair pair;
    for (auto& [run, logprobs] : {std::pair(&pair.a, in_a), std::pair(&pair.b, in_b)}) {
      Result& r = run->results[1];
      r.prompt_tokens = 3;
      std::vector<TokenLogprob> entries;
      for (const float logprob : logprobs)
        entries.push_back({.token = 7, .logprob = logprob, .top = {{7, logprob}}});
      if (echo) {
        r.form = Form::completion;
        r.choices[0].token_ids.clear();
        r.choices[0].logprobs->clear();
        r.choices[0].logprob_hash = {};
        r.token_bytes = {{7, "x"}};
        r.echoed =
            EchoedPrompt{.token_ids = {7, 7, 7}, .pieces = {"a", "a", "a"}, .logprobs = entries};
      } else if (!entries.empty()) {
        r.prompt_logprobs = entries;
      }
    }
    return pair.report();
  };
  for (const bool echo : {false, true}) {
    CHECK(report({-1, -2}, {-1, -2}, echo).logprob_identical == 4);
    const CompareReport other = report({-1, -2}, {-1, -2.5}, echo);
    CHECK(other.token_identical == 4);
    CHECK(other.logprob_identical == 3);
    CHECK(other.max_logprob_difference == 0.5);
    CHECK(other.max_logprob_difference_id == "q1");
  }
  CHECK(report({-1, -2}, {}, false).logprob_identical == 4);
}

TEST_CASE("a resumed run's count of split prompts is that of its records") {
  Pair pair;
  pair.b.record.counts.kept = 2;
  pair.b.record.counts.prompts_split = 1;
  for (FakeRun* run : {&pair.a, &pair.b})
    for (Result& r : run->results) r.choices[0].timing.prefill_chunks = 2;
  pair.a.record.counts.prompts_split = 3;
  const CompareReport r = pair.report();
  CHECK(r.a.prompts_split == 3);
  CHECK(r.b.prompts_split == 4);
}

TEST_CASE("an outputs file without run.json can be compared") {
  Pair pair;
  add_choice(pair, 0);
  pair.b.results[0].choices[1].timing.prefill_chunks = 2;
  pair.report();
  std::filesystem::rename(pair.dir / "b/outputs.jsonl", pair.dir / "other.jsonl");
  const CompareReport r = compare_runs(pair.dir / "a", pair.dir / "other.jsonl");
  CHECK(passes(r, 1.0));
  CHECK(r.b.prompts_split == 1);
  CHECK(r.b.run.is_null());
  CHECK(has(to_text(r, {}), "no run.json beside it"));
}

TEST_CASE("runs that are not finished are refused") {
  Pair pair;
  pair.b.record.state = "running";
  CHECK(has(error_text([&] { pair.report(); }),
            "b/run.json: the run is not finished: expected state \"finished\", found \"running\""));
  std::filesystem::remove(pair.dir / "b/run.json");
  std::filesystem::rename(pair.dir / "b/outputs.jsonl", pair.dir / "b/outputs.jsonl.partial");
  const auto compare = [&](const std::string& b) {
    return error_text([&] { compare_runs(pair.dir / "a", b); });
  };
  CHECK(has(compare(pair.dir / "b"), "b: the run is not finished: found outputs.jsonl.partial"));
  CHECK(has(compare(pair.dir / "b/outputs.jsonl.partial"), "the run is not finished"));
  CHECK(has(compare(pair.dir / "c"), "c: expected a finished run, found no such file"));
}

TEST_CASE("torn and foreign lines are named") {
  Pair pair;
  pair.report();
  const std::string good = read_file(pair.dir / "b/outputs.jsonl");
  const auto with = [&](const std::string& text) {
    std::ofstream(pair.dir / "b/outputs.jsonl") << text;
    return error_text([&] { compare_runs(pair.dir / "a", pair.dir / "b"); });
  };
  CHECK(has(with(good.substr(0, good.size() - 1)), "b/outputs.jsonl:4: a torn line"));
  CHECK(has(with(good.substr(0, good.size() - 30) + "\n"), "b/outputs.jsonl:4: not valid JSON"));
  CHECK(has(with("{\"id\":1}\n"), "outputs.jsonl:1: field 'status': expected a string"));
  CHECK(has(with("{\"id\":1,\"status\":\"ok\"}\n"), "outputs.jsonl:1: field 'token_ids'"));
  const std::string ids = "{\"id\":1,\"status\":\"ok\",\"token_ids\":[";
  for (const std::string id : {"-1", "4294967301", "1.5"})
    CHECK(has(with(ids + id + "]}\n"),
              "outputs.jsonl:1: field 'token_ids': expected token ids, found the number " + id));
  CHECK(has(with(good + good), "b/outputs.jsonl:5: the id \"q0\" appears twice"));
  CHECK(has(with("\n"), "outputs.jsonl:1: not valid JSON"));
}

TEST_CASE("an id of another type is another request") {
  Pair pair;
  pair.a.results[0].id = 7;
  pair.b.results[0].id = "7";
  const CompareReport r = pair.report();
  CHECK(r.in_both == 3);
  CHECK(r.only_a == 1);
  CHECK(r.only_b == 1);
}

}  // namespace
}  // namespace mla::compare_runs_test
