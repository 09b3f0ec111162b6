// The naive model: a whole prompt at once in fp32, no cache, no absorption, no plan, plain loops
// written from the formulas of DeepSeek's modelling code. It shares nothing with lib/model but the
// configuration record, its RoPE and YaRN included, so that the two can be held against each other.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "lib/model/config.h"
#include "weights_loader/checkpoint.h"

namespace mla::test {

struct NaiveOutput {
  std::vector<float> logits;  // [T, V]
  // [T]: minimum over the layers of the k-th less the (k+1)-th routing score, and of the same of
  // the groups' scores. Infinity where nothing is routed.
  std::vector<float> router_gap;
};

class NaiveModel {
 public:
  // Reads all weights as fp32: for small models.
  NaiveModel(const Checkpoint& checkpoint, const ModelConfig& config);
  // ids: [T], T >= 1, at positions 0 … T-1.
  NaiveOutput run(std::span<const int32_t> ids) const;

 private:
  struct Matrix {
    int64_t rows = 0, cols = 0;
    std::vector<float> data;
  };

  const Matrix& weight(const std::string& name) const;
  // y [T, out] = x [T, in] · Wᵀ.
  std::vector<float> linear(const std::vector<float>& x, const std::string& name) const;
  // Rows of `width`, over x [T·stride] from column `first`.
  std::vector<float> rms_norm(const std::vector<float>& x, int64_t stride, int64_t first,
                              const std::string& name) const;
  std::vector<float> attention(const std::vector<float>& x, const std::string& prefix) const;
  std::vector<float> mlp(const std::vector<float>& x, const std::string& prefix) const;
  std::vector<float> moe(const std::vector<float>& x, const std::string& prefix,
                         std::vector<float>& router_gap) const;

  ModelConfig config_;
  std::map<std::string, Matrix> weights_;
};

// Softmax scale and cos/sin multiplier, and inv_freq [R/2], as the naive model has them.
struct NaiveRope {
  double softmax_scale = 0.0;
  double multiplier = 1.0;
  std::vector<float> inv_freq;
};
NaiveRope naive_rope(const ModelConfig& config);

}  // namespace mla::test
