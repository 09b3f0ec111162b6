#include "lib/text/pattern.h"

#include <algorithm>
#include <cctype>
#include <cstring>

#include "lib/base/error.h"
#include "lib/text/utf8.h"

namespace mla {

void CodepointSet::add(const std::vector<CodepointRange>& ranges) {
  for (const auto& [first, last] : ranges) {
    for (uint32_t c = first; c <= last && c < 0x10000; ++c) bmp_[c >> 6] |= uint64_t{1} << (c & 63);
    if (last >= 0x10000) above_.emplace_back(std::max(first, 0x10000u), last);
  }
}

void CodepointSet::invert() {
  for (uint64_t& word : bmp_) word = ~word;
  above_inverted_ = !above_inverted_;
}

bool CodepointSet::contains_above_bmp(uint32_t c) const {
  const bool found = std::any_of(above_.begin(), above_.end(), [c](const CodepointRange& range) {
    return range.first <= c && c <= range.second;
  });
  return found != above_inverted_;
}

namespace {

// Reads the character classes that Pattern matches by itself. Every function returns false at
// something else, which is then left to PCRE2.
class ClassReader {
 public:
  explicit ClassReader(std::string_view regex)
      : p_(regex.data()), end_(regex.data() + regex.size()) {}

  bool at_end() const { return p_ == end_; }

  bool take(char c) {
    if (p_ == end_ || *p_ != c) return false;
    ++p_;
    return true;
  }

  bool read_atom(CodepointSet& set) {
    if (at_end()) return false;
    if (*p_ == '[') return read_class(set);
    if (*p_ != '\\' && std::strchr("^$.|?*+(){}]", *p_)) return false;
    std::vector<CodepointRange> ranges;
    if (!read_item(ranges)) return false;
    set.add(ranges);
    return true;
  }

 private:
  bool read_class(CodepointSet& set) {
    ++p_;
    const bool negated = take('^');
    bool first = true;
    while (true) {
      if (at_end()) return false;
      if (*p_ == ']') {
        // Engines disagree about a class that begins with ].
        if (first) return false;
        ++p_;
        break;
      }
      first = false;
      if (*p_ == '[' || *p_ == '&') return false;
      std::vector<CodepointRange> item;
      if (!read_item(item)) return false;
      if (p_ + 1 < end_ && p_[0] == '-' && p_[1] != ']') {
        ++p_;
        std::vector<CodepointRange> last;
        if (*p_ == '[' || !read_item(last)) return false;
        const auto single = [](const std::vector<CodepointRange>& r) {
          return r.size() == 1 && r[0].first == r[0].second;
        };
        if (!single(item) || !single(last) || item[0].first > last[0].first) return false;
        item[0].second = last[0].first;
      }
      set.add(item);
    }
    if (negated) set.invert();
    return true;
  }

  // One character, or what an escape stands for.
  bool read_item(std::vector<CodepointRange>& item) {
    if (*p_ != '\\') {
      const uint32_t c = next_codepoint(p_);
      item = {{c, c}};
      return true;
    }
    ++p_;
    if (at_end()) return false;
    const char c = *p_++;
    const auto one = [&](char value) {
      item = {{static_cast<unsigned char>(value), static_cast<unsigned char>(value)}};
      return true;
    };
    switch (c) {
      case 's':
        item = white_space_ranges();
        return true;
      case 'r':
        return one('\r');
      case 'n':
        return one('\n');
      case 't':
        return one('\t');
      default:
        return c > ' ' && c < 127 && !std::isalnum(c) ? one(c) : false;
    }
  }

  const char* p_;
  const char* end_;
};

}  // namespace

Pattern::Pattern(std::string_view regex, std::string_view what, Matcher matcher) : what_(what) {
  if (find_invalid_utf8(regex) != std::string_view::npos) fail("{}: pattern is not UTF-8", what);
  if (matcher == Matcher::kAuto && compile_classes(regex)) return;
  compile_pcre2(regex, what);
}

Pattern::Pattern(CodepointSet set, bool repeat) : main_(std::move(set)), repeat_(repeat) {}

bool Pattern::compile_classes(std::string_view regex) {
  ClassReader reader(regex);
  CodepointSet set;
  if (!reader.read_atom(set)) return false;
  if (reader.take('?')) {
    prefix_ = std::move(set);
    has_prefix_ = true;
    set = CodepointSet();
    if (!reader.read_atom(set)) return false;
  }
  main_ = std::move(set);
  repeat_ = reader.take('+');
  at_line_end_ = reader.take('$');
  if (at_line_end_ && (has_prefix_ || !repeat_)) return false;
  return reader.at_end();
}

bool Pattern::find(const char* begin, const char* from, const char* end, Scratch& scratch,
                   Match& match) const {
  if (code_) return find_pcre2(begin, from, end, scratch, match);
  return at_line_end_ ? find_at_line_end(from, end, match) : find_classes(from, end, match);
}

const char* Pattern::run_end(const char* p, const char* end) const {
  while (p < end) {
    const char* next = p;
    if (!main_.contains(next_codepoint(next))) break;
    p = next;
  }
  return p;
}

bool Pattern::find_classes(const char* from, const char* end, Match& match) const {
  for (const char* p = from; p < end;) {
    const char* next = p;
    const uint32_t c = next_codepoint(next);
    if (has_prefix_ && next < end && prefix_.contains(c)) {
      const char* after = next;
      if (main_.contains(next_codepoint(after))) {
        match = {p, repeat_ ? run_end(after, end) : after};
        return true;
      }
    }
    if (main_.contains(c)) {
      match = {p, repeat_ ? run_end(next, end) : next};
      return true;
    }
    p = next;
  }
  return false;
}

bool Pattern::find_at_line_end(const char* from, const char* end, Match& match) const {
  for (const char* p = from; p < end;) {
    const char* next = p;
    if (!main_.contains(next_codepoint(next))) {
      p = next;
      continue;
    }
    // The greedy run, then back to the last place in it that ends a line. Where there is none, no
    // later start in the run has one either: that keeps a long run from costing its square.
    const char* const run = run_end(next, end);
    const char* stop = run;
    while (stop > p && stop != end && *stop != '\n') --stop;
    if (stop > p) {
      match = {p, stop};
      return true;
    }
    p = run;
  }
  return false;
}

}  // namespace mla
