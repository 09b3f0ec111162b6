#include "lib/model/buffers.h"

#include <algorithm>

#include "kernels/comm/comm.h"
#include "lib/model/shard.h"

namespace mla {

int64_t split_capacity(const StepLimits& limits) {
  return int64_t{limits.max_decode_splits} + limits.max_seqs;
}

int64_t decode_capacity(const StepLimits& limits) {
  return std::min<int64_t>(limits.max_rows, split_capacity(limits));
}

PlanBuffers PlanBuffers::carve(Arena& arena, const ModelConfig& c, const StepLimits& limits) {
  PlanBuffers b{};
  const int64_t B = limits.max_rows, S = limits.max_seqs;
  const int64_t pages = pages_of(limits.max_model_len);
  b.page_table_size = S * pages;
  // A span ends with its request, or fills its pass up to less than a tile.
  b.max_key_spans = 2 * S + int64_t{limits.num_pages} * kPageTokens / kKeyTile + 1;
  // Key tiles: cuts are at their multiples. Query tiles: of a request in each of its passes, of
  // which all but the first and the last hold W of its keys.
  const int64_t key_tiles = int64_t{limits.num_pages} * kPageTokens / kKeyTile + S;
  const int64_t passes = 2 + limits.max_model_len / std::max(limits.workspace_rows, 1);
  b.max_tiles = key_tiles + passes * (B / kQueryTile + S);
  b.max_decode = decode_capacity(limits);
  b.max_splits = split_capacity(limits);
  b.max_edits = std::max<int64_t>(c.vocab_size, S * kEditsPerRow);
  b.token_ids = arena.take<int32_t>(B);
  b.positions = arena.take<int32_t>(B);
  b.slots = arena.take<int64_t>(B);
  b.page_table = arena.take<int32_t>(b.page_table_size);
  b.prefill = arena.take<PrefillSpan>(S);
  b.key_spans = arena.take<KeySpan>(b.max_key_spans);
  b.tiles = arena.take<WorkTile>(b.max_tiles);
  b.decode = arena.take<DecodeRow>(b.max_decode);
  b.decode_splits = arena.take<DecodeSplit>(b.max_splits);
  b.decode_groups = arena.take<DecodeSplit>(b.max_splits);
  b.num_splits = arena.take<int32_t>(2);
  b.sample_rows = arena.take<int32_t>(S);
  b.specs = arena.take<SampleSpec>(S);
  b.edits = arena.take<LogitEdit>(b.max_edits);
  return b;
}

WorkspaceBuffers WorkspaceBuffers::carve(Arena& arena, const ModelConfig& c,
                                         const StepLimits& limits, DType dtype) {
  WorkspaceBuffers b{};
  const int64_t B = limits.max_rows, N = c.num_heads;
  // A GPU reads whole key tiles, also where a span ends at the last row.
  b.kv = arena.take((int64_t{limits.workspace_rows} + kKeyTile) * c.kv_b_dim(), size_of(dtype));
  b.state_max = arena.take<float>(B * N);
  b.state_sum = arena.take<float>(B * N);
  b.state_out = arena.take<float>(B * N * c.v_head_dim);
  return b;
}

ActivationBuffers ActivationBuffers::carve(Arena& arena, const ModelConfig& c,
                                           const StepLimits& limits, DType dtype) {
  ActivationBuffers b{};
  const size_t e = size_of(dtype);
  const int64_t B = limits.max_rows, H = c.hidden_size, N = c.num_heads, S = limits.max_seqs;
  const int64_t A = c.q_lora_rank ? c.q_lora_rank : c.q_dim();
  b.residual = arena.take(B * H, e);
  b.hidden = arena.take(B * H, e);
  b.qkv_a = arena.take(B * (A + c.kv_a_dim()), e);
  b.q_a = arena.take(B * c.q_lora_rank, e);
  b.q = arena.take(c.q_lora_rank ? B * c.q_dim() : 0, e);
  b.attention = arena.take(B * N * c.v_head_dim, e);
  b.delta = arena.take<float>(limits.ranks > 1 ? 0 : B * H);
  const int64_t D = decode_capacity(limits);
  b.q_lat = arena.take(D * N * c.kv_lora_rank, e);
  b.o_lat = arena.take(D * N * c.kv_lora_rank, e);

  const int64_t slice = std::min<int64_t>(B, kMlpSlice);
  const bool dense = c.first_k_dense_replace > 0, moe = c.first_k_dense_replace < c.num_layers;
  const int64_t slots = moe ? c.num_experts_per_tok + c.num_shared_experts : 0;
  const int64_t inner =
      std::max<int64_t>(dense ? c.intermediate_size : 0, slots * c.moe_intermediate_size);
  b.inner = arena.take(slice * inner, e);
  b.expert_out = arena.take(slice * slots * H, e);
  b.router_logits = arena.take<float>(moe ? slice * c.num_experts : 0);
  b.expert_ids = arena.take<int32_t>(moe ? slice * c.num_experts_per_tok : 0);
  b.expert_weights = arena.take<float>(moe ? slice * c.num_experts_per_tok : 0);

  b.sampled_hidden = arena.take(S * H, e);
  b.logits = arena.take<float>(S * c.vocab_size);
  b.output = static_cast<std::byte*>(
      arena.take(static_cast<int64_t>(SampledOutput::bytes(S, kMaxTop)), 1));
  b.sampled = arena.take<int32_t>(S);
  if (limits.ranks > 1) {
    const int64_t width = rank_extent(c.vocab_size, limits.ranks);
    b.partial = arena.take(B * H, e);
    b.reduce_scratch = arena.take(mla::reduce_scratch(limits.ranks, B * H), e);
    b.rank_logits = arena.take<float>(S * width);
    b.all_logits = arena.take<float>(limits.ranks * std::min<int64_t>(S, kGatherRows) * width);
  }
  return b;
}

SampledOutput SampledOutput::at(std::byte* block, int64_t rows, int64_t top) {
  auto* stamps = reinterpret_cast<uint64_t*>(block);
  auto* ids = reinterpret_cast<int32_t*>(stamps + kStamps);
  auto* floats = reinterpret_cast<float*>(ids);
  return {stamps, ids, floats + rows, ids + 2 * rows, floats + 2 * rows + rows * top};
}

ModelShape model_shape(const ModelConfig& c, const StepLimits& limits) {
  const bool dense = c.first_k_dense_replace > 0, moe = c.first_k_dense_replace < c.num_layers;
  ModelShape shape;
  shape.H = c.hidden_size;
  shape.vocab = c.vocab_size;
  shape.dense_width = dense ? c.intermediate_size : 0;
  shape.N = c.num_heads;
  shape.P = c.qk_nope_head_dim;
  shape.R = c.qk_rope_head_dim;
  shape.V = c.v_head_dim;
  shape.L = c.kv_lora_rank;
  shape.q_rank = c.q_lora_rank;
  if (moe) {
    shape.I = c.moe_intermediate_size;
    shape.E = c.num_experts;
    shape.S = c.num_shared_experts;
    shape.K = c.num_experts_per_tok;
  }
  shape.max_decode_rows = decode_capacity(limits);
  shape.max_mlp_rows = std::min<int64_t>(limits.max_rows, kMlpSlice);
  shape.max_splits = split_capacity(limits);
  shape.max_samples = limits.max_seqs;
  return shape;
}

size_t cache_bytes_per_token(const ModelConfig& c, DType dtype) {
  return static_cast<size_t>(c.num_layers) * static_cast<size_t>(c.kv_a_dim()) * size_of(dtype);
}

}  // namespace mla
