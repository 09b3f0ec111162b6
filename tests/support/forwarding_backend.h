// A backend that hands everything on to another, for tests that change one thing.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "kernels/ops.h"

namespace mla::test {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> to) : to_(std::move(to)) {}

  std::string name() const override { return to_->name(); }
  Backend& device() override { return to_->device(); }
  DType dtype() const override { return to_->dtype(); }
  void* allocate(size_t bytes, const std::string& what) override {
    return to_->allocate(bytes, what);
  }
  void upload(void* to, const void* from, size_t bytes) override { to_->upload(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override {
    to_->download(to, from, bytes);
  }
  void* allocate_host(size_t bytes) override { return to_->allocate_host(bytes); }
  uint64_t download_later(void* to, const void* from, size_t bytes) override {
    return to_->download_later(to, from, bytes);
  }
  void wait(uint64_t ticket) override { to_->wait(ticket); }
  void synchronize() override { to_->synchronize(); }
  void stamp(uint64_t* at) override { to_->stamp(at); }
  DevicePeaks measure_peaks() override { return to_->measure_peaks(); }
  uint64_t memory_in_use() const override { return to_->memory_in_use(); }
  void check(const ModelShape& shape) const override { to_->check(shape); }
  size_t scratch_bytes(const ModelShape& shape) const override { return to_->scratch_bytes(shape); }
  void use_scratch(void* base, const ModelShape& shape) override { to_->use_scratch(base, shape); }
  void replay(uint64_t key, const std::function<void()>& ops) override { to_->replay(key, ops); }

  Matrix create_matrix(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols, DType stored,
                       int32_t heads, int32_t nope_dim) override {
    return to_->create_matrix(kind, experts, rows, cols, stored, heads, nope_dim);
  }
  void set_rows(const Matrix& matrix, int64_t expert, int64_t row_begin,
                const HostTensor& source) override {
    to_->set_rows(matrix, expert, row_begin, source);
  }
  void finish_matrix(Matrix& matrix) override { to_->finish_matrix(matrix); }
  bool fill_normal(const Matrix& matrix, int64_t expert, int64_t row_begin,
                   const NormalTensor& source) override {
    return to_->fill_normal(matrix, expert, row_begin, source);
  }
  size_t matrix_bytes(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols, DType stored,
                      int32_t heads, int32_t nope_dim) const override {
    return to_->matrix_bytes(kind, experts, rows, cols, stored, heads, nope_dim);
  }

  void embed(const EmbedParams& p) override { to_->embed(p); }
  void add_norm(const AddNormParams& p) override { to_->add_norm(p); }
  void norm(const NormParams& p) override { to_->norm(p); }
  void linear(const LinearParams& p) override { to_->linear(p); }
  void gated_linear(const GatedLinearParams& p) override { to_->gated_linear(p); }
  void rope_cache(const RopeCacheParams& p) override { to_->rope_cache(p); }
  void kv_up(const KvUpParams& p) override { to_->kv_up(p); }
  void mla_prefill(const MlaPrefillParams& p) override { to_->mla_prefill(p); }
  void mla_decode(const MlaDecodeParams& p) override { to_->mla_decode(p); }
  void router(const RouterParams& p) override { to_->router(p); }
  void experts(const ExpertsParams& p) override { to_->experts(p); }
  void combine(const CombineParams& p) override { to_->combine(p); }
  void join_columns(const JoinColumnsParams& p) override { to_->join_columns(p); }
  void sample(const SampleParams& p) override { to_->sample(p); }

 private:
  std::unique_ptr<Backend> to_;
};

}  // namespace mla::test
