// FNV-1a, 64 bits.
#pragma once

#include <cstdint>
#include <string_view>

namespace mla {

inline constexpr uint64_t kFnvBasis = 0xcbf29ce484222325u;  // the hash of no bytes

// Of the bytes that `hash` is of, and one more.
constexpr uint64_t fnv_with(uint64_t hash, uint8_t byte) { return (hash ^ byte) * 0x100000001b3u; }

constexpr uint64_t fnv_of(std::string_view bytes) {
  uint64_t hash = kFnvBasis;
  for (const char c : bytes) hash = fnv_with(hash, static_cast<uint8_t>(c));
  return hash;
}

}  // namespace mla
