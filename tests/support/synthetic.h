// Checkpoints whose weights are a pure integer function of (tensor name, element index, seed), the
// same bits as tests/reference/synthetic_weights.py, and the expected logits made from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/base/dtype.h"

namespace mla::test {

// Element `index` of a tensor, rounded to bfloat16. u = top 24 bits of
// splitmix64(fnv1a64(name) + seed·0x9E3779B97F4A7C15 + index), mapped to [-1, 1); a tensor of one
// axis is 1 + u/4, others u times a power of two that depends on name and fan-in shape[1].
float synthetic_weight(const std::string& name, uint64_t index, const std::vector<int64_t>& shape,
                       uint64_t seed);

// A whole tensor.
std::vector<bf16> synthetic_tensor(const std::string& name, const std::vector<int64_t>& shape,
                                   uint64_t seed);

// Copies config.json (and generation_config.json) of `config_dir` to `out_dir`, which is created,
// and writes the tensors as BF16: one model.safetensors, or `shards` files and their index, a layer
// cut across them. Returns the names of the files of tensors.
std::vector<std::string> write_synthetic_checkpoint(const std::string& config_dir,
                                                    const std::string& out_dir, int shards,
                                                    uint64_t seed);
// The seed of config_dir/expected.json.
std::vector<std::string> write_synthetic_checkpoint(const std::string& config_dir,
                                                    const std::string& out_dir, int shards = 1);

struct ExpectedPrompt {
  std::vector<int32_t> ids;        // [T]
  std::vector<int32_t> positions;  // those that have a row, ascending
  std::vector<float> router_gap;   // [T]; infinity where nothing is routed
  int64_t first_row = 0;           // of positions[0] in Expected::logits
};

// Logits computed by transformers in float32 from the synthetic weights.
struct Expected {
  std::string name;
  std::string dir;  // with config.json
  uint64_t seed = 0;
  int32_t vocab_size = 0;  // [V]
  std::vector<ExpectedPrompt> prompts;
  std::vector<float> logits;  // [rows, V]

  const float* row(const ExpectedPrompt& prompt, size_t i) const {
    return logits.data() + (prompt.first_row + static_cast<int64_t>(i)) * vocab_size;
  }
};

// Names of the folders of tests/data/expected, sorted. `root` is that folder.
std::vector<std::string> expected_names(const std::string& root);
Expected load_expected(const std::string& root, const std::string& name);

}  // namespace mla::test
