// A splitting pattern and, behind a zero byte, a text. Where the pattern is one that Pattern
// matches by itself, PCRE2 has to find the same.
#include "lib/text/pattern.h"

#include <algorithm>
#include <optional>

#include "lib/text/utf8.h"
#include "tests/fuzz/fuzz.h"

namespace mla {
namespace {

using Places = std::vector<std::pair<size_t, size_t>>;

Places matches(const Pattern& pattern, std::string_view text) {
  Pattern::Scratch scratch;
  Places places;
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  Pattern::Match match;
  for (const char* from = begin; from < end && pattern.find(begin, from, end, scratch, match);
       from = match.end) {
    FUZZ_CHECK(from <= match.begin && match.begin < match.end && match.end <= end);
    places.emplace_back(match.begin - begin, match.end - begin);
  }
  return places;
}

}  // namespace
}  // namespace mla

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla;
  const std::string_view input = fuzz::as_text(data, size);
  const size_t zero = std::min(input.find('\0'), size);
  const std::string_view regex = input.substr(0, zero);
  const std::string text(input.substr(std::min(zero + 1, size)));
  if (find_invalid_utf8(text) != std::string_view::npos) return 0;
  std::optional<Pattern> plain, pcre2;
  Places found, expected;
  const bool matched = fuzz::parses([&] {
    plain.emplace(regex, "fuzz");
    found = matches(*plain, text);
  });
  if (!matched || plain->uses_pcre2()) return 0;
  const bool compared = fuzz::parses([&] {
    pcre2.emplace(regex, "fuzz", Pattern::Matcher::kPcre2);
    expected = matches(*pcre2, text);
  });
  if (compared) FUZZ_CHECK(found == expected);
  return 0;
}
