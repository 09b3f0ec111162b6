// What the Hugging Face library gives for the released tokenizers.
#include <sstream>

#include "lib/base/json.h"
#include "lib/text/detokenizer.h"
#include "lib/text/tokenizer.h"
#include "tests/support/catch.h"

namespace mla::test::tokenizer_vectors_test {

using mla::Json;
using mla::Tokenizer;

namespace {

// Encodes and decodes every line of a file, and generates it token by token; the number of lines.
int check_vectors(const Tokenizer& tokenizer, const std::string& path) {
  std::istringstream lines(mla::read_file(path));
  std::string line;
  int count = 0;
  while (std::getline(lines, line)) {
    const Json vector = mla::parse_json(line, "vector");
    const std::string text = vector["text"];
    const auto ids = vector["ids"].get<std::vector<int32_t>>();
    INFO(path << " line " << ++count);
    CHECK(tokenizer.encode(text) == ids);
    CHECK(tokenizer.decode(ids, false) == text);
    mla::Detokenizer detokenizer(&tokenizer, {"\x01never\x02"});
    for (int32_t id : ids) detokenizer.push(id);
    detokenizer.finish();
    CHECK(detokenizer.text() == tokenizer.decode(ids));
  }
  return count;
}

}  // namespace

TEST_CASE("The released tokenizer gives the ids and texts of the Hugging Face library") {
  const std::string assets = mla::test::assets();
  if (assets.empty()) MLA_SKIP("no test assets");
  const std::string dir = assets + "/tokenizer/deepseek-v2-lite";
  const Tokenizer tokenizer = Tokenizer::load(dir);
  CHECK(check_vectors(tokenizer, dir + "/vectors.jsonl") == 1760);
  CHECK(check_vectors(tokenizer, dir + "/goldens.jsonl") == 98);
  CHECK(tokenizer.vocab_size() == 100002);
  CHECK(tokenizer.bos_id() == 100000);
  CHECK(tokenizer.eos_id() == 100001);
  CHECK(tokenizer.add_bos());
  CHECK(tokenizer.decode({100000, 100002, 102399, 549}) == "The");
}

TEST_CASE("The released tokenizer with the added tokens of the Coder gives its ids") {
  const std::string assets = mla::test::assets();
  if (assets.empty()) MLA_SKIP("no test assets");
  const std::string dir = assets + "/tokenizer/deepseek-coder-v2-lite";
  Json json = mla::parse_json(mla::read_file(assets + "/tokenizer/deepseek-v2-lite/tokenizer.json"),
                              "tokenizer.json");
  json["added_tokens"] = mla::parse_json(mla::read_file(dir + "/added_tokens.json"), "added");
  const Tokenizer tokenizer = Tokenizer::parse(json.dump(), "", "tokenizer.json");
  CHECK(check_vectors(tokenizer, dir + "/vectors.jsonl") > 0);
  CHECK(tokenizer.vocab_size() == 100018);
}

}  // namespace mla::test::tokenizer_vectors_test
