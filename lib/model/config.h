// config.json of the DeepSeek-V2 family: V2-Lite, V2-Lite-Chat, Coder-V2-Lite, V2, V2.5.
// Strict: what is not understood is refused by name, never defaulted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/dtype.h"

namespace mla {

// YaRN as DeepSeek-V2 uses it (rope_scaling or rope_parameters of type yarn).
struct YarnConfig {
  double factor = 1.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 0.0;          // 0: absent
  double mscale_all_dim = 0.0;  // 0: absent
  int64_t original_max_position_embeddings = 0;
};

struct ModelConfig {
  // Symbols of the algorithm in brackets; V2-Lite's values in parentheses.
  int32_t vocab_size = 0;             // (102400)
  int32_t hidden_size = 0;            // [H] (2048)
  int32_t num_layers = 0;             // (27)
  int32_t num_heads = 0;              // [N] (16)
  int32_t q_lora_rank = 0;            // 0: q_proj directly (V2-Lite)
  int32_t kv_lora_rank = 0;           // [L] (512)
  int32_t qk_nope_head_dim = 0;       // [P] (128)
  int32_t qk_rope_head_dim = 0;       // [R] (64), even
  int32_t v_head_dim = 0;             // [V] (128)
  int32_t intermediate_size = 0;      // of the dense layers (10944)
  int32_t moe_intermediate_size = 0;  // [I] (1408)
  int32_t num_experts = 0;            // [E] (64)
  int32_t num_experts_per_tok = 0;    // [K] (6)
  int32_t num_shared_experts = 0;     // (2)
  int32_t first_k_dense_replace = 0;  // layers [0, this) are dense (1)
  int32_t num_groups = 1;             // n_group; > 1 with group_limited_greedy
  int32_t topk_group = 1;
  bool group_limited = false;  // topk_method
  float routed_scaling_factor = 1.0f;
  float rms_norm_eps = 1e-6f;
  double rope_theta = 10000.0;
  bool yarn = false;
  YarnConfig yarn_config;
  bool tie_word_embeddings = false;
  int64_t max_position_embeddings = 0;  // (163840)
  int32_t bos_token_id = -1;            // -1: none
  std::vector<int32_t> eos_token_ids;   // config.json and generation_config.json together, sorted
  std::string dtype;                    // torch_dtype or dtype as the file says, "" where absent
  std::vector<std::string> warnings;    // unknown harmless keys: one line in all

  int32_t q_dim() const { return num_heads * (qk_nope_head_dim + qk_rope_head_dim); }
  int32_t kv_a_dim() const { return kv_lora_rank + qk_rope_head_dim; }
  int32_t kv_b_dim() const { return num_heads * (qk_nope_head_dim + v_head_dim); }
  // What `dtype` says that the tensors are; bfloat16 where it says nothing of use.
  DType stored_dtype() const;
  bool is_moe(int32_t layer) const { return layer >= first_k_dense_replace; }
};

// Reads DIR/config.json and DIR/generation_config.json (which may be absent). Throws Error
// "config.json: …" that names the field, what is expected and what was found: another model_type,
// norm_topk_prob true, moe_layer_freq other than 1, a scoring_func other than softmax, projection
// biases, an activation other than silu, an unknown rope type or unknown key of the rope object,
// sizes that are missing, not positive or do not fit together (groups that do not divide the
// experts, K above the experts that the kept groups have, an odd rope dim …).
ModelConfig load_config(const std::string& model_dir);
// From the texts; `generation_json` may be empty.
ModelConfig parse_config(std::string_view config_json, std::string_view generation_json);

}  // namespace mla
