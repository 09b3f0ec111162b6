// Embedding, norms, RoPE with the cache write, combine, columns joined.
#include <algorithm>

#include "kernels/cpu/cpu_backend_impl.h"

namespace mla::cpu {
namespace {

// Factor 1/sqrt(mean(x²) + eps).
float rms_factor(const float* x, int64_t dim, float eps) {
  return 1.0f / std::sqrt(dot(x, x, dim) / static_cast<float>(dim) + eps);
}

template <class T>
void write_norm(const float* x, const float* weight, int64_t dim, float eps, T* out) {
  const float factor = rms_factor(x, dim, eps);
  for (int64_t i = 0; i < dim; ++i) out[i] = from_f32<T>(x[i] * factor * weight[i]);
}

}  // namespace

template <class T>
void CpuBackend<T>::embed(const EmbedParams& p) {
  const int64_t H = p.table.cols;
  with_weights(p.table, [&]<class W>(const W* table) {
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t t = 0; t < p.T; ++t) {
      const int64_t id = p.ids[t] < 0 ? p.sampled[-1 - p.ids[t]] : p.ids[t];
      for (int64_t i = 0; i < H; ++i)
        static_cast<T*>(p.out)[t * H + i] = from_f32<T>(to_f32(table[id * H + i]));
    }
  });
}

template <class T>
void CpuBackend<T>::add_norm(const AddNormParams& p) {
#pragma omp parallel num_threads(threads_)
  {
    std::vector<float> x(static_cast<size_t>(p.H));
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.T; ++t) {
      const int64_t row = p.rows ? p.rows[t] : t;
      T* residual = static_cast<T*>(p.residual) + row * p.H;
      to_floats(residual, x.data(), p.H);
      const auto add = [&](const auto* delta) {
        delta += row * p.H;
        for (int64_t i = 0; i < p.H; ++i) x[i] = to_f32(from_f32<T>(x[i] + to_f32(delta[i])));
        if (!p.rows) from_floats(x.data(), residual, p.H);
      };
      if (p.delta) add(p.delta);
      if (p.delta_rounded) add(static_cast<const T*>(p.delta_rounded));
      write_norm(x.data(), p.weight, p.H, p.eps, static_cast<T*>(p.out) + t * p.H);
    }
  }
}

template <class T>
void CpuBackend<T>::norm(const NormParams& p) {
#pragma omp parallel num_threads(threads_)
  {
    std::vector<float> x(static_cast<size_t>(p.dim));
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.T; ++t) {
      to_floats(static_cast<const T*>(p.x) + t * p.x_stride, x.data(), p.dim);
      write_norm(x.data(), p.weight, p.dim, p.eps, static_cast<T*>(p.out) + t * p.dim);
    }
  }
}

namespace {

// Rotates the pairs (2i, 2i+1) of x [R]; table row: cos [R/2], sin [R/2].
template <class T>
void rotate(const T* x, const float* table, int32_t R, T* out) {
  for (int32_t i = 0; i < R / 2; ++i) {
    const float c = table[i], s = table[R / 2 + i];
    const float a = to_f32(x[2 * i]), b = to_f32(x[2 * i + 1]);
    out[2 * i] = from_f32<T>(a * c - b * s);
    out[2 * i + 1] = from_f32<T>(b * c + a * s);
  }
}

}  // namespace

template <class T>
void CpuBackend<T>::rope_cache(const RopeCacheParams& p) {
#pragma omp parallel num_threads(threads_)
  {
    std::vector<float> latent(static_cast<size_t>(p.L));
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.T; ++t) {
      const float* table = p.rope_table + int64_t{std::max(p.positions[t], 0)} * p.R;
      T* q = static_cast<T*>(p.q) + t * p.q_stride;
      for (int32_t h = 0; h < p.N; ++h) {
        T* q_pe = q + h * (p.P + p.R) + p.P;
        rotate(q_pe, table, p.R, q_pe);
      }
      if (p.slots[t] < 0) continue;
      const T* kv_a = static_cast<const T*>(p.kv_a) + t * p.kv_stride;
      T* row = static_cast<T*>(p.cache) + p.slots[t] * (p.L + p.R);
      to_floats(kv_a, latent.data(), p.L);
      write_norm(latent.data(), p.norm_weight, p.L, p.eps, row);
      rotate(kv_a + p.L, table, p.R, row + p.L);
    }
  }
}

template <class T>
void CpuBackend<T>::combine(const CombineParams& p) {
  const int64_t slots = p.K + p.S;
#pragma omp parallel num_threads(threads_)
  {
    std::vector<float> sum(static_cast<size_t>(p.H));
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.T; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t k = 0; k < slots; ++k) {
        const float weight = k < p.K ? p.weights[t * p.K + k] : 1.0f;
        const T* out = static_cast<const T*>(p.expert_out) + (t * slots + k) * p.H;
        for (int64_t i = 0; i < p.H; ++i) sum[i] = std::fma(weight, to_f32(out[i]), sum[i]);
      }
      if (p.sum) {
        from_floats(sum.data(), static_cast<T*>(p.sum) + t * p.H, p.H);
        continue;
      }
      T* residual = static_cast<T*>(p.residual) + t * p.H;
      for (int64_t i = 0; i < p.H; ++i) residual[i] = from_f32<T>(sum[i] + to_f32(residual[i]));
    }
  }
}

template <class T>
void CpuBackend<T>::join_columns(const JoinColumnsParams& p) {
#pragma omp parallel for num_threads(threads_) schedule(static)
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.cols; c += p.width)
      std::copy_n(p.parts + (c / p.width * p.rows + r) * p.width, std::min(p.width, p.cols - c),
                  p.out + r * p.cols + c);
}

template void CpuBackend<float>::embed(const EmbedParams&);
template void CpuBackend<float>::add_norm(const AddNormParams&);
template void CpuBackend<float>::norm(const NormParams&);
template void CpuBackend<float>::rope_cache(const RopeCacheParams&);
template void CpuBackend<float>::combine(const CombineParams&);
template void CpuBackend<float>::join_columns(const JoinColumnsParams&);
template void CpuBackend<bf16>::embed(const EmbedParams&);
template void CpuBackend<bf16>::add_norm(const AddNormParams&);
template void CpuBackend<bf16>::norm(const NormParams&);
template void CpuBackend<bf16>::rope_cache(const RopeCacheParams&);
template void CpuBackend<bf16>::combine(const CombineParams&);
template void CpuBackend<bf16>::join_columns(const JoinColumnsParams&);

}  // namespace mla::cpu
