// Text through small tokenizers and the detokenizer. The first byte chooses the tokenizer, the
// second where stop strings are cut out of the text.
#include <algorithm>
#include <array>

#include "lib/text/detokenizer.h"
#include "lib/text/tokenizer.h"
#include "lib/text/utf8.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/tokenizer_fixture.h"

namespace mla {
namespace {

// With merges of words, digits, spaces and halves of characters; added tokens of both kinds.
Tokenizer make(const std::vector<Json>& stages) {
  Json json =
      test::small_tokenizer({"a b", "ab ab", "abab abab", "Ġ a", "Ġ Ġ", "ĠĠ ĠĠ", "1 2", "b a",
                             "Ã ©", "ä ½", "ä½ ł", "ł å", "Ċ Ċ", "a Ġ", "aa aa", "a a"});
  const int next = static_cast<int>(json["model"]["vocab"].size());
  Json added = Json::array(
      {test::small_added(next, "<s>", true), test::small_added(next + 1, "ab!", false),
       test::small_added(next + 2, "<s><s>", false), test::small_added(next + 7, "b!a", true)});
  added[1]["normalized"] = false;
  json["added_tokens"] = added;
  test::set_stages(json, stages);
  return test::make_tokenizer(json);
}

const std::array<Tokenizer, 4>& tokenizers() {
  const Json digits = {{"type", "Digits"}, {"individual_digits", true}};
  static const std::array<Tokenizer, 4> all = {
      make({}),
      // The stages of DeepSeek-V2.
      make({test::split_stage("[\r\n]"), test::split_stage("\\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+"),
            test::split_stage("\\s?[!-/:-~！-／：-～‘-‟　-。]+"), test::split_stage("\\s+$"),
            test::split_stage("[一-龥ࠀ-一가-퟿]+"), digits}),
      // Through PCRE2: GPT-2's and that of later models.
      make({test::split_stage("'s|'t| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+")}),
      make({test::split_stage("\\p{N}{1,3}"),
            test::split_stage("[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\s*[\\r\\n]+")}),
  };
  return all;
}

// Token by token the same text as all at once; a stop string ends it where it first stands.
void check_detokenizer(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                       const std::vector<std::string>& stop) {
  const std::string whole = tokenizer.decode(ids);
  Detokenizer detokenizer(&tokenizer, stop);
  bool stopped = false;
  for (size_t i = 0; i < ids.size() && !stopped; ++i) {
    stopped = detokenizer.push(ids[i]);
    FUZZ_CHECK(whole.starts_with(detokenizer.text()));
  }
  if (!stopped) detokenizer.finish();
  FUZZ_CHECK(stopped == !detokenizer.stop_string().empty());
  if (!stopped) {
    FUZZ_CHECK(detokenizer.text() == whole);
  } else {
    FUZZ_CHECK(whole.starts_with(detokenizer.text() + detokenizer.stop_string()));
  }
  for (const std::string& text : stop)
    FUZZ_CHECK(detokenizer.text().find(text) == std::string::npos);
}

// Ids of any kind: never a failure, always UTF-8.
void check_any_ids(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c) * 3 / 2 - 1);
  FUZZ_CHECK(find_invalid_utf8(tokenizer.decode(ids)) == std::string_view::npos);
  check_detokenizer(tokenizer, ids, {});
}

}  // namespace
}  // namespace mla

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla;
  if (size < 2) return 0;
  const Tokenizer& tokenizer = tokenizers()[data[0] % 4];
  const std::string_view text = fuzz::as_text(data + 2, size - 2);
  check_any_ids(tokenizer, text);

  std::vector<int32_t> ids;
  const bool good = fuzz::parses([&] { ids = tokenizer.encode(text); });
  FUZZ_CHECK(good == (find_invalid_utf8(text) == std::string_view::npos));
  if (!good) return 0;
  std::string bytes;
  for (const int32_t id : ids) {
    FUZZ_CHECK(id >= 0 && id < tokenizer.vocab_size());
    FUZZ_CHECK(!tokenizer.token_bytes(id, false).empty());
    bytes += tokenizer.token_bytes(id, false);
  }
  FUZZ_CHECK(bytes == text);
  FUZZ_CHECK(tokenizer.decode(ids, false) == text);

  const size_t at = text.empty() ? 0 : data[1] % text.size();
  std::vector<std::string> stop;
  for (const size_t length : {1, 4, 9})
    if (!text.substr(at, length).empty()) stop.emplace_back(text.substr(at, length));
  check_detokenizer(tokenizer, ids, {});
  check_detokenizer(tokenizer, ids, stop);
  return 0;
}
