// config.json and generation_config.json. The input is, up to a zero byte, the first and behind it
// the second; where it begins with "+", the first is a patch (RFC 7396) of a good config.
#include "lib/model/config.h"

#include <algorithm>
#include <cmath>

#include "lib/base/json.h"
#include "lib/model/rope.h"
#include "lib/model/tensor_table.h"
#include "tests/fuzz/fuzz.h"

namespace mla {
namespace {

constexpr const char* kGood = R"({
  "architectures": ["DeepseekV2ForCausalLM"], "bos_token_id": 0, "eos_token_id": 1,
  "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 112,
  "kv_lora_rank": 32, "max_position_embeddings": 4096, "model_type": "deepseek_v2",
  "moe_intermediate_size": 48, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2,
  "norm_topk_prob": false, "num_attention_heads": 2, "num_experts_per_tok": 3,
  "num_hidden_layers": 3, "q_lora_rank": null, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
    "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
    "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
  "torch_dtype": "bfloat16", "v_head_dim": 16, "vocab_size": 128})";

bool positive(double value) { return std::isfinite(value) && value > 0; }

void check_experts(const ModelConfig& m) {
  FUZZ_CHECK(m.moe_intermediate_size > 0 && m.num_experts > 0 && m.num_shared_experts >= 0);
  FUZZ_CHECK(1 <= m.num_experts_per_tok && m.num_experts_per_tok <= m.num_experts);
  FUZZ_CHECK(m.num_groups >= 1 && m.num_experts % m.num_groups == 0);
  FUZZ_CHECK(1 <= m.topk_group && m.topk_group <= m.num_groups);
  FUZZ_CHECK(m.num_experts_per_tok <= m.num_experts / m.num_groups * m.topk_group);
  FUZZ_CHECK(positive(m.routed_scaling_factor));
}

void check(const ModelConfig& m) {
  for (const int32_t size :
       {m.vocab_size, m.hidden_size, m.num_layers, m.num_heads, m.kv_lora_rank, m.qk_nope_head_dim,
        m.qk_rope_head_dim, m.v_head_dim, m.q_dim(), m.kv_a_dim(), m.kv_b_dim()})
    FUZZ_CHECK(size > 0);
  FUZZ_CHECK(m.q_lora_rank >= 0 && m.first_k_dense_replace >= 0);
  FUZZ_CHECK(m.qk_rope_head_dim % 2 == 0);
  FUZZ_CHECK(m.first_k_dense_replace == 0 || m.intermediate_size > 0);
  if (m.first_k_dense_replace < m.num_layers) check_experts(m);
  FUZZ_CHECK(m.max_position_embeddings > 0);
  FUZZ_CHECK(positive(m.rms_norm_eps));
  FUZZ_CHECK(std::isfinite(m.rope_theta) && m.rope_theta > 1);
  FUZZ_CHECK(m.bos_token_id >= -1 && m.bos_token_id < m.vocab_size);
  FUZZ_CHECK(std::is_sorted(m.eos_token_ids.begin(), m.eos_token_ids.end()));
  for (const int32_t id : m.eos_token_ids) FUZZ_CHECK(id >= 0 && id < m.vocab_size);
}

// What is computed from a config of moderate size. Shapes fit together, and numbers are finite.
void check_derived(const ModelConfig& m) {
  if (m.num_layers <= 64 && m.num_experts <= 64) {
    for (const TensorEntry& entry : tensor_table(m)) {
      FUZZ_CHECK(!entry.shape.empty());
      for (const int64_t extent : entry.shape) FUZZ_CHECK(extent > 0);
    }
  }
  if (m.qk_rope_head_dim > 4096) return;
  FUZZ_CHECK(positive(softmax_scale(m)));
  FUZZ_CHECK(positive(rope_multiplier(m)));
  for (const float frequency : rope_inv_freq(m)) FUZZ_CHECK(std::isfinite(frequency));
  for (const float value : rope_table(m, 3)) FUZZ_CHECK(std::isfinite(value));
}

}  // namespace
}  // namespace mla

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla;
  const std::string_view text = fuzz::as_text(data, size);
  const size_t zero = std::min(text.find('\0'), size);
  std::string config(text.substr(0, zero));
  if (config.starts_with('+')) {
    const Json patch = Json::parse(config.begin() + 1, config.end(), nullptr, false);
    if (!patch.is_object()) return 0;
    Json good = Json::parse(kGood);
    good.merge_patch(patch);
    config = good.dump();
  }
  ModelConfig m;
  if (!fuzz::parses([&] { m = parse_config(config, text.substr(std::min(zero + 1, size))); }))
    return 0;
  check(m);
  check_derived(m);
  return 0;
}
