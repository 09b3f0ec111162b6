#include "lib/eval/answer.h"

#include <fstream>

#include "lib/base/json.h"
#include "tests/support/catch.h"

namespace mla::answer_test {
namespace {

TEST_CASE("the strict filter takes the first marked number") {
  CHECK(extract_strict("x\n#### 18") == "18");
  CHECK(extract_strict("#### 5 then #### 6") == "5");
  CHECK(extract_strict("##### -7,000.5.") == "-7,000.5.");
  CHECK(extract_strict("#### $18") == "[invalid]");
  CHECK(extract_strict("#### - 1") == "[invalid]");
  CHECK(extract_strict("####  1") == "[invalid]");
  CHECK(extract_strict("####1") == "[invalid]");
  CHECK(extract_strict("#### x #### 2") == "2");
  CHECK(extract_strict("#### ") == "[invalid]");
  CHECK(extract_strict("") == "[invalid]");
}

TEST_CASE("the flexible filter takes the last number-like piece") {
  CHECK(extract_flexible("3 apples and 14 pears") == "14");
  CHECK(extract_flexible("it costs $1,234.50.") == "$1,234.50.");
  CHECK(extract_flexible("5-3") == "-3");
  CHECK(extract_flexible("--3") == "-3");
  CHECK(extract_flexible("7, then words ...") == "...");
  CHECK(extract_flexible("7 , .") == "7");
  CHECK(extract_flexible("-$5") == "-$5");
  CHECK(extract_flexible("- $") == "[invalid]");
  CHECK(extract_flexible("") == "[invalid]");
}

TEST_CASE("normalisation removes what the task ignores in its order") {
  CHECK(normalize_answer("1,000") == "1000");
  CHECK(normalize_answer("$5") == "5");
  CHECK(normalize_answer("so 3\nmore #### 4 #### 18.") == "18");
  CHECK(normalize_answer("5..") == "5.");
  CHECK(normalize_answer("5.\n") == "5\n");
  CHECK(normalize_answer("5\n.") == "5\n");
  CHECK(normalize_answer("Paris") == "paris");
  CHECK(normalize_answer("#,### 5") == "5");
  CHECK(normalize_answer("18.0") == "18.0");
}

TEST_CASE("a match compares text and not numbers") {
  CHECK(exact_match("18", "She has 9 * 2 = <<9*2=18>>18.\n#### 18"));
  CHECK(exact_match("$1,800.", "#### 1,800"));
  CHECK_FALSE(exact_match("18.0", "#### 18"));
  CHECK_FALSE(exact_match("[invalid]", "#### 18"));
}

TEST_CASE("the scorer gives the values of lm-evaluation-harness") {
  if (test::assets().empty()) MLA_SKIP("no test assets");
  const std::string path = test::assets() + "/gsm8k/scorer_vectors.json";
  const Json vectors = parse_json(read_file(path), path);
  REQUIRE(vectors.size() >= 25);
  for (const Json& v : vectors) {
    const std::string text = v["response"];
    INFO(text);
    CHECK(extract_strict(text) == v["strict"].get<std::string>());
    CHECK(extract_flexible(text) == v["flexible"].get<std::string>());
    CHECK(normalize_answer(extract_strict(text)) == v["strict_norm"].get<std::string>());
    CHECK(normalize_answer(extract_flexible(text)) == v["flexible_norm"].get<std::string>());
  }
}

TEST_CASE("every reference answer of GSM8K scores under both filters") {
  if (test::assets().empty()) MLA_SKIP("no test assets");
  std::ifstream in(test::assets() + "/gsm8k/test.jsonl");
  std::string line;
  int rows = 0, right = 0;
  while (std::getline(in, line)) {
    const std::string answer = parse_json(line, "test.jsonl")["answer"];
    ++rows;
    right += exact_match(extract_strict(answer), answer) &&
             exact_match(extract_flexible(answer), answer);
  }
  CHECK(rows == 1319);
  CHECK(right == rows);
}

}  // namespace
}  // namespace mla::answer_test
