#include "lib/text/utf8.h"

#include <cstring>

namespace mla {

Utf8Step utf8_step(const char* begin, const char* end) {
  const auto* p = reinterpret_cast<const unsigned char*>(begin);
  const unsigned char lead = p[0];
  if (lead < 0x80) return {1, true, false};
  int length = 0;
  // Bounds of the second byte: they rule out overlong forms, surrogates and what is too large.
  unsigned char low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, false, false};
  }
  for (int i = 1; i < length; ++i) {
    if (begin + i == end) return {i, false, true};
    if (p[i] < low || p[i] > high) return {i, false, false};
    low = 0x80;
    high = 0xBF;
  }
  return {length, true, false};
}

size_t find_invalid_utf8(std::string_view text) {
  const char* p = text.data();
  const char* const end = p + text.size();
  while (p < end) {
    if (end - p >= 8) {
      uint64_t word;
      std::memcpy(&word, p, 8);
      if ((word & 0x8080808080808080u) == 0) {
        p += 8;
        continue;
      }
    }
    const Utf8Step step = utf8_step(p, end);
    if (!step.valid) return static_cast<size_t>(p - text.data());
    p += step.length;
  }
  return std::string_view::npos;
}

size_t append_utf8_lossy(std::string_view bytes, bool final, std::string& out) {
  const char* p = bytes.data();
  const char* const end = p + bytes.size();
  while (p < end) {
    const Utf8Step step = utf8_step(p, end);
    if (step.valid) {
      out.append(p, static_cast<size_t>(step.length));
    } else {
      if (step.incomplete && !final) break;
      out += "\xEF\xBF\xBD";
    }
    p += step.length;
  }
  return static_cast<size_t>(p - bytes.data());
}

void append_utf8(uint32_t codepoint, std::string& out) {
  const auto byte = [&](uint32_t value) { out += static_cast<char>(value); };
  const auto tail = [&](int shift) { byte(0x80 | (codepoint >> shift & 0x3F)); };
  if (codepoint < 0x80) {
    byte(codepoint);
  } else if (codepoint < 0x800) {
    byte(0xC0 | codepoint >> 6);
    tail(0);
  } else if (codepoint < 0x10000) {
    byte(0xE0 | codepoint >> 12);
    tail(6);
    tail(0);
  } else {
    byte(0xF0 | codepoint >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

std::vector<int64_t> character_offsets(const std::vector<std::string>& pieces) {
  std::string bytes;
  for (const std::string& piece : pieces) bytes += piece;
  const char* p = bytes.data();
  const char* const end = p + bytes.size();
  const char* begin = p;  // of the piece
  int64_t characters = 0;
  std::vector<int64_t> offsets = {0};
  for (const std::string& piece : pieces) {
    begin += piece.size();
    for (; p < begin; ++characters) p += utf8_step(p, end).length;
    offsets.push_back(characters);
  }
  return offsets;
}

}  // namespace mla
