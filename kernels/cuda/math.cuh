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

}  // namespace mla::cuda
