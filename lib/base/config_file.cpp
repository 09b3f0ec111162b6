#include "lib/base/config_file.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <utility>

#include "lib/base/error.h"
#include "lib/base/json.h"

namespace mla {
namespace {

class Parser {
 public:
  Parser(std::string_view text, std::string_view what) : text_(text), what_(what) {
    if (text_.starts_with("\xef\xbb\xbf")) at_ = 3;
  }

  std::vector<ConfigEntry> run() {
    for (skip_blank(); at_ < text_.size(); skip_blank()) {
      if (text_[at_] == '[') {
        read_section();
      } else {
        read_entry();
      }
      skip_spaces();
      if (at_ < text_.size() && !is_comment() && !is_end_of_line()) wrong("the end of the line");
    }
    return std::move(entries_);
  }

 private:
  [[noreturn]] void wrong(std::string_view expected) const {
    std::string found = "the end";
    if (at_ < text_.size())
      found = fmt::format("'{}'", text_.substr(at_, text_.find_first_of("\r\n", at_) - at_));
    fail("{}: line {}: expected {}, found {}", what_, line_, expected, found);
  }
  bool is_end_of_line() const { return text_[at_] == '\n' || text_[at_] == '\r'; }
  bool is_comment() const { return text_[at_] == '#' || text_[at_] == ';'; }
  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
  }
  // Spaces, ends of lines and comments.
  void skip_blank() {
    for (; at_ < text_.size(); ++at_) {
      if (is_comment()) at_ = std::min(text_.find('\n', at_), text_.size());
      if (at_ == text_.size()) return;
      if (text_[at_] == '\n') ++line_;
      if (!std::isspace(static_cast<unsigned char>(text_[at_]))) return;
    }
  }

  static bool is_name(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_';
  }
  std::string read_name() {
    const size_t begin = at_;
    while (at_ < text_.size() && is_name(text_[at_])) ++at_;
    if (at_ == begin) wrong("a name");
    return std::string(text_.substr(begin, at_ - begin));
  }
  void expect(char c, std::string_view expected) {
    skip_spaces();
    if (at_ == text_.size() || text_[at_] != c) wrong(expected);
    ++at_;
    skip_spaces();
  }
  void read_section() {
    expect('[', "[");
    section_ = read_name();
    expect(']', "]");
  }

  void read_entry() {
    ConfigEntry entry{.section = section_, .key = "", .values = {}, .line = line_};
    entry.key = read_name();
    if (!seen_.insert({entry.section, entry.key}).second)
      fail("{}: line {}: duplicate key '{}'", what_, line_, entry.key);
    expect('=', "= and a value");
    if (at_ < text_.size() && text_[at_] == '[') {
      entry.values = read_list();
    } else {
      entry.values = {read_value("#;\r\n")};
    }
    entries_.push_back(std::move(entry));
  }

  std::vector<std::string> read_list() {
    std::vector<std::string> values;
    ++at_;
    for (skip_blank(); at_ < text_.size() && text_[at_] != ']'; skip_blank()) {
      values.push_back(read_value(",]#;\r\n"));
      skip_blank();
      if (at_ < text_.size() && text_[at_] == ',') {
        ++at_;
      } else if (at_ < text_.size() && text_[at_] != ']') {
        wrong("',' or ']'");
      }
    }
    if (at_ == text_.size()) wrong("']'");
    ++at_;
    return values;
  }

  std::string read_value(std::string_view ends) {
    if (at_ < text_.size() && text_[at_] == '"') return read_basic();
    if (at_ < text_.size() && text_[at_] == '\'') return read_literal();
    const size_t begin = at_;
    for (; at_ < text_.size() && ends.find(text_[at_]) == std::string_view::npos; ++at_) continue;
    // A path may have # or ; inside: a comment begins behind a space.
    while (at_ < text_.size() && is_comment() && at_ > begin && text_[at_ - 1] != ' ' &&
           text_[at_ - 1] != '\t')
      at_ = std::min(text_.find_first_of(ends, at_ + 1), text_.size());
    std::string value(text_.substr(begin, at_ - begin));
    while (!value.empty() && (value.back() == ' ' || value.back() == '\t')) value.pop_back();
    if (value.empty()) wrong("a value");
    return value;
  }
  // What lies up to the closing quote, which is on the same line.
  std::string_view quoted(char quote) {
    const size_t begin = at_++;
    for (; at_ < text_.size() && text_[at_] != quote && !is_end_of_line(); ++at_)
      if (quote == '"' && text_[at_] == '\\') ++at_;
    if (at_ >= text_.size() || text_[at_] != quote) {
      at_ = begin;
      wrong("a closing quote");
    }
    ++at_;
    return text_.substr(begin, at_ - begin);
  }
  std::string read_literal() {
    const std::string_view text = quoted('\'');
    return std::string(text.substr(1, text.size() - 2));
  }
  // The escapes are those of JSON.
  std::string read_basic() {
    const std::string_view text = quoted('"');
    return parse_json(text, fmt::format("{}: line {}", what_, line_)).get<std::string>();
  }

  std::string_view text_;
  std::string what_;
  size_t at_ = 0;
  int64_t line_ = 1;
  std::string section_;
  std::set<std::pair<std::string, std::string>> seen_;
  std::vector<ConfigEntry> entries_;
};

}  // namespace

std::vector<ConfigEntry> parse_config_file(std::string_view text, std::string_view what) {
  return Parser(text, what).run();
}

}  // namespace mla
