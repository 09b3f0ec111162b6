// The part of Pattern that rests on PCRE2.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cctype>
#include <cstring>

#include "lib/base/error.h"
#include "lib/text/pattern.h"
#include "lib/text/utf8.h"

namespace mla {
namespace {

std::string class_text(const std::vector<CodepointRange>& ranges) {
  std::string text;
  for (const auto& [first, last] : ranges)
    text += fmt::format("\\x{{{:x}}}-\\x{{{:x}}}", first, last);
  return text;
}

// The same pattern in PCRE2's words: \s gets the Unicode property; what the engines would read
// differently is refused.
std::string translate(std::string_view regex, std::string_view what) {
  std::string out;
  bool in_class = false;
  size_t class_begin = 0;
  const auto refuse = [&](std::string_view part) {
    fail("{}: pattern '{}': '{}' is not supported", what, regex, part);
  };
  for (size_t i = 0; i < regex.size(); ++i) {
    const char c = regex[i];
    const char next = i + 1 < regex.size() ? regex[i + 1] : '\0';
    if (c == '\\') {
      ++i;
      const bool range =
          in_class && ((i >= 2 && regex[i - 2] == '-' && i - 2 > class_begin) ||
                       (i + 2 < regex.size() && regex[i + 1] == '-' && regex[i + 2] != ']'));
      if (next == 's' && !range) {
        const std::string space = class_text(white_space_ranges());
        out += in_class ? space : "[" + space + "]";
      } else if (next == 'S' && !in_class) {
        out += "[^" + class_text(white_space_ranges()) + "]";
      } else if (std::strchr("rntpP", next) || std::ispunct(static_cast<unsigned char>(next))) {
        if (next == '\0') refuse("\\");
        (out += c) += next;
      } else {
        refuse(regex.substr(i - 1, 2));
      }
      continue;
    }
    if (in_class) {
      if (c == '[' || (c == '&' && next == '&')) refuse(regex.substr(i, c == '[' ? 1 : 2));
      if (c == ']') {
        if (i == class_begin + 1) refuse("[]");
        in_class = false;
      }
    } else if (c == '[') {
      in_class = true;
      class_begin = i + (next == '^');
    } else if (c == '(' && next == '*') {
      refuse("(*");
    } else if (c == '(' && next == '?') {
      const char kind = i + 2 < regex.size() ? regex[i + 2] : '\0';
      if (kind != ':' && kind != '=' && kind != '!') refuse(regex.substr(i, 3));
    }
    out += c;
  }
  return out;
}

std::string message(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

struct FreeContext {
  void operator()(pcre2_compile_context* context) const { pcre2_compile_context_free(context); }
};

}  // namespace

Pattern::Scratch::~Scratch() { pcre2_match_data_free(match_data_); }

void Pattern::compile_pcre2(std::string_view regex, std::string_view what) {
  const std::string text = translate(regex, what);
  const std::unique_ptr<pcre2_compile_context, FreeContext> context(
      pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  // Ruby's ^ and $ are those of lines.
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &offset, context.get());
  if (!code) fail("{}: pattern '{}': {}", what, regex, message(error));
  code_.reset(code, [](const pcre2_code* p) { pcre2_code_free(const_cast<pcre2_code*>(p)); });
  uint32_t match_empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &match_empty);
  if (match_empty) fail("{}: pattern '{}' can match no text at all", what, regex);
  // Where the machine has no compiler in PCRE2, matching goes on without.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
}

bool Pattern::find_pcre2(const char* begin, const char* from, const char* end, Scratch& scratch,
                         Match& match) const {
  if (!scratch.match_data_) {
    scratch.match_data_ = pcre2_match_data_create(1, nullptr);
    if (!scratch.match_data_) fail("{}: out of memory in PCRE2", what_);
  }
  const auto run = [&](uint32_t options) {
    return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(begin),
                       static_cast<size_t>(end - begin), static_cast<size_t>(from - begin),
                       PCRE2_NO_UTF_CHECK | options, scratch.match_data_, nullptr);
  };
  int rc = run(0);
  // Compiled code has 32 KiB of stack; the interpreter takes what it needs from the heap.
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) rc = run(PCRE2_NO_JIT);
  if (rc == PCRE2_ERROR_NOMATCH) return false;
  if (rc < 0) fail("{}: PCRE2 gave up on a text of {} bytes: {}", what_, end - begin, message(rc));
  const PCRE2_SIZE* at = pcre2_get_ovector_pointer(scratch.match_data_);
  match = {begin + at[0], begin + at[1]};
  return true;
}

}  // namespace mla
