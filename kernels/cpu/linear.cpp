// Products with weights: linear, gated_linear, kv_up.
#include <algorithm>

#include "kernels/cpu/cpu_backend_impl.h"

namespace mla::cpu {

template <class T>
const float* CpuBackend<T>::floats(const void* x, int64_t elements,
                                   std::vector<float>& scratch) const {
  if constexpr (sizeof(T) == 4) {
    return static_cast<const float*>(x);
  } else {
    scratch.resize(static_cast<size_t>(elements));
    const T* from = static_cast<const T*>(x);
    float* to = scratch.data();
    constexpr int64_t kBlock = 4096;
#pragma omp parallel for num_threads(threads_) schedule(static) if (elements > kBlock)
    for (int64_t i = 0; i < elements; i += kBlock)
      to_floats(from + i, to + i, std::min(kBlock, elements - i));
    return to;
  }
}

template <class T>
template <class O>
void CpuBackend<T>::product(const float* x, int64_t rows, const Matrix& w, int64_t expert,
                            O* out) const {
  const int64_t panels = ceil_div(w.rows, kPanel), chunks = ceil_div(rows, kRowChunk);
  with_weights(w, [&]<class W>(const W* data) {
    data += expert * panel_elements(w.kind, w.rows, w.cols);
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 4)
    for (int64_t unit = 0; unit < panels * chunks; ++unit) {
      const int64_t panel = unit % panels, row = unit / panels * kRowChunk;
      const int64_t n = std::min(kRowChunk, rows - row);
      const int64_t width = std::min<int64_t>(kPanel, w.rows - panel * kPanel);
      float acc[kRowChunk * kPanel];
      panel_product(x + row * w.cols, w.cols, n, data + panel * kPanel * w.cols, w.cols, acc);
      for (int64_t r = 0; r < n; ++r)
        from_floats(acc + r * kPanel, out + (row + r) * w.rows + panel * kPanel, width);
    }
  });
}

template <class T>
void CpuBackend<T>::linear(const LinearParams& p) {
  std::vector<float> scratch;
  const float* x = floats(p.x, p.T * p.w.cols, scratch);
  if (p.out_f32) {
    product(x, p.T, p.w, 0, static_cast<float*>(p.out));
  } else {
    product(x, p.T, p.w, 0, static_cast<T*>(p.out));
  }
}

template <class T>
void CpuBackend<T>::gated_linear(const GatedLinearParams& p) {
  std::vector<float> scratch;
  const float* x = floats(p.x, p.T * p.w.cols, scratch);
  const int64_t I = p.w.rows / 2, K = p.w.cols;
  const int64_t panels = ceil_div(I, kPanel), chunks = ceil_div(p.T, kRowChunk);
  with_weights(p.w, [&]<class W>(const W* gate) {
    const W* up = gate + panels * kPanel * K;
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 4)
    for (int64_t unit = 0; unit < panels * chunks; ++unit) {
      const int64_t panel = unit % panels, row = unit / panels * kRowChunk;
      const int64_t n = std::min(kRowChunk, p.T - row);
      const int64_t width = std::min<int64_t>(kPanel, I - panel * kPanel);
      float g[kRowChunk * kPanel], u[kRowChunk * kPanel];
      panel_product(x + row * K, K, n, gate + panel * kPanel * K, K, g);
      panel_product(x + row * K, K, n, up + panel * kPanel * K, K, u);
      for (int64_t i = 0; i < n * kPanel; ++i) g[i] = silu(g[i]) * u[i];
      for (int64_t r = 0; r < n; ++r)
        from_floats(g + r * kPanel, static_cast<T*>(p.out) + (row + r) * I + panel * kPanel, width);
    }
  });
}

template <class T>
void CpuBackend<T>::kv_up(const KvUpParams& p) {
  const int64_t L = p.L, row_size = p.L + p.R;
  const T* cache = static_cast<const T*>(p.cache);
  for (int32_t s = 0; s < p.num_spans; ++s) {
    const KeySpan& span = p.spans[s];
    const int32_t* table = p.page_table + p.prefill[span.prefill].table_begin;
    const int64_t rows = span.key_end - span.key_begin;
    std::vector<float> latent(static_cast<size_t>(rows * L));
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = span.key_begin + r;
      const int64_t slot =
          int64_t{table[position / kPageTokens]} * kPageTokens + position % kPageTokens;
      to_floats(cache + slot * row_size, latent.data() + r * L, L);
    }
    product(latent.data(), rows, p.kv_b, 0,
            static_cast<T*>(p.workspace) + int64_t{span.workspace_row} * p.kv_b.rows);
  }
}

template const float* CpuBackend<float>::floats(const void*, int64_t, std::vector<float>&) const;
template void CpuBackend<float>::linear(const LinearParams&);
template void CpuBackend<float>::gated_linear(const GatedLinearParams&);
template void CpuBackend<float>::kv_up(const KvUpParams&);
template const float* CpuBackend<bf16>::floats(const void*, int64_t, std::vector<float>&) const;
template void CpuBackend<bf16>::linear(const LinearParams&);
template void CpuBackend<bf16>::gated_linear(const GatedLinearParams&);
template void CpuBackend<bf16>::kv_up(const KvUpParams&);

}  // namespace mla::cpu
