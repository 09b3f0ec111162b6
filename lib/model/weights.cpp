#include "lib/model/weights.h"

#include <cstring>
#include <random>
#include <vector>

#include "lib/base/error.h"

namespace mla {
namespace {

// A matrix to be: its form, and the tensors that fill it.
struct Piece {
  std::string name;
  int64_t expert = 0;
  int64_t row_begin = 0;
  // The columns [col_begin, col_begin + cols) and rows [source_row, source_row + rows) of the
  // tensor.
  int64_t source_row = 0, col_begin = 0, rows = 0;
};

struct MatrixPlan {
  Matrix* target;
  MatrixKind kind;
  int64_t experts, rows, cols;
  std::vector<Piece> pieces;
};

struct VectorPlan {
  const float** target;
  std::string name;
  int64_t size;
};

// The walk over the model: every matrix and vector with its sources. Loading and counting share it.
class Walk {
 public:
  Walk(const ModelConfig& config, ModelWeights& weights) : c_(config) {
    weights.layers.resize(static_cast<size_t>(c_.num_layers));
    matrix(weights.embedding, MatrixKind::embedding, c_.vocab_size, c_.hidden_size,
           {whole("model.embed_tokens.weight", c_.vocab_size)});
    for (int32_t i = 0; i < c_.num_layers; ++i) {
      attention(weights.layers[static_cast<size_t>(i)], i);
      if (c_.is_moe(i)) {
        moe(weights.layers[static_cast<size_t>(i)], i);
      } else {
        dense(weights.layers[static_cast<size_t>(i)], i);
      }
    }
    vector(weights.final_norm, "model.norm.weight", c_.hidden_size);
    const char* head = c_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
    matrix(weights.lm_head, MatrixKind::linear, c_.vocab_size, c_.hidden_size,
           {whole(head, c_.vocab_size)});
  }

  const std::vector<MatrixPlan>& matrices() const { return matrices_; }
  const std::vector<VectorPlan>& vectors() const { return vectors_; }

 private:
  static Piece whole(std::string name, int64_t rows, int64_t row_begin = 0, int64_t expert = 0) {
    return {.name = std::move(name), .expert = expert, .row_begin = row_begin, .rows = rows};
  }
  void matrix(Matrix& target, MatrixKind kind, int64_t rows, int64_t cols,
              std::vector<Piece> pieces, int64_t experts = 1) {
    matrices_.push_back({&target, kind, experts, rows, cols, std::move(pieces)});
  }
  void vector(const float*& target, std::string name, int64_t size) {
    vectors_.push_back({&target, std::move(name), size});
  }

  void attention(LayerWeights& w, int32_t i) {
    const std::string layer = fmt::format("model.layers.{}.", i), attn = layer + "self_attn.";
    const int64_t H = c_.hidden_size, q_rank = c_.q_lora_rank;
    const int64_t A = q_rank ? q_rank : c_.q_dim();
    vector(w.input_norm, layer + "input_layernorm.weight", H);
    matrix(w.qkv_a, MatrixKind::linear, A + c_.kv_a_dim(), H,
           {whole(attn + (q_rank ? "q_a_proj.weight" : "q_proj.weight"), A),
            whole(attn + "kv_a_proj_with_mqa.weight", c_.kv_a_dim(), A)});
    if (q_rank) {
      vector(w.q_a_norm, attn + "q_a_layernorm.weight", q_rank);
      matrix(w.q_b, MatrixKind::linear, c_.q_dim(), q_rank,
             {whole(attn + "q_b_proj.weight", c_.q_dim())});
    }
    vector(w.kv_a_norm, attn + "kv_a_layernorm.weight", c_.kv_lora_rank);
    matrix(w.kv_b, MatrixKind::kv_b, c_.kv_b_dim(), c_.kv_lora_rank,
           {whole(attn + "kv_b_proj.weight", c_.kv_b_dim())});
    matrix(w.o, MatrixKind::linear, H, int64_t{c_.num_heads} * c_.v_head_dim,
           {whole(attn + "o_proj.weight", H)});
    vector(w.post_attention_norm, layer + "post_attention_layernorm.weight", H);
  }

  void dense(LayerWeights& w, int32_t i) {
    const std::string mlp = fmt::format("model.layers.{}.mlp.", i);
    const int64_t H = c_.hidden_size, I = c_.intermediate_size;
    matrix(w.gate_up, MatrixKind::gate_up, 2 * I, H,
           {whole(mlp + "gate_proj.weight", I), whole(mlp + "up_proj.weight", I, I)});
    matrix(w.down, MatrixKind::linear, H, I, {whole(mlp + "down_proj.weight", H)});
  }

  void moe(LayerWeights& w, int32_t i) {
    const std::string mlp = fmt::format("model.layers.{}.mlp.", i);
    const int64_t H = c_.hidden_size, I = c_.moe_intermediate_size, E = c_.num_experts;
    matrix(w.router, MatrixKind::linear, E, H, {whole(mlp + "gate.weight", E)});
    std::vector<Piece> gate_up, down;
    for (int64_t e = 0; e < E; ++e) {
      const std::string expert = fmt::format("{}experts.{}.", mlp, e);
      gate_up.push_back(whole(expert + "gate_proj.weight", I, 0, e));
      gate_up.push_back(whole(expert + "up_proj.weight", I, I, e));
      down.push_back(whole(expert + "down_proj.weight", H, 0, e));
    }
    for (int64_t s = 0; s < c_.num_shared_experts; ++s) {
      const std::string shared = mlp + "shared_experts.";
      const Piece part{.expert = E + s, .source_row = s * I, .rows = I};
      gate_up.push_back(part);
      gate_up.back().name = shared + "gate_proj.weight";
      gate_up.push_back(part);
      gate_up.back().name = shared + "up_proj.weight";
      gate_up.back().row_begin = I;
      down.push_back(
          {.name = shared + "down_proj.weight", .expert = E + s, .col_begin = s * I, .rows = H});
    }
    const int64_t experts = E + c_.num_shared_experts;
    matrix(w.experts_gate_up, MatrixKind::gate_up, 2 * I, H, std::move(gate_up), experts);
    matrix(w.experts_down, MatrixKind::linear, H, I, std::move(down), experts);
  }

  const ModelConfig& c_;
  std::vector<MatrixPlan> matrices_;
  std::vector<VectorPlan> vectors_;
};

std::vector<float> floats_of(const HostTensor& tensor, const std::string& name, int64_t size) {
  if (tensor.rows * tensor.cols != size)
    fail("{}: expected {} elements, found {}", name, size, tensor.rows * tensor.cols);
  std::vector<float> values(static_cast<size_t>(size));
  const auto* bytes = static_cast<const std::byte*>(tensor.data);
  for (size_t i = 0; i < values.size(); ++i) {
    if (tensor.dtype == DType::f32) {
      std::memcpy(&values[i], bytes + i * 4, 4);
      continue;
    }
    uint16_t bits;
    std::memcpy(&bits, bytes + i * 2, 2);
    values[i] = tensor.dtype == DType::bf16 ? to_f32(bf16{bits}) : f16_to_f32(bits);
  }
  return values;
}

// The part of a tensor that a piece names.
HostTensor part_of(HostTensor tensor, const Piece& piece, int64_t cols) {
  tensor.data = static_cast<const std::byte*>(tensor.data) +
                (piece.source_row * tensor.row_stride + piece.col_begin) *
                    static_cast<int64_t>(size_of(tensor.dtype));
  tensor.rows = piece.rows;
  tensor.cols = cols;
  return tensor;
}

// The widest dtype of a matrix's sources: one F32 tensor makes the whole matrix F32.
DType stored_dtype(const MatrixPlan& plan, const TensorSource& source) {
  for (const Piece& piece : plan.pieces)
    if (source(piece.name).dtype != DType::bf16) return DType::f32;
  return DType::bf16;
}

}  // namespace

ModelWeights load_weights(const ModelConfig& config, Backend& backend, const TensorSource& source,
                          const LoadProgress& progress) {
  ModelWeights weights;
  const Walk walk(config, weights);
  uint64_t bytes = 0;
  for (const VectorPlan& plan : walk.vectors()) {
    std::vector<float> values = floats_of(source(plan.name), plan.name, plan.size);
    // A bfloat16 run holds its weights in bfloat16.
    if (backend.dtype() == DType::bf16)
      for (float& x : values) x = to_f32(to_bf16(x));
    void* data = backend.allocate(values.size() * sizeof(float), plan.name);
    backend.upload(data, values.data(), values.size() * sizeof(float));
    *plan.target = static_cast<const float*>(data);
    bytes += static_cast<uint64_t>(plan.size) * size_of(source(plan.name).dtype);
  }
  for (const MatrixPlan& plan : walk.matrices()) {
    *plan.target = backend.create_matrix(plan.kind, plan.experts, plan.rows, plan.cols,
                                         stored_dtype(plan, source), config.num_heads,
                                         config.qk_nope_head_dim);
    for (const Piece& piece : plan.pieces) {
      const HostTensor part = part_of(source(piece.name), piece, plan.cols);
      backend.set_rows(*plan.target, piece.expert, piece.row_begin, part);
      bytes += static_cast<uint64_t>(part.rows * part.cols) * size_of(part.dtype);
      if (progress) progress(bytes);
    }
    backend.finish_matrix(*plan.target);
  }
  return weights;
}

namespace {

constexpr float kDummyDeviation = 0.02f;  // initializer_range of the released models

// For backends that do not fill a matrix themselves. A gate_up matrix takes its halves one by one.
void fill_rows(Backend& backend, const Matrix& m, uint64_t seed) {
  const int64_t halves = m.kind == MatrixKind::gate_up ? 2 : 1, rows = m.rows / halves;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, kDummyDeviation);
  std::vector<float> values(static_cast<size_t>(rows * m.cols));
  for (int64_t piece = 0; piece < m.experts * halves; ++piece) {
    for (float& x : values) x = normal(random);
    backend.set_rows(m, piece / halves, piece % halves * rows,
                     {.data = values.data(),
                      .dtype = DType::f32,
                      .rows = rows,
                      .cols = m.cols,
                      .row_stride = m.cols});
  }
}

}  // namespace

ModelWeights dummy_weights(const ModelConfig& config, Backend& backend, uint64_t seed) {
  ModelWeights weights;
  const Walk walk(config, weights);
  for (const VectorPlan& plan : walk.vectors()) {
    const std::vector<float> ones(static_cast<size_t>(plan.size), 1.0f);
    void* data = backend.allocate(ones.size() * sizeof(float), plan.name);
    backend.upload(data, ones.data(), ones.size() * sizeof(float));
    *plan.target = static_cast<const float*>(data);
  }
  uint64_t index = 0;
  for (const MatrixPlan& plan : walk.matrices()) {
    Matrix& m = *plan.target;
    m = backend.create_matrix(plan.kind, plan.experts, plan.rows, plan.cols, DType::bf16,
                              config.num_heads, config.qk_nope_head_dim);
    const uint64_t own_seed = seed * 1000003 + index++;
    if (!backend.fill_normal(m, own_seed, kDummyDeviation)) fill_rows(backend, m, own_seed);
    backend.finish_matrix(m);
  }
  return weights;
}

size_t weight_bytes(const ModelConfig& config, const Backend& backend, DType stored) {
  ModelWeights weights;
  const Walk walk(config, weights);
  size_t bytes = 0;
  for (const VectorPlan& plan : walk.vectors())
    bytes += static_cast<size_t>(plan.size) * sizeof(float);
  for (const MatrixPlan& plan : walk.matrices())
    bytes += backend.matrix_bytes(plan.kind, plan.experts, plan.rows, plan.cols, stored,
                                  config.num_heads, config.qk_nope_head_dim);
  return bytes;
}

}  // namespace mla
