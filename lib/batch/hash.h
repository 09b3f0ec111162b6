// SHA-256 (FIPS 180-4; what sha256sum prints) and FNV-1a 64 of logprob bits.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "lib/base/fnv.h"

namespace mla {

class Sha256 {
 public:
  void update(std::string_view bytes);
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  std::string hex() const;  // 64 digits, of what was added so far; more may be added after

 private:
  void block(const uint8_t* data);  // [64]
  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> tail_{};  // the bytes after the last whole block
  uint64_t bytes_ = 0;
};

// FNV-1a 64 over the four little-endian bytes of each float, in the order added.
class LogprobHash {
 public:
  void add(float logprob);
  bool finite() const { return finite_; }  // no NaN or infinity was added
  std::string hex() const;                 // 16 digits
  int64_t count() const { return count_; }

 private:
  uint64_t state_ = kFnvBasis;
  int64_t count_ = 0;
  bool finite_ = true;
};

}  // namespace mla
