// Element types, and the bfloat16 type with its two conversions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lib/base/error.h"

namespace mla {

enum class DType : uint8_t { bf16, f32, f16 };

constexpr size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "bfloat16";
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
  }
  return "?";
}

// The upper 16 bits of an IEEE binary32.
struct bf16 {
  uint16_t bits;
  friend bool operator==(bf16 a, bf16 b) { return a.bits == b.bits; }
};
static_assert(sizeof(bf16) == 2);

inline float to_f32(float x) { return x; }
inline float to_f32(bf16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}

// Round to nearest, ties to even; a NaN stays a NaN (quiet), ±infinity stays.
inline bf16 to_bf16(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40u;
  return {static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

// IEEE binary16 bits to float, exact; subnormals, infinities and NaN included.
float f16_to_f32(uint16_t bits);

// from_f32<T>: the value of a float in the run's dtype. For float it is the identity.
template <class T>
inline T from_f32(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return to_bf16(x);
  }
}

template <class T>
inline constexpr DType dtype_of = sizeof(T) == 4 ? DType::f32 : DType::bf16;

}  // namespace mla
