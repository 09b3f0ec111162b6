#include "lib/batch/hash.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace mla {
namespace {

// FIPS 180-4, 4.2.2: fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace

void Sha256::block(const uint8_t* data) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = static_cast<uint32_t>(data[4 * i]) << 24 | static_cast<uint32_t>(data[4 * i + 1]) << 16 |
           static_cast<uint32_t>(data[4 * i + 2]) << 8 | data[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t x = w[i - 15], y = w[i - 2];
    const uint32_t s0 = std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3);
    const uint32_t s1 = std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t sum[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += sum[i];
}

void Sha256::update(std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t filled = bytes_ % 64;
    const size_t n = std::min(bytes.size(), 64 - filled);
    std::memcpy(tail_.data() + filled, bytes.data(), n);
    bytes_ += n;
    bytes.remove_prefix(n);
    if (bytes_ % 64 == 0) block(tail_.data());
  }
}

std::string Sha256::hex() const {
  Sha256 last = *this;
  const uint64_t bits = bytes_ * 8;
  std::string padding(1, '\x80');
  padding.append((119 - bytes_ % 64) % 64, '\0');  // to 56 bytes of the last block
  for (int shift = 56; shift >= 0; shift -= 8)
    padding.push_back(static_cast<char>(bits >> shift & 0xff));
  last.update(padding);
  std::string text;
  for (const uint32_t word : last.state_) text += fmt::format("{:08x}", word);
  return text;
}

void LogprobHash::add(float logprob) {
  const uint32_t bits = std::bit_cast<uint32_t>(logprob);
  for (int shift = 0; shift < 32; shift += 8)
    state_ = fnv_with(state_, static_cast<uint8_t>(bits >> shift));
  finite_ = finite_ && std::isfinite(logprob);
  ++count_;
}

std::string LogprobHash::hex() const { return fmt::format("{:016x}", state_); }

}  // namespace mla
