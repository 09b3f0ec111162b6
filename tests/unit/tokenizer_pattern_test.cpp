#include "lib/text/pattern.h"

#include <random>

#include "lib/base/error.h"
#include "lib/text/utf8.h"
#include "tests/support/catch.h"

namespace mla::test::tokenizer_pattern_test {

using mla::Pattern;

namespace {

// The matches in a text, each as "begin-end ".
std::string matches(const Pattern& pattern, const std::string& text) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  Pattern::Scratch scratch;
  Pattern::Match match;
  std::string out;
  for (const char* p = begin; p < end && pattern.find(begin, p, end, scratch, match); p = match.end)
    out += fmt::format("{}-{} ", match.begin - begin, match.end - begin);
  return out;
}

}  // namespace

TEST_CASE("Character classes alone are matched without PCRE2 and the rest with it") {
  for (const char* regex : {"[\r\n]", "\\s?[A-Za-zµÀ-Ö𐐀-𐑏]+", "\\s+$", "[一-龥ࠀ-一]+", "a", "\\s?a",
                            "[^a-c]+", "[-a]", "[a-]", "\\.+"})
    CHECK_FALSE(Pattern(regex, "t").uses_pcre2());
  for (const char* regex :
       {"a|b", "\\p{L}+", "ab", "a+b", "\\s?a+$", "(?:a)", "[\\p{N}]", "a{2}", ".", "^a", "a++"})
    CHECK(Pattern(regex, "t").uses_pcre2());
  CHECK(Pattern("a", "t", Pattern::Matcher::kPcre2).uses_pcre2());
}

TEST_CASE("Both ways of matching find the same in random texts") {
  const std::vector<uint32_t> alphabet = {'a',    'b',    'z',    '-',    '!',    '\n',    '\r',
                                          ' ',    ' ',    '\t',   0x85,   0xA0,   0xB5,    0x3000,
                                          0x180E, 0x200B, 0xFEFF, 0x4E00, 0x9FA5, 0x10400, 0x10450};
  std::mt19937 rng(11);
  for (const char* regex :
       {"[\r\n]", "\\s?[a-zµ𐐀-𐑏]+", "\\s?[!-/:-~　-。]+", "\\s+$", "[一-龥]+", "\\s?a", "a?a+",
        "\\s?\\s+", "[^a-c\\s]+", "[\\s\\-a]", "\\s+", "[^𐐀]"}) {
    const Pattern own(regex, "t");
    const Pattern pcre2(regex, "t", Pattern::Matcher::kPcre2);
    REQUIRE_FALSE(own.uses_pcre2());
    for (int round = 0; round < 500; ++round) {
      std::string text;
      for (size_t n = rng() % 24; n > 0; --n)
        mla::append_utf8(alphabet[rng() % alphabet.size()], text);
      INFO(regex << " in " << text);
      REQUIRE(matches(own, text) == matches(pcre2, text));
    }
  }
}

TEST_CASE("White space in PCRE2 patterns is Unicode White_Space") {
  const Pattern space("\\s|x{3}", "t");
  REQUIRE(space.uses_pcre2());
  CHECK(matches(space, "a\u180Eb\u200Bc\uFEFF") == "");
  CHECK(matches(space, "\u0085\u00A0\u3000") == "0-2 2-4 4-7 ");
  CHECK(matches(Pattern("[\\sx](?=.)", "t"), "\u180Ex\u2003.") == "3-4 4-7 ");
  CHECK(matches(Pattern("\\S(?=.)", "t"), " \u180E.") == "1-4 ");
}

TEST_CASE("The end of a line is an end as in Ruby") {
  CHECK(matches(Pattern("\\s+$", "t"), "a \t\n b  ") == "1-3 6-8 ");
  CHECK(matches(Pattern("b$", "t"), "b\nb\r\nb") == "0-1 5-6 ");
}

TEST_CASE("A PCRE2 pattern on a long text is right or an error") {
  // Each step of the group takes stack of the compiled code, which has little.
  const Pattern pattern("(?:a|b)+c|[abc]", "t");
  std::string text(1 << 20, 'a');
  text += 'c';
  try {
    CHECK(matches(pattern, text) == fmt::format("0-{} ", text.size()));
  } catch (const mla::Error& e) {
    CHECK(std::string(e.what()).rfind("t: PCRE2 gave up on a text of 1048577 bytes: ", 0) == 0);
  }
}

}  // namespace mla::test::tokenizer_pattern_test
