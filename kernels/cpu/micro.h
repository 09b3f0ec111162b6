// The inner loops of the CPU backend. Each output element is one chain of fused multiply-adds in
// the order of k, whatever the blocking; vectors run over outputs. A processor without the vector
// instructions computes the same bits, element by element.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lib/base/dtype.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define MLA_AVX2 1
#endif

namespace mla::cpu {

inline constexpr int kPanel = 16;    // outputs of a panel
inline constexpr int kRowBlock = 6;  // rows of the micro-kernel: 12 accumulators of 8 floats

// Sixteen floats.
struct Vec16 {
#ifdef MLA_AVX2
  __m256 lo, hi;
#else
  float v[16];
#endif
};

#ifdef MLA_AVX2
inline Vec16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec16 load16(const bf16* p) {
  const auto widen = [](const bf16* q) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  };
  return {widen(p), widen(p + 8)};
}
inline void store16(float* p, Vec16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec16 splat16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec16 mul16(Vec16 a, Vec16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
#else
inline Vec16 load16(const float* p) {
  Vec16 a;
  std::memcpy(a.v, p, sizeof a.v);
  return a;
}
inline Vec16 load16(const bf16* p) {
  Vec16 a;
  for (int i = 0; i < 16; ++i) a.v[i] = to_f32(p[i]);
  return a;
}
inline void store16(float* p, Vec16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline Vec16 splat16(float x) {
  Vec16 a;
  for (float& e : a.v) e = x;
  return a;
}
inline Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) {
  for (int i = 0; i < 16; ++i) c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return c;
}
inline Vec16 mul16(Vec16 a, Vec16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i];
  return a;
}
#endif

// acc[r][0..16) += Σ_k x[r·x_stride + k] · w[k·w_stride + 0..16), k ascending.
template <int Rows, class W>
inline void micro_kernel(const float* x, int64_t x_stride, const W* w, int64_t w_stride, int64_t K,
                         float* acc, int64_t acc_stride) {
  Vec16 sum[Rows];
  for (int r = 0; r < Rows; ++r) sum[r] = load16(acc + r * acc_stride);
  for (int64_t k = 0; k < K; ++k) {
    const Vec16 b = load16(w + k * w_stride);
    for (int r = 0; r < Rows; ++r) sum[r] = fma16(splat16(x[r * x_stride + k]), b, sum[r]);
  }
  for (int r = 0; r < Rows; ++r) store16(acc + r * acc_stride, sum[r]);
}

// The same for any number of rows.
template <class W>
inline void micro_rows(int64_t rows, const float* x, int64_t x_stride, const W* w, int64_t w_stride,
                       int64_t K, float* acc, int64_t acc_stride) {
  while (rows >= kRowBlock) {
    micro_kernel<kRowBlock>(x, x_stride, w, w_stride, K, acc, acc_stride);
    x += kRowBlock * x_stride;
    acc += kRowBlock * acc_stride;
    rows -= kRowBlock;
  }
  switch (rows) {
    case 1:
      micro_kernel<1>(x, x_stride, w, w_stride, K, acc, acc_stride);
      break;
    case 2:
      micro_kernel<2>(x, x_stride, w, w_stride, K, acc, acc_stride);
      break;
    case 3:
      micro_kernel<3>(x, x_stride, w, w_stride, K, acc, acc_stride);
      break;
    case 4:
      micro_kernel<4>(x, x_stride, w, w_stride, K, acc, acc_stride);
      break;
    case 5:
      micro_kernel<5>(x, x_stride, w, w_stride, K, acc, acc_stride);
      break;
    default:
      break;
  }
}

// Σ a[i]·b[i] in sixteen lanes, which are then added pairwise; a tail goes to the first lanes. The
// shape depends on n alone.
inline float dot(const float* a, const float* b, int64_t n) {
  Vec16 sum = splat16(0.0f);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) sum = fma16(load16(a + i), load16(b + i), sum);
  float lane[16];
  store16(lane, sum);
  for (int j = 0; i < n; ++i, ++j) lane[j] = std::fma(a[i], b[i], lane[j]);
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0];
}

// y[i] += s·x[i]
inline void axpy(float s, const float* x, float* y, int64_t n) {
  const Vec16 vs = splat16(s);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store16(y + i, fma16(vs, load16(x + i), load16(y + i)));
  for (; i < n; ++i) y[i] = std::fma(s, x[i], y[i]);
}

// y[i] *= s
inline void scale(float s, float* y, int64_t n) {
  const Vec16 vs = splat16(s);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store16(y + i, mul16(vs, load16(y + i)));
  for (; i < n; ++i) y[i] *= s;
}

// e^x, the one exp of this backend (SiLU, softmax): at most 2 ulp for normal results, 0 below
// -103.97, +infinity above 88.73, NaN for NaN. x = n·ln2 + r with ln2 in two parts (Cody and
// Waite), a degree-6 polynomial for e^r (coefficients of Cephes expf), then two
// exact-or-once-rounded scalings by powers of two. Branch-free, so that compilers turn loops of it
// into vector code.
inline float exp_f32(float x) {
  const float clamped = x < -110.0f ? -110.0f : (x > 90.0f ? 90.0f : x);
  // Adding 1.5·2^23 leaves no fraction bits: round to nearest without a library call.
  const float n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  float r = std::fma(n, -0.693359375f, clamped);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  const float y = std::fma(p * r, r, r) + 1.0f;
  const int32_t e = x == x ? static_cast<int32_t>(n) : 0;
  const int32_t half = e >> 1;
  const float s1 = std::bit_cast<float>((half + 127) << 23);
  const float s2 = std::bit_cast<float>((e - half + 127) << 23);
  return x == x ? y * s1 * s2 : x;
}

inline float silu(float x) { return x / (1.0f + exp_f32(-x)); }

inline void to_floats(const float* from, float* to, int64_t n) {
  std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
}
inline void to_floats(const bf16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_f32(from[i]);
}
template <class T>
inline void from_floats(const float* from, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from_f32<T>(from[i]);
}

}  // namespace mla::cpu
