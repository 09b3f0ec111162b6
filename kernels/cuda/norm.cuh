// A row of bf16 added to and normed: what kernels that have the addend from different places share,
// so that its bits are the same in all.
#pragma once

#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

namespace mla::cuda {

inline constexpr int kVector = 8;  // bf16 values of one access

__device__ inline void unpack(uint4 packed, float (&x)[kVector]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_float(words[i]);
    x[2 * i + 1] = high_float(words[i]);
  }
}

__device__ inline uint4 pack(const float (&x)[kVector]) {
  return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
          pack_bf16(x[6], x[7])};
}

__device__ inline void load_floats(const float* from, float (&x)[kVector]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0];
  const float4 high = reinterpret_cast<const float4*>(from)[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// The sum over a warp, in all lanes the same bits: x + y is y + x.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ inline float rms_factor(float sum_of_squares, int dim, float eps) {
  return __frcp_rn(__fsqrt_rn(__fdiv_rn(sum_of_squares, static_cast<float>(dim)) + eps));
}

// Threads that serve rows of `vectors` vectors: whole warps, at most `most`.
inline int threads_for(int64_t vectors, int most) {
  return static_cast<int>(std::min<int64_t>((vectors + 31) / 32 * 32, most));
}

struct NormArgs {
  const uint16_t* x;  // rows x_stride apart
  int64_t x_stride;
  uint16_t* residual;   // x again where x + delta is to be kept; else null
  const float* weight;  // [dim]
  const int32_t* rows;  // or null
  uint16_t* out;        // rows of dim
  int dim;
  float eps;
};

inline constexpr int kNormThreads = 256;
inline constexpr int kMaxPerThread = 8;  // vectors of a row that a thread keeps in registers

// What is added to x: nothing, floats, or bf16, in rows of dim. `at` is an element.
struct NoDelta {
  static constexpr bool kAny = false;
  __device__ void load(int64_t, float (&)[kVector]) const {}
};
struct FloatDelta {
  static constexpr bool kAny = true;
  const float* from;
  __device__ void load(int64_t at, float (&x)[kVector]) const { load_floats(from + at, x); }
};
struct RoundedDelta {
  static constexpr bool kAny = true;
  const uint16_t* from;
  __device__ void load(int64_t at, float (&x)[kVector]) const {
    unpack(*reinterpret_cast<const uint4*>(from + at), x);
  }
};

// Row blockIdx.x by its block; thread i has vectors i, i + blockDim, … The sum of squares runs in
// order in a thread, then over the lanes of a warp, then over warps in order; blockDim follows from
// dim.
template <int PerThread, class Delta>
__device__ void norm_row(const NormArgs& a, const Delta& add) {
  __shared__ float warp_sums[kNormThreads / 32];
  const int64_t t = blockIdx.x, row = a.rows ? a.rows[t] : t;
  const int vectors = a.dim / kVector;
  float x[PerThread][kVector], weight[PerThread][kVector];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PerThread; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v >= vectors) continue;
    unpack(*reinterpret_cast<const uint4*>(a.x + row * a.x_stride + v * kVector), x[i]);
    load_floats(a.weight + v * kVector, weight[i]);
    if (Delta::kAny) {
      float delta[kVector];
      add.load(row * a.dim + v * kVector, delta);
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[i][j] += delta[j];
      const uint4 rounded = pack(x[i]);
      if (a.residual)
        *reinterpret_cast<uint4*>(a.residual + row * a.x_stride + v * kVector) = rounded;
      unpack(rounded, x[i]);
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum = fmaf(x[i][j], x[i][j], sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = warp_sums[0];
  for (int w = 1; w < blockDim.x / 32; ++w) sum += warp_sums[w];
  const float factor = rms_factor(sum, a.dim, a.eps);
#pragma unroll
  for (int i = 0; i < PerThread; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v >= vectors) continue;
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[i][j] = x[i][j] * factor * weight[i][j];
    *reinterpret_cast<uint4*>(a.out + t * a.dim + v * kVector) = pack(x[i]);
  }
}

// How many threads, and vectors of each, a row of `dim` takes. Throws Error where it is too long.
struct NormShape {
  int threads, per_thread;
};
inline NormShape norm_shape(int dim, int64_t x_stride) {
  const int vectors = dim / kVector;
  const int threads = threads_for(vectors, kNormThreads);
  const int per_thread = (vectors + threads - 1) / threads;
  if (dim % kVector != 0 || x_stride % kVector != 0 || per_thread > kMaxPerThread)
    fail("CUDA: a norm of {} values, rows {} apart: want multiples of {} and at most {} values",
         dim, x_stride, kVector, kNormThreads * kMaxPerThread * kVector);
  return {threads, per_thread};
}

}  // namespace mla::cuda
