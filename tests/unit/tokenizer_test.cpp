#include "lib/text/tokenizer.h"

#include <fstream>
#include <thread>

#include "lib/base/error.h"
#include "tests/support/catch.h"
#include "tests/unit/tokenizer_fixture.h"

namespace mla::test::tokenizer_test {

using mla::Json;
using mla::Tokenizer;
using mla::test::make_tokenizer;
using mla::test::set_stages;
using mla::test::small_added;
using mla::test::small_tokenizer;
using mla::test::split_stage;
using Ids = std::vector<int32_t>;

TEST_CASE("Of all pairs the one of lowest rank is merged first and of equals the leftmost") {
  const Tokenizer t = make_tokenizer(small_tokenizer({"b c", "a b", "a bc", "a a"}));
  CHECK(t.vocab_size() == 260);
  CHECK(t.encode("abc") == Ids{258});  // bc, then a + bc: never ab + c
  CHECK(t.encode("ab") == Ids{257});
  CHECK(t.encode("aaa") == Ids{259, 'a'});
  CHECK(t.encode("aabc") == Ids{'a', 258});
  CHECK(t.encode("").empty());
}

TEST_CASE("A token to which no merge leads is not used for its own text") {
  Json json = small_tokenizer({"a b"});
  json["model"]["vocab"]["xyz"] = 257;
  const Tokenizer t = make_tokenizer(json);
  CHECK(t.encode("xyz") == Ids{'x', 'y', 'z'});
  CHECK(t.decode({257}) == "xyz");
}

TEST_CASE("Merges may be pairs as well as strings") {
  Json json = small_tokenizer({"a b", "ab c"});
  json["model"]["merges"] = Json::array({Json::array({"a", "b"}), Json::array({"ab", "c"})});
  CHECK(make_tokenizer(json).encode("abc") == Ids{257});
}

TEST_CASE("A long word is merged as a short one is") {
  const Tokenizer t = make_tokenizer(small_tokenizer({"a b", "ab ab", "abab abab", "b a"}));
  Ids expected;
  std::string word;
  for (int i = 0; i < 100000; ++i) {
    word += "abababab";
    expected.push_back(258);
  }
  CHECK(t.encode(word) == expected);
  // Both ways of merging, at lengths around the border between them: a block of five bytes takes
  // no part in what follows the z.
  for (size_t n = 1; n < 40; ++n) {
    std::string text;
    Ids ids;
    for (size_t i = 0; i < n; ++i) {
      text += "ababz";
      ids.insert(ids.end(), {257, 'z'});
    }
    CHECK(t.encode(text) == ids);
  }
}

TEST_CASE("Of equal pairs in a long word the leftmost is merged first") {
  Ids expected(50, 256);
  expected.push_back('a');
  CHECK(make_tokenizer(small_tokenizer({"a a"})).encode(std::string(101, 'a')) == expected);
}

TEST_CASE("A blank that is also punctuation goes where the order of the splits puts it") {
  const std::string text = " \u3000é";
  Json json = small_tokenizer({"Ġ ã"});  // the blank and the first byte of U+3000
  Json swapped = json;
  set_stages(json, {split_stage("\\s?[é]+"), split_stage("\\s?[!\u3000]+")});
  set_stages(swapped, {split_stage("\\s?[!\u3000]+"), split_stage("\\s?[é]+")});
  CHECK(make_tokenizer(json).encode(text).front() == ' ');
  CHECK(make_tokenizer(swapped).encode(text).front() == 256);
}

TEST_CASE("One word of a megabyte takes no quadratic time") {
  const Tokenizer t = make_tokenizer(small_tokenizer({"a a", "aa aa"}));
  CHECK(t.encode(std::string(1 << 20, 'a')).size() == (1 << 18));
}

TEST_CASE("A megabyte of blanks before other text takes no quadratic time") {
  Json json = small_tokenizer({});
  set_stages(json, {split_stage("\\s+$")});
  CHECK(make_tokenizer(json).encode(std::string(1 << 20, ' ') + "x").size() == (1 << 20) + 1);
}

TEST_CASE("Splits apply in order and each to every piece of those before") {
  Json json = small_tokenizer({"a a", "! !", "a !", "aa !!", "Ġ a"});
  set_stages(json, {split_stage("\\s?a+"), split_stage("\\s?[!a]+")});
  CHECK(make_tokenizer(json).encode("aa!! a") == Ids{256, 257, 260});
  // The other way round "!a!" is one piece before the a is isolated in it.
  Json swapped = small_tokenizer({"a a", "! !", "! a", "!a !"});
  Json isolated = swapped;
  set_stages(swapped, {split_stage("\\s?[!a]+")});
  set_stages(isolated, {split_stage("\\s?[!a]+"), split_stage("\\s?a+")});
  CHECK(make_tokenizer(swapped).encode("!a!") == Ids{259});
  CHECK(make_tokenizer(isolated).encode("!a!") == Ids{'!', 'a', '!'});
}

TEST_CASE("The end of a piece is that before an added token too") {
  Json json = small_tokenizer({"Ġ Ġ"});
  set_stages(json, {split_stage("x"), split_stage("\\s$")});
  json["added_tokens"] = {small_added(300, "<s>", true)};
  const Tokenizer t = make_tokenizer(json);
  CHECK(t.encode("a  ") == Ids{'a', ' ', ' '});
  CHECK(t.encode("a  <s>") == Ids{'a', ' ', ' ', 300});
  CHECK(t.encode("a  b") == Ids{'a', 256, 'b'});
}

TEST_CASE("White space is Unicode White_Space and not what looks like it") {
  // A merge over the border tells whether the character and the letter are in one piece.
  const auto goes_with_letter = [](const std::string& c) {
    const std::string last = mla::test::byte_text(static_cast<unsigned char>(c.back()));
    Json json = small_tokenizer({last + " a"});
    set_stages(json, {split_stage("\\s?[a]+")});
    return make_tokenizer(json).encode(c + "a").back() == 256;
  };
  for (const char* space : {" ", "\v", "\u0085", "\u00A0", "\u1680", "\u2028", "\u202F", "\u3000"})
    CHECK(goes_with_letter(space));
  for (const char* other : {"\u180E", "\u200B", "\uFEFF", "-"})
    CHECK_FALSE(goes_with_letter(other));
}

TEST_CASE("Digits are split one by one whatever their script") {
  Json json = small_tokenizer({"1 2"});
  const Json digits = {{"type", "Digits"}, {"individual_digits", true}};
  set_stages(json, {digits});
  CHECK(make_tokenizer(json).encode("12") == Ids{'1', '2'});
  Json runs = small_tokenizer({"1 2", "a 12"});
  set_stages(runs, {Json{{"type", "Digits"}, {"individual_digits", false}}});
  CHECK(make_tokenizer(runs).encode("a12") == Ids{'a', 256});
}

TEST_CASE("A lone ByteLevel with its own regex splits as GPT-2 does") {
  Json json = small_tokenizer({"Ġ a", "a a", "' s", "a 's", "Ġ Ġ", "ĠĠ Ġ"});
  json["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  const Tokenizer t = make_tokenizer(json);
  CHECK(t.encode("a's a") == Ids{'a', 258, 256});
  CHECK(t.encode("a   a") == Ids{'a', 260, 256});
}

TEST_CASE("Added tokens are matched anywhere with the longest at the leftmost place") {
  Json json = small_tokenizer({});
  json["added_tokens"] = {small_added(300, "<s", false), small_added(301, "<s>x", true),
                          small_added(302, "s>", false), small_added(303, "é é", false)};
  const Tokenizer t = make_tokenizer(json);
  CHECK(t.encode("a<s>xb") == Ids{'a', 301, 'b'});
  CHECK(t.encode("<s>y") == Ids{300, '>', 'y'});
  CHECK(t.encode("<<ss>") == Ids{'<', 300, 302});
  CHECK(t.encode("é é<s") == Ids{303, 300});
  CHECK(t.decode({301, 300, 303}) == "<sé é");
  CHECK(t.decode({301, 300}, false) == "<s>x<s");
  CHECK(t.is_special(301));
  CHECK_FALSE(t.is_special(300));
  CHECK_FALSE(t.is_special(299));
  CHECK_FALSE(t.is_special(-1));
  CHECK(t.vocab_size() == 304);
}

TEST_CASE("Added tokens that are not normalized are matched before those that are") {
  Json json = small_tokenizer({});
  json["added_tokens"] = {small_added(300, "ab", false), small_added(301, "bc", false)};
  CHECK(make_tokenizer(json).encode("abc") == Ids{300, 'c'});
  json["added_tokens"][1]["normalized"] = false;
  CHECK(make_tokenizer(json).encode("abc") == Ids{'a', 301});
}

TEST_CASE("Decoding yields nothing for ids without a token and U+FFFD for what is not UTF-8") {
  const Tokenizer t = make_tokenizer(small_tokenizer({}));
  CHECK(t.decode({'a', 256, 100000, -1, 'b'}) == "ab");
  CHECK(t.token_bytes(0xC3) == "\xC3");
  CHECK(t.token_bytes(100000).empty());
  // Maximal subparts: E4 BD is one, F0 80 two, ED A0 80 three.
  CHECK(t.decode({0xE4, 0xBD, 'x'}) == "\uFFFDx");
  CHECK(t.decode({0xF0, 0x80}) == "\uFFFD\uFFFD");
  CHECK(t.decode({0xED, 0xA0, 0x80}) == "\uFFFD\uFFFD\uFFFD");
  CHECK(t.decode({0xF0, 0x9F, 0x91}) == "\uFFFD");
  CHECK(t.decode({0xF5, 0xC0, 0xAF}) == "\uFFFD\uFFFD\uFFFD");
}

TEST_CASE("Text that is not UTF-8 is refused with the offset") {
  const Tokenizer t = make_tokenizer(small_tokenizer({}));
  CHECK_THROWS_WITH(t.encode("0123456789é\x80"), "text is not UTF-8: byte 0x80 at offset 12");
  CHECK_THROWS_WITH(t.encode("a\xC3"), "text is not UTF-8: byte 0xC3 at offset 1");
  CHECK_THROWS_WITH(t.encode("\xED\xA0\x80"), "text is not UTF-8: byte 0xED at offset 0");
  CHECK(t.encode(std::string_view("\0\xF4\x8F\xBF\xBF", 5)).size() == 5);
}

TEST_CASE("The configuration names BOS and EOS as strings or objects") {
  Json json = small_tokenizer({});
  json["added_tokens"] = {small_added(300, "<s>", true), small_added(301, "</s>", true)};
  const Tokenizer t = make_tokenizer(
      json, R"({"add_bos_token": true, "bos_token": "<s>", "chat_template": "{{ x }}",
                "eos_token": {"__type": "AddedToken", "content": "</s>"}})");
  CHECK(t.bos_id() == 300);
  CHECK(t.eos_id() == 301);
  CHECK(t.bos_text() == "<s>");
  CHECK(t.eos_text() == "</s>");
  CHECK(t.add_bos());
  CHECK(t.chat_template() == "{{ x }}");
  CHECK(t.encode("a") == Ids{'a'});

  const Tokenizer bare = make_tokenizer(json, R"({"bos_token": null})");
  CHECK(bare.bos_id() == -1);
  CHECK(bare.eos_id() == -1);
  CHECK_FALSE(bare.add_bos());
  CHECK(bare.chat_template().empty());

  CHECK(make_tokenizer(json, R"({"chat_template": [{"name": "tool", "template": "a"},
                                {"name": "default", "template": "b"}]})")
            .chat_template() == "b");
}

TEST_CASE("A folder may have no tokenizer configuration but needs tokenizer json") {
  const mla::test::TempDir dir;
  CHECK_THROWS_WITH(Tokenizer::load(dir.path()),
                    dir.path() + "/tokenizer.json: No such file or directory");
  std::ofstream(dir / "tokenizer.json") << small_tokenizer({"a b"}).dump();
  CHECK(Tokenizer::load(dir.path()).encode("ab") == Ids{256});
  std::ofstream(dir / "tokenizer_config.json") << R"({"bos_token": "<s>"})";
  CHECK_THROWS_WITH(Tokenizer::load(dir.path()),
                    dir.path() +
                        "/tokenizer_config.json: field 'bos_token': '<s>' is not a token of " +
                        dir.path() + "/tokenizer.json");
}

TEST_CASE("Several threads may encode at once") {
  Json json = small_tokenizer({"a b", "ab ab"});
  set_stages(json, {split_stage("(?:c|d)+"), split_stage("\\s?[ab]+")});
  const Tokenizer t = make_tokenizer(json);
  std::string text;
  for (int i = 0; i < 500; ++i) text += "abab ab cddc" + std::to_string(i);
  const Ids expected = t.encode(text);
  std::vector<Ids> results(4);
  std::vector<std::thread> threads;
  for (Ids& result : results) threads.emplace_back([&] { result = t.encode(text); });
  for (std::thread& thread : threads) thread.join();
  for (const Ids& result : results) CHECK(result == expected);
}

}  // namespace mla::test::tokenizer_test
