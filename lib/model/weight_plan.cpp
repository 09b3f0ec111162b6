#include "lib/model/weight_plan.h"

#include <unordered_map>

#include "lib/base/error.h"
#include "lib/model/tensor_table.h"

namespace mla {
namespace {

class Walk {
 public:
  Walk(const ModelConfig& config, Rank rank, ModelWeights& weights, bool with_pieces)
      : local_(rank_config(config, rank.size)), rank_(rank), with_pieces_(with_pieces) {
    if (with_pieces) table_ = tensor_table(config);
    for (size_t i = 0; i < table_.size(); ++i) places_.emplace(table_[i].name, i);
    const int64_t H = local_.hidden_size, vocab = local_.vocab_size;
    weights.layers.resize(static_cast<size_t>(local_.num_layers));
    matrix(weights.embedding, MatrixKind::embedding, vocab, H,
           {piece("model.embed_tokens.weight", vocab)});
    for (int32_t i = 0; i < local_.num_layers; ++i) {
      attention(weights.layers[static_cast<size_t>(i)], i);
      if (local_.is_moe(i)) {
        moe(weights.layers[static_cast<size_t>(i)], i);
      } else {
        dense(weights.layers[static_cast<size_t>(i)], i);
      }
    }
    vector(weights.final_norm, "model.norm.weight", H);
    const int64_t rows = rank_extent(vocab, rank.size);
    matrix(weights.lm_head, MatrixKind::linear, rows, H, {piece(lm_head_entry(config), rows)});
  }

  WeightPlan take() { return std::move(plan_); }

 private:
  // Where a piece goes, and of a tensor that is `parts` equal ones along its axis, which of them.
  struct To {
    int64_t row_begin = 0, expert = 0;
    int64_t part = 0, parts = 1;
  };

  // The rank's share; `extent`: of the matrix, along the axis that is cut, or rows of a whole one.
  WeightPiece piece(const TensorEntry& tensor, int64_t extent, To to) const {
    if (!with_pieces_) return {};
    WeightPiece p{.name = tensor.name,
                  .expert = to.expert,
                  .row_begin = to.row_begin,
                  .rows = tensor.shape[0],
                  .cols = tensor.shape[1],
                  .tensor = places_.at(tensor.name),
                  .tensor_cols = tensor.shape[1]};
    if (tensor.shard == ShardAxis::none) {
      if (p.rows != extent || to.parts != 1)
        fail("{}: expected {} whole rows, the table has {}", tensor.name, extent, p.rows);
      return p;
    }
    const bool by_rows = tensor.shard == ShardAxis::rows;
    int64_t& first = by_rows ? p.first_row : p.first_col;
    int64_t& count = by_rows ? p.rows : p.cols;
    const int64_t whole = count / to.parts;
    const RankPart part = rank_part(whole, extent, rank_);
    first = to.part * whole + part.begin;
    count = part.count;
    return p;
  }
  WeightPiece piece(const TensorEntry& tensor, int64_t extent) const {
    return piece(tensor, extent, To{});
  }
  WeightPiece piece(const std::string& name, int64_t extent, To to) const {
    return with_pieces_ ? piece(table_[places_.at(name)], extent, to) : WeightPiece{};
  }
  WeightPiece piece(const std::string& name, int64_t extent) const {
    return piece(name, extent, To{});
  }

  void matrix(Matrix& target, MatrixKind kind, int64_t rows, int64_t cols,
              std::vector<WeightPiece> pieces, int64_t experts = 1) {
    std::erase_if(pieces, [](const WeightPiece& p) { return p.rows == 0 || p.cols == 0; });
    plan_.matrices.push_back({&target, kind, experts, rows, cols, std::move(pieces)});
  }
  void vector(const float*& target, std::string name, int64_t size) {
    plan_.vectors.push_back({&target, std::move(name), size});
  }

  void attention(LayerWeights& w, int32_t i) {
    const std::string layer = fmt::format("model.layers.{}.", i), attn = layer + "self_attn.";
    const ModelConfig& c = local_;
    const int64_t H = c.hidden_size, q_rank = c.q_lora_rank;
    const int64_t A = q_rank ? q_rank : c.q_dim(), V = int64_t{c.num_heads} * c.v_head_dim;
    vector(w.input_norm, layer + "input_layernorm.weight", H);
    matrix(w.qkv_a, MatrixKind::linear, A + c.kv_a_dim(), H,
           {piece(attn + (q_rank ? "q_a_proj.weight" : "q_proj.weight"), A),
            piece(attn + "kv_a_proj_with_mqa.weight", c.kv_a_dim(), {.row_begin = A})});
    if (q_rank) {
      vector(w.q_a_norm, attn + "q_a_layernorm.weight", q_rank);
      matrix(w.q_b, MatrixKind::linear, c.q_dim(), q_rank,
             {piece(attn + "q_b_proj.weight", c.q_dim())});
    }
    vector(w.kv_a_norm, attn + "kv_a_layernorm.weight", c.kv_lora_rank);
    matrix(w.kv_b, MatrixKind::kv_b, c.kv_b_dim(), c.kv_lora_rank,
           {piece(attn + "kv_b_proj.weight", c.kv_b_dim())});
    matrix(w.o, MatrixKind::linear, H, V, {piece(attn + "o_proj.weight", V)});
    vector(w.post_attention_norm, layer + "post_attention_layernorm.weight", H);
  }

  void dense(LayerWeights& w, int32_t i) {
    const std::string mlp = fmt::format("model.layers.{}.mlp.", i);
    const int64_t H = local_.hidden_size, I = local_.intermediate_size;
    matrix(
        w.gate_up, MatrixKind::gate_up, 2 * I, H,
        {piece(mlp + "gate_proj.weight", I), piece(mlp + "up_proj.weight", I, {.row_begin = I})});
    matrix(w.down, MatrixKind::linear, H, I, {piece(mlp + "down_proj.weight", I)});
  }

  void moe(LayerWeights& w, int32_t i) {
    const std::string mlp = fmt::format("model.layers.{}.mlp.", i);
    const int64_t H = local_.hidden_size, I = local_.moe_intermediate_size;
    const int64_t E = local_.num_experts, S = local_.num_shared_experts;
    matrix(w.router, MatrixKind::linear, E, H, {piece(mlp + "gate.weight", E)});
    ExpertPieces pieces;
    if (with_pieces_) pieces = expert_pieces(mlp);
    matrix(w.experts_gate_up, MatrixKind::gate_up, 2 * I, H, std::move(pieces.gate_up), E + S);
    matrix(w.experts_down, MatrixKind::linear, H, I, std::move(pieces.down), E + S);
  }

  struct ExpertPieces {
    std::vector<WeightPiece> gate_up, down;
  };
  ExpertPieces expert_pieces(const std::string& mlp) const {
    const int64_t I = local_.moe_intermediate_size;
    const int64_t E = local_.num_experts, S = local_.num_shared_experts;
    ExpertPieces pieces;
    const auto expert = [&](const std::string& at, To to) {
      To up = to;
      up.row_begin = I;
      pieces.gate_up.push_back(piece(at + "gate_proj.weight", I, to));
      pieces.gate_up.push_back(piece(at + "up_proj.weight", I, up));
      pieces.down.push_back(piece(at + "down_proj.weight", I, to));
    };
    for (int64_t e = 0; e < E; ++e) expert(fmt::format("{}experts.{}.", mlp, e), {.expert = e});
    // One MLP of width S·I is S experts, each of which is cut.
    for (int64_t s = 0; s < S; ++s)
      expert(mlp + "shared_experts.", {.expert = E + s, .part = s, .parts = S});
    return pieces;
  }

  const ModelConfig local_;
  const Rank rank_;
  const bool with_pieces_;
  std::vector<TensorEntry> table_;  // empty without pieces
  std::unordered_map<std::string, size_t> places_;
  WeightPlan plan_;
};

}  // namespace

WeightPlan plan_weights(const ModelConfig& config, Rank rank, ModelWeights& weights) {
  return Walk(config, rank, weights, true).take();
}

WeightPlan plan_weight_sizes(const ModelConfig& config, int32_t ranks, ModelWeights& weights) {
  return Walk(config, {.size = ranks}, weights, false).take();
}

}  // namespace mla
