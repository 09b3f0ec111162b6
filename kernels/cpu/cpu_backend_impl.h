// The class behind make_cpu_backend; its ops are in linear.cpp, attention.cpp, moe.cpp,
// pointwise.cpp and sample.cpp.
#pragma once

#include <vector>

#include "kernels/cpu/panels.h"
#include "kernels/ops.h"

namespace mla::cpu {

inline constexpr int64_t kRowChunk = 96;  // rows of one unit of work in products

template <class T>
class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads) : threads_(threads) {}
  ~CpuBackend() override;

  std::string name() const override { return "cpu"; }
  DType dtype() const override { return dtype_of<T>; }
  void* allocate(size_t bytes, const std::string& what) override;
  void upload(void* to, const void* from, size_t bytes) override;
  void download(void* to, const void* from, size_t bytes) override;
  void* allocate_host(size_t bytes) override { return allocate(bytes, "host memory"); }
  uint64_t download_later(void* to, const void* from, size_t bytes) override {
    download(to, from, bytes);
    return 0;
  }
  void wait(uint64_t) override {}
  void stamp(uint64_t* at) override;
  Matrix create_matrix(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols, DType stored,
                       int32_t heads, int32_t nope_dim) override;
  void set_rows(const Matrix& matrix, int64_t expert, int64_t row_begin,
                const HostTensor& source) override;
  void finish_matrix(Matrix& matrix) override;
  size_t matrix_bytes(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols, DType stored,
                      int32_t heads, int32_t nope_dim) const override;

  void embed(const EmbedParams&) override;
  void add_norm(const AddNormParams&) override;
  void norm(const NormParams&) override;
  void linear(const LinearParams&) override;
  void gated_linear(const GatedLinearParams&) override;
  void rope_cache(const RopeCacheParams&) override;
  void kv_up(const KvUpParams&) override;
  void mla_prefill(const MlaPrefillParams&) override;
  void mla_decode(const MlaDecodeParams&) override;
  void router(const RouterParams&) override;
  void experts(const ExpertsParams&) override;
  void combine(const CombineParams&) override;
  void join_columns(const JoinColumnsParams&) override;
  void sample(const SampleParams&) override;

 private:
  // x [T, cols] as floats: x itself in a float32 run, else a copy in `scratch`.
  const float* floats(const void* x, int64_t elements, std::vector<float>& scratch) const;
  // out[t] = x[t]·wᵀ for float x; O is float or T.
  template <class O>
  void product(const float* x, int64_t rows, const Matrix& w, int64_t expert, O* out) const;
  // The absorbed halves of kv_b, made by finish_matrix: per head W_UK as [L, P], then W_UV as [V,
  // L].
  template <class W>
  void absorb(const Matrix& kv_b) const;
  void absorbed_queries(const MlaDecodeParams&) const;
  void absorbed_values(const MlaDecodeParams&) const;
  void decode_scores(const MlaDecodeParams&) const;

  int threads_;
  std::vector<void*> blocks_;
};

}  // namespace mla::cpu
