// Every tensor of a DeepSeek-V2 checkpoint: name, shape, and how tensor parallelism cuts it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/model/config.h"

namespace mla {

enum class ShardAxis : uint8_t {
  none,     // replicated
  rows,     // axis 0: heads of q and kv_b, intermediate columns of gate and up, vocabulary
  columns,  // axis 1: o_proj, down_proj
};

struct TensorEntry {
  std::string name;            // as the released files name it
  std::vector<int64_t> shape;  // [out, in] of a linear layer
  ShardAxis shard = ShardAxis::none;
};

// All of them, in the order of the forward pass. With tie_word_embeddings there is no lm_head.
// Names: model.embed_tokens.weight, model.layers.L.input_layernorm.weight, …self_attn.{q_proj |
// q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj},
// …post_attention_layernorm, …mlp.{gate_proj, up_proj, down_proj} | mlp.gate,
// mlp.experts.E.{gate,up,down}_proj, mlp.shared_experts.{gate,up,down}_proj, model.norm.weight,
// lm_head.weight.
std::vector<TensorEntry> tensor_table(const ModelConfig& config);

// The tensor of the LM head and how it is cut: lm_head.weight, or with tie_word_embeddings
// model.embed_tokens.weight, which is in the table, whole, for the embedding.
TensorEntry lm_head_entry(const ModelConfig& config);

int64_t total_parameters(const std::vector<TensorEntry>& table);

}  // namespace mla
