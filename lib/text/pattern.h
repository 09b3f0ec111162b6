// Splitting patterns of tokenizer.json: Oniguruma syntax as Hugging Face runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;

namespace mla {

using CodepointRange = std::pair<uint32_t, uint32_t>;  // both ends are in it

// Unicode White_Space, which is what Oniguruma's \s means. PCRE2's \s under UCP also has U+180E.
const std::vector<CodepointRange>& white_space_ranges();
// Characters of general category N: Nd, Nl and No.
const std::vector<CodepointRange>& number_ranges();

class CodepointSet {
 public:
  CodepointSet() : bmp_(0x10000 / 64) {}
  void add(const std::vector<CodepointRange>& ranges);
  void invert();
  bool contains(uint32_t c) const {
    if (c < 0x10000) return bmp_[c >> 6] >> (c & 63) & 1;
    return contains_above_bmp(c);
  }

 private:
  bool contains_above_bmp(uint32_t c) const;

  std::vector<uint64_t> bmp_;          // one bit a character of the basic multilingual plane
  std::vector<CodepointRange> above_;  // the rest
  bool above_inverted_ = false;
};

// Character classes in a row are matched here, in time linear in the text: C, C+, P?C, P?C+ and
// C+$. Everything else goes through PCRE2. Immutable; several threads may match at once, each with
// its own Scratch.
class Pattern {
 public:
  enum class Matcher { kAuto, kPcre2 };  // kPcre2: also where classes alone would do

  // Buffers of PCRE2, made when first used.
  class Scratch {
   public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class Pattern;
    pcre2_real_match_data_8* match_data_ = nullptr;
  };

  struct Match {
    const char* begin;
    const char* end;
  };

  // Throws Error that begins with `what`: a syntax error; a construct that the two engines
  // understand differently (an escape other than \s \S \p \P \r \n \t and punctuation, a nested
  // class or && in a class, a group other than (?: (?= (?!); a pattern that can match nothing.
  Pattern(std::string_view regex, std::string_view what, Matcher matcher = Matcher::kAuto);
  // One character of the set, or (`repeat`) as many as follow each other.
  Pattern(CodepointSet set, bool repeat);

  bool uses_pcre2() const { return code_ != nullptr; }

  // The leftmost match at or after `from` in the valid UTF-8 text [begin, end). As in Ruby, $ is
  // the end of the text or of a line. Throws Error where PCRE2 gives up.
  bool find(const char* begin, const char* from, const char* end, Scratch& scratch,
            Match& match) const;

 private:
  bool compile_classes(std::string_view regex);
  void compile_pcre2(std::string_view regex, std::string_view what);
  bool find_classes(const char* from, const char* end, Match& match) const;
  bool find_at_line_end(const char* from, const char* end, Match& match) const;
  bool find_pcre2(const char* begin, const char* from, const char* end, Scratch& scratch,
                  Match& match) const;
  const char* run_end(const char* p, const char* end) const;

  CodepointSet prefix_, main_;
  bool has_prefix_ = false, repeat_ = false, at_line_end_ = false;
  std::shared_ptr<const pcre2_real_code_8> code_;
  std::string what_;
};

}  // namespace mla
