// UTF-8 as Unicode table 3-7 has it: no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mla {

// What begins at a byte.
struct Utf8Step {
  int length;  // of the character; of the maximal subpart where it is not valid (at least 1)
  bool valid;
  bool incomplete;  // not valid only because the text ends here
};

// `begin` < `end`.
Utf8Step utf8_step(const char* begin, const char* end);

// Offset of the first byte that belongs to no character, or std::string_view::npos.
size_t find_invalid_utf8(std::string_view text);

// Appends `bytes` to `out`, each maximal subpart that is not valid replaced by one U+FFFD (Unicode
// 3.9, and Rust's String::from_utf8_lossy, on which Hugging Face's decoder rests). Unless `final`,
// an incomplete character at the end is left out. Returns the count of bytes that were used.
size_t append_utf8_lossy(std::string_view bytes, bool final, std::string& out);

void append_utf8(uint32_t codepoint, std::string& out);

// Where each of the pieces begins, and the last one ends, in characters of their text as
// append_utf8_lossy() has it; [pieces + 1]. A piece that begins inside a character begins after it.
std::vector<int64_t> character_offsets(const std::vector<std::string>& pieces);

// Reads one character of text that is known to be valid, and moves `p` past it.
inline uint32_t next_codepoint(const char*& p) {
  const auto* u = reinterpret_cast<const unsigned char*>(p);
  const uint32_t c = u[0];
  if (c < 0x80) {
    p += 1;
    return c;
  }
  if (c < 0xE0) {
    p += 2;
    return (c & 0x1F) << 6 | (u[1] & 0x3F);
  }
  if (c < 0xF0) {
    p += 3;
    return (c & 0x0F) << 12 | (u[1] & 0x3Fu) << 6 | (u[2] & 0x3F);
  }
  p += 4;
  return (c & 0x07) << 18 | (u[1] & 0x3Fu) << 12 | (u[2] & 0x3Fu) << 6 | (u[3] & 0x3F);
}

}  // namespace mla
