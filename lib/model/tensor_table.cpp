#include "lib/model/tensor_table.h"

#include "lib/base/error.h"

namespace mla {
namespace {

class Table {
 public:
  explicit Table(const ModelConfig& config) : c_(config) {}

  void add(const std::string& name, std::vector<int64_t> shape, ShardAxis shard) {
    entries_.push_back({.name = name + ".weight", .shape = std::move(shape), .shard = shard});
  }

  void attention(const std::string& at) {
    const int64_t H = c_.hidden_size, L = c_.kv_lora_rank, A = c_.q_lora_rank;
    if (A == 0) {
      add(at + "q_proj", {c_.q_dim(), H}, ShardAxis::rows);
    } else {
      add(at + "q_a_proj", {A, H}, ShardAxis::none);
      add(at + "q_a_layernorm", {A}, ShardAxis::none);
      add(at + "q_b_proj", {c_.q_dim(), A}, ShardAxis::rows);
    }
    add(at + "kv_a_proj_with_mqa", {c_.kv_a_dim(), H}, ShardAxis::none);
    add(at + "kv_a_layernorm", {L}, ShardAxis::none);
    add(at + "kv_b_proj", {c_.kv_b_dim(), L}, ShardAxis::rows);
    add(at + "o_proj", {H, int64_t{c_.num_heads} * c_.v_head_dim}, ShardAxis::columns);
  }

  void mlp(const std::string& at, int64_t width) {
    const int64_t H = c_.hidden_size;
    add(at + "gate_proj", {width, H}, ShardAxis::rows);
    add(at + "up_proj", {width, H}, ShardAxis::rows);
    add(at + "down_proj", {H, width}, ShardAxis::columns);
  }

  void moe(const std::string& at) {
    const int64_t I = c_.moe_intermediate_size;
    add(at + "gate", {c_.num_experts, c_.hidden_size}, ShardAxis::none);
    for (int32_t e = 0; e < c_.num_experts; ++e) mlp(fmt::format("{}experts.{}.", at, e), I);
    if (c_.num_shared_experts > 0) mlp(at + "shared_experts.", I * c_.num_shared_experts);
  }

  std::vector<TensorEntry> take() { return std::move(entries_); }

 private:
  const ModelConfig& c_;
  std::vector<TensorEntry> entries_;
};

}  // namespace

std::vector<TensorEntry> tensor_table(const ModelConfig& config) {
  const int64_t H = config.hidden_size, vocab = config.vocab_size;
  Table table(config);
  // The embedding stays whole on every rank: cut by vocabulary it would need a sum of its own.
  table.add("model.embed_tokens", {vocab, H}, ShardAxis::none);
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string at = fmt::format("model.layers.{}.", layer);
    table.add(at + "input_layernorm", {H}, ShardAxis::none);
    table.attention(at + "self_attn.");
    table.add(at + "post_attention_layernorm", {H}, ShardAxis::none);
    if (config.is_moe(layer)) {
      table.moe(at + "mlp.");
    } else {
      table.mlp(at + "mlp.", config.intermediate_size);
    }
  }
  table.add("model.norm", {H}, ShardAxis::none);
  std::vector<TensorEntry> entries = table.take();
  if (!config.tie_word_embeddings) entries.push_back(lm_head_entry(config));
  return entries;
}

TensorEntry lm_head_entry(const ModelConfig& config) {
  return {.name = config.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight",
          .shape = {config.vocab_size, config.hidden_size},
          .shard = ShardAxis::rows};
}

int64_t total_parameters(const std::vector<TensorEntry>& table) {
  int64_t total = 0;
  for (const TensorEntry& entry : table) {
    int64_t count = 1;
    bool overflow = false;
    for (const int64_t extent : entry.shape)
      overflow = __builtin_mul_overflow(count, extent, &count) || overflow;
    if (overflow || __builtin_add_overflow(total, count, &total))
      fail("tensor '{}': expected fewer than 2^63 parameters in all, found more", entry.name);
  }
  return total;
}

}  // namespace mla
