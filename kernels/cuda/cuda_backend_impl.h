// The class behind make_cuda_backend.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/scratch.h"
#include "kernels/cuda/staging.h"
#include "kernels/cuda/upload_pool.h"

namespace mla::cuda {

// What needs no device: sizes and refusals. Its ops throw.
class CudaCounter : public Backend {
 public:
  std::string name() const override { return "cuda"; }
  DType dtype() const override { return DType::bf16; }
  size_t matrix_bytes(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols, DType stored,
                      int32_t heads, int32_t nope_dim) const override;
  void check(const ModelShape& shape) const override;
  size_t scratch_bytes(const ModelShape& shape) const override;

  void* allocate(size_t, const std::string&) override { no_device(); }
  void upload(void*, const void*, size_t) override { no_device(); }
  void download(void*, const void*, size_t) override { no_device(); }
  void* allocate_host(size_t) override { no_device(); }
  uint64_t download_later(void*, const void*, size_t) override { no_device(); }
  void wait(uint64_t) override { no_device(); }
  void stamp(uint64_t*) override { no_device(); }
  Matrix create_matrix(MatrixKind, int64_t, int64_t, int64_t, DType, int32_t, int32_t) override {
    no_device();
  }
  void set_rows(const Matrix&, int64_t, int64_t, const HostTensor&) override { no_device(); }
  void finish_matrix(Matrix&) override { no_device(); }
  void embed(const EmbedParams&) override { no_device(); }
  void add_norm(const AddNormParams&) override { no_device(); }
  void norm(const NormParams&) override { no_device(); }
  void linear(const LinearParams&) override { no_device(); }
  void gated_linear(const GatedLinearParams&) override { no_device(); }
  void rope_cache(const RopeCacheParams&) override { no_device(); }
  void kv_up(const KvUpParams&) override { no_device(); }
  void mla_prefill(const MlaPrefillParams&) override { no_device(); }
  void mla_decode(const MlaDecodeParams&) override { no_device(); }
  void router(const RouterParams&) override { no_device(); }
  void experts(const ExpertsParams&) override { no_device(); }
  void combine(const CombineParams&) override { no_device(); }
  void join_columns(const JoinColumnsParams&) override { no_device(); }
  void sample(const SampleParams&) override { no_device(); }

 private:
  [[noreturn]] static void no_device();
};

class CudaBackend final : public CudaCounter {
 public:
  explicit CudaBackend(const CudaOptions& options);
  ~CudaBackend() override;

  void* allocate(size_t bytes, const std::string& what) override;
  void upload(void* to, const void* from, size_t bytes) override;
  void download(void* to, const void* from, size_t bytes) override;
  void* allocate_host(size_t bytes) override;
  uint64_t download_later(void* to, const void* from, size_t bytes) override;
  void wait(uint64_t ticket) override;
  void synchronize() override;
  void stamp(uint64_t* at) override { cuda::stamp(at, launch_); }
  DevicePeaks measure_peaks() override;
  uint64_t memory_in_use() const override;
  void use_scratch(void* base, const ModelShape& shape) override;
  void replay(uint64_t key, const std::function<void()>& ops) override;

  Matrix create_matrix(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols, DType stored,
                       int32_t heads, int32_t nope_dim) override;
  void set_rows(const Matrix& matrix, int64_t expert, int64_t row_begin,
                const HostTensor& source) override;
  void finish_matrix(Matrix& matrix) override;
  bool fill_normal(const Matrix& matrix, int64_t expert, int64_t row_begin,
                   const NormalTensor& source) override;

  void embed(const EmbedParams& p) override { cuda::embed(p, launch_); }
  void add_norm(const AddNormParams& p) override { cuda::add_norm(p, launch_); }
  void norm(const NormParams& p) override { cuda::norm(p, launch_); }
  void linear(const LinearParams&) override;
  void gated_linear(const GatedLinearParams&) override;
  void rope_cache(const RopeCacheParams& p) override { cuda::rope_cache(p, launch_); }
  void kv_up(const KvUpParams&) override;
  void mla_prefill(const MlaPrefillParams& p) override { cuda::mla_prefill(p, launch_); }
  void mla_decode(const MlaDecodeParams&) override;
  void router(const RouterParams&) override;
  void experts(const ExpertsParams&) override;
  void combine(const CombineParams& p) override { cuda::combine(p, launch_); }
  void join_columns(const JoinColumnsParams& p) override { cuda::join_columns(p, launch_); }
  void sample(const SampleParams&) override;

  const Launch& launch() const { return launch_; }

 private:
  static constexpr int kTickets = 8;  // downloads on their way at once

  // Scratch for at least this shape. Without use_scratch, as in tests of single ops, it grows.
  const Scratch& scratch(const ModelShape& needed);

  CudaOptions options_;
  Launch launch_{};
  std::vector<void*> blocks_, host_blocks_;
  std::byte* slab_ = nullptr;  // small allocations share blocks of kSlab bytes
  size_t slab_left_ = 0;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<UploadPool> pool_;  // made with the first weight
  cudaEvent_t tickets_[kTickets] = {};
  uint64_t next_ticket_ = 0;
  bool scratch_given_ = false;
  Scratch scratch_{};
  ModelShape scratch_shape_{};
  std::map<uint64_t, cudaGraphExec_t> graphs_;
};

}  // namespace mla::cuda
