#include "lib/text/detokenizer.h"

#include <random>

#include "lib/base/error.h"
#include "tests/support/catch.h"
#include "tests/unit/tokenizer_fixture.h"

namespace mla::test::detokenizer_test {

using mla::Detokenizer;
using mla::Tokenizer;

namespace {

// Ids 0 to 255 are bytes; 256 is "ab", 257 "cd", 258 "abcd", 300 special.
const Tokenizer& tokenizer() {
  static const Tokenizer t = [] {
    mla::Json json = mla::test::small_tokenizer({"a b", "c d", "ab cd"});
    json["added_tokens"] = {mla::test::small_added(300, "<s>", true)};
    return mla::test::make_tokenizer(json);
  }();
  return t;
}

// Pushes bytes one by one until a stop; the number of bytes that were pushed.
size_t push_bytes(Detokenizer& d, const std::string& bytes) {
  for (size_t i = 0; i < bytes.size(); ++i)
    if (d.push(static_cast<unsigned char>(bytes[i]))) return i + 1;
  return bytes.size();
}

}  // namespace

TEST_CASE("Text comes out token by token") {
  Detokenizer d(&tokenizer(), {});
  CHECK_FALSE(d.push(256));
  CHECK(d.text() == "ab");
  CHECK_FALSE(d.push('!'));
  CHECK(d.text() == "ab!");
  d.finish();
  CHECK(d.text() == "ab!");
  CHECK(d.stop_string().empty());
}

TEST_CASE("An incomplete character is held back until it is whole") {
  Detokenizer d(&tokenizer(), {});
  d.push(0xE4);
  CHECK(d.text() == "");
  d.push(0xBD);
  CHECK(d.text() == "");
  d.push(0xA0);
  CHECK(d.text() == "你");
}

TEST_CASE("Bytes that can be no character become U+FFFD as soon as that is known") {
  Detokenizer d(&tokenizer(), {});
  push_bytes(d, "\xE4\xBD");
  CHECK(d.text() == "");
  d.push('x');
  CHECK(d.text() == "\uFFFDx");
  d.push(0xFF);
  CHECK(d.text() == "\uFFFDx\uFFFD");
}

TEST_CASE("finish turns an incomplete tail into one U+FFFD") {
  Detokenizer d(&tokenizer(), {});
  push_bytes(d, "a\xF0\x9F\x91");
  CHECK(d.text() == "a");
  d.finish();
  CHECK(d.text() == "a\uFFFD");
}

TEST_CASE("A stop string that spans tokens ends the text before it") {
  Detokenizer d(&tokenizer(), {"bcd"});
  CHECK_FALSE(d.push('x'));
  CHECK(d.text() == "x");
  CHECK_FALSE(d.push(256));
  CHECK(d.text() == "xa");
  CHECK(d.push(257));
  CHECK(d.text() == "xa");
  CHECK(d.stop_string() == "bcd");
  d.finish();
  CHECK(d.text() == "xa");
  CHECK_THROWS_WITH(d.push('y'), "a token came after the stop string \"bcd\"");
}

TEST_CASE("A stop string within one token is found") {
  Detokenizer d(&tokenizer(), {"bc"});
  CHECK(d.push(258));
  CHECK(d.text() == "a");
}

TEST_CASE("What could begin a stop string is held back and then released") {
  Detokenizer d(&tokenizer(), {"\n\nQ:"});
  push_bytes(d, "A\n\n");
  CHECK(d.text() == "A");
  d.push('\n');
  CHECK(d.text() == "A\n");
  d.push('Q');
  CHECK(d.text() == "A\n");
  d.push('!');
  CHECK(d.text() == "A\n\n\nQ!");
  push_bytes(d, "\n\n");
  CHECK(d.text() == "A\n\n\nQ!");
  d.finish();
  CHECK(d.text() == "A\n\n\nQ!\n\n");
  CHECK(d.stop_string().empty());
}

TEST_CASE("A stop string that begins within a failed beginning of itself is found") {
  Detokenizer d(&tokenizer(), {"aab"});
  CHECK(push_bytes(d, "aaaab...") == 5);
  CHECK(d.text() == "aa");
}

TEST_CASE("A stop string of several-byte characters is found when its last byte comes") {
  Detokenizer d(&tokenizer(), {"你好"});
  const std::string text = "你们你好";
  CHECK(push_bytes(d, text) == text.size());
  CHECK(d.text() == "你们");
  CHECK(d.stop_string() == "你好");
}

TEST_CASE("Half a character never completes a stop string and stays until it is whole") {
  Detokenizer d(&tokenizer(), {"好"});
  push_bytes(d, "\xE5\xA5");  // 好 is E5 A5 BD
  CHECK(d.text() == "");
  CHECK_FALSE(d.push(0xB3));  // 女 would be E5 A5 B3
  CHECK(d.text() == "\xE5\xA5\xB3");
}

TEST_CASE(
    "Of several stop strings that is found which is complete first, then the one given first") {
  {
    Detokenizer d(&tokenizer(), {"cd", "bc", "bcd"});
    CHECK(d.push(258));
    CHECK(d.text() == "a");
    CHECK(d.stop_string() == "bc");
  }
  {
    Detokenizer d(&tokenizer(), {"abcx", "bc"});
    CHECK(push_bytes(d, "abcx") == 3);
    CHECK(d.text() == "a");
    CHECK(d.stop_string() == "bc");
  }
  for (const bool one_token : {false, true}) {  // 258 is "abcd"
    Detokenizer d(&tokenizer(), {"abc", "b"});
    CHECK((one_token ? d.push(258) : push_bytes(d, "abcd") == 2));
    CHECK(d.text() == "a");
    CHECK(d.stop_string() == "b");
  }
  for (const bool longer_first : {false, true}) {
    Detokenizer d(&tokenizer(), longer_first ? std::vector<std::string>{"bc", "c"}
                                             : std::vector<std::string>{"c", "bc"});
    CHECK(push_bytes(d, "abcd") == 3);
    CHECK(d.text() == (longer_first ? "a" : "ab"));
  }
}

TEST_CASE("A stop string may begin where none may end yet") {
  Detokenizer d(&tokenizer(), {"bcd", "xx"});
  for (const char c : std::string("xxbc")) CHECK_FALSE(d.push(c, false));
  CHECK(d.text() == "xx");
  CHECK(d.push('d'));
  CHECK(d.text() == "xx");
  CHECK(d.stop_string() == "bcd");

  Detokenizer whole(&tokenizer(), {"xx"});
  for (const char c : std::string("xx")) CHECK_FALSE(whole.push(c, false));
  CHECK_FALSE(whole.push('y'));
  whole.finish();
  CHECK(whole.text() == "xxy");

  Detokenizer over(&tokenizer(), {"xx"});  // the second and the third
  for (const char c : std::string("xx")) CHECK_FALSE(over.push(c, false));
  CHECK(over.push('x'));
  CHECK(over.text() == "x");
}

TEST_CASE("Special tokens and ids without a token add nothing") {
  Detokenizer d(&tokenizer(), {"ab"});
  d.push('a');
  CHECK_FALSE(d.push(300));
  CHECK_FALSE(d.push(299));
  CHECK_FALSE(d.push(100000));
  CHECK_FALSE(d.push(-1));
  CHECK(d.text() == "");
  CHECK(d.push('b'));
  CHECK(d.text() == "");
}

TEST_CASE("Without a tokenizer there is no text and no stop string") {
  Detokenizer d(nullptr, {});
  CHECK_FALSE(d.push('a'));
  d.finish();
  CHECK(d.text() == "");
  CHECK_THROWS_WITH(Detokenizer(nullptr, {"x"}),
                    "stop: expected no stop strings for a model without tokenizer.json, found 1");
  CHECK_THROWS_WITH(Detokenizer(&tokenizer(), {"x", ""}),
                    "stop: expected text, found an empty string");
}

TEST_CASE("Random bytes give what decode gives and released text never changes") {
  std::mt19937 rng(7);
  const int bytes[] = {'a',  'b',  'c',  0x80, 0xBF, 0xC3, 0xE4, 0xBD, 0xA0,
                       0xED, 0xF0, 0x9F, 0xF4, 0xFF, 256,  300,  299};
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> ids(rng() % 20);
    for (int32_t& id : ids) id = bytes[rng() % std::size(bytes)];
    Detokenizer d(&tokenizer(), {"abcabcabcabc", "\xC3\x80z"});
    std::string before;
    for (int32_t id : ids) {
      REQUIRE_FALSE(d.push(id));
      REQUIRE(d.text().compare(0, before.size(), before) == 0);
      before = d.text();
    }
    d.finish();
    REQUIRE(d.text() == tokenizer().decode(ids));
  }
}

}  // namespace mla::test::detokenizer_test
