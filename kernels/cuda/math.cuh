// One version of each function, for every kernel: bits do not depend on which kernel serves a row.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace mla::cuda {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x; 2^-inf is 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float exp_fast(float x) { return exp2_fast(__fmul_rn(x, kLog2E)); }

// x / (1 + e^-x)
__device__ inline float silu(float x) { return __fdividef(x, __fadd_rn(1.0f, exp_fast(-x))); }

// Two floats rounded to bf16; `low` in the lower half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ inline float low_float(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ inline float high_float(uint32_t packed) {
  return __uint_as_float(packed & 0xFFFF0000u);
}

// A 4 × 4 transpose over the lanes of a quad: lane i gets x[i] of lanes 0 to 3.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = lane & bit;
      const uint32_t got = __shfl_xor_sync(0xFFFFFFFF, upper ? x[i] : x[i + bit], bit);
      if (upper) {
        x[i] = got;
      } else {
        x[i + bit] = got;
      }
    }
}

}  // namespace mla::cuda
