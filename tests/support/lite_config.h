// V2-Lite's sizes for tests that read no file.
#pragma once

#include "lib/model/config.h"

namespace mla::test {

inline ModelConfig lite_config() {
  ModelConfig c;
  c.vocab_size = 102400;
  c.hidden_size = 2048;
  c.num_layers = 27;
  c.num_heads = 16;
  c.kv_lora_rank = 512;
  c.qk_nope_head_dim = 128;
  c.qk_rope_head_dim = 64;
  c.v_head_dim = 128;
  c.intermediate_size = 10944;
  c.moe_intermediate_size = 1408;
  c.num_experts = 64;
  c.num_experts_per_tok = 6;
  c.num_shared_experts = 2;
  c.first_k_dense_replace = 1;
  c.max_position_embeddings = 163840;
  return c;
}

}  // namespace mla::test
