#include "lib/eval/answer.h"

#include <algorithm>

namespace mla {
namespace {

constexpr std::string_view kMark = "#### ";

bool is_digit(char c) { return '0' <= c && c <= '9'; }
bool is_strict(char c) { return is_digit(c) || c == '.' || c == ','; }
bool is_flexible(char c) { return is_strict(c) || c == '$'; }

// End of the run of characters that satisfy `in`, from `begin`.
template <class In>
size_t run_end(std::string_view text, size_t begin, In in) {
  while (begin < text.size() && in(text[begin])) ++begin;
  return begin;
}

void erase_all(std::string& text, char c) {
  text.erase(std::remove(text.begin(), text.end(), c), text.end());
}

}  // namespace

std::string extract_strict(std::string_view text) {
  for (size_t at = text.find(kMark); at != text.npos; at = text.find(kMark, at + 1)) {
    const size_t begin = at + kMark.size();
    const size_t digits = begin + (begin < text.size() && text[begin] == '-' ? 1 : 0);
    const size_t end = run_end(text, digits, is_strict);
    if (end > digits) return std::string(text.substr(begin, end - begin));
  }
  return std::string(kInvalidAnswer);
}

std::string extract_flexible(std::string_view text) {
  std::string_view last = kInvalidAnswer;
  for (size_t begin = 0; begin < text.size();) {
    const size_t body = begin + (text[begin] == '-' ? 1 : 0);
    size_t end = run_end(text, body, is_flexible);
    if (end < body + 2) end = run_end(text, body, is_digit);  // the second alternative
    if (end == body) {
      ++begin;
      continue;
    }
    last = text.substr(begin, end - begin);
    begin = end;
  }
  return std::string(last);
}

std::string normalize_answer(std::string_view answer) {
  std::string text(answer);
  erase_all(text, ',');
  erase_all(text, '$');
  if (const size_t mark = text.rfind(kMark); mark != text.npos) text.erase(0, mark + kMark.size());
  const size_t end = text.ends_with('\n') ? text.size() - 1 : text.size();
  // Python's re.sub takes `.` before a final newline, and a `.` at the very end; never both.
  if (end > 0 && text[end - 1] == '.') text.erase(end - 1, 1);
  for (char& c : text)
    if ('A' <= c && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

bool exact_match(std::string_view prediction, std::string_view reference) {
  return normalize_answer(prediction) == normalize_answer(reference);
}

}  // namespace mla
