// Weights as the CPU backend stores them: panels of 16 outputs, [rows/16][cols][16], so that
// vectors run over outputs and K is contiguous. A gate_up matrix has its gate panels first, then
// its up panels. Rows beyond the last are zero.
#pragma once

#include "kernels/cpu/micro.h"
#include "kernels/ops.h"

namespace mla::cpu {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t halves_of(MatrixKind kind) { return kind == MatrixKind::gate_up ? 2 : 1; }

// Elements of one expert.
inline int64_t panel_elements(MatrixKind kind, int64_t rows, int64_t cols) {
  if (kind == MatrixKind::embedding) return rows * cols;
  const int64_t halves = halves_of(kind);
  return halves * ceil_div(rows / halves, kPanel) * kPanel * cols;
}

// out rows [row_begin, row_begin + row_count) of y = x·panelᵀ for the 16 outputs of one panel:
// acc [row_count][16], zeroed here. K runs in blocks that keep the panel in the first-level cache.
template <class W>
inline void panel_product(const float* x, int64_t x_stride, int64_t rows, const W* panel, int64_t K,
                          float* acc) {
  constexpr int64_t kBlock = 512;
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(rows) * kPanel);
  for (int64_t k = 0; k < K; k += kBlock) {
    const int64_t n = K - k < kBlock ? K - k : kBlock;
    micro_rows(rows, x + k, x_stride, panel + k * kPanel, kPanel, n, acc, kPanel);
  }
}

// Calls f with the matrix's data as its element type.
template <class F>
inline void with_weights(const Matrix& m, F f) {
  if (m.dtype == DType::f32) {
    f(static_cast<const float*>(m.data));
  } else {
    f(static_cast<const bf16*>(m.data));
  }
}

}  // namespace mla::cpu
