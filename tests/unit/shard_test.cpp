// What a rank has of a model: sizes, and which part of which tensor.
#include "lib/model/shard.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>

#include "kernels/cpu/cpu_backend.h"
#include "lib/base/error.h"
#include "lib/model/tensor_table.h"
#include "lib/model/weight_plan.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/lite_config.h"

namespace mla::shard_test {
namespace {

using test::error_text;

// One dense layer and one of a few experts.
ModelConfig lite() {
  ModelConfig c = test::lite_config();
  c.num_layers = 2;
  c.num_experts = 3;
  c.num_experts_per_tok = 2;
  return c;
}

ModelConfig odd(const std::string& name) {
  return load_config(test::source_path("tests/data/expected/" + name));
}

TEST_CASE("A rank has room for its share up to a multiple of 16 and a single rank for all") {
  CHECK(rank_extent(1408, 1) == 1408);
  CHECK(rank_extent(28, 1) == 28);
  CHECK(rank_extent(1408, 2) == 704);
  CHECK(rank_extent(1408, 8) == 176);
  CHECK(rank_extent(1408, 16) == 96);  // 88
  CHECK(rank_extent(10944, 2) == 5472);
  CHECK(rank_extent(10944, 8) == 1376);  // 1368
  CHECK(rank_extent(102400, 8) == 12800);
  CHECK(rank_extent(28, 3) == 16);
  CHECK(rank_extent(1, 4) == 16);
}

TEST_CASE("The shares of ranks follow each other and cover all of it") {
  for (const int64_t total : {1, 15, 16, 17, 28, 96, 1408, 10944, 102400, 129280})
    for (const int32_t size : {1, 2, 3, 4, 8, 16}) {
      const int64_t extent = rank_extent(total, size);
      int64_t next = 0;
      for (int32_t index = 0; index < size; ++index) {
        const RankPart part = rank_part(total, extent, {index, size});
        INFO(total << " over " << size << ", rank " << index);
        CHECK(part.begin == next);
        CHECK(part.count >= 0);
        CHECK(part.count <= extent);
        next += part.count;
      }
      CHECK(next == total);
    }
  const RankPart last = rank_part(10944, rank_extent(10944, 8), {7, 8});
  CHECK(last.begin == 7 * 1376);
  CHECK(last.count == 1312);
  const RankPart none = rank_part(28, 16, {2, 3});  // 16, 12 and nothing
  CHECK(none.count == 0);
}

TEST_CASE("A rank's config has its heads and widths and the whole vocabulary and cache") {
  const ModelConfig whole = lite(), two = rank_config(whole, 2), eight = rank_config(whole, 8);
  CHECK(two.num_heads == 8);
  CHECK(two.moe_intermediate_size == 704);
  CHECK(two.intermediate_size == 5472);
  CHECK(two.vocab_size == 102400);
  CHECK(two.kv_a_dim() == whole.kv_a_dim());
  CHECK(two.hidden_size == 2048);
  CHECK(eight.num_heads == 2);
  CHECK(eight.moe_intermediate_size == 176);
  CHECK(eight.intermediate_size == 1376);
  const ModelConfig one = rank_config(odd("odd_plain"), 1);
  CHECK(one.num_heads == 3);
  CHECK(one.moe_intermediate_size == 28);
  CHECK(one.intermediate_size == 84);
}

TEST_CASE("A size that does not divide the heads is refused with those that do") {
  for (const int32_t size : {1, 2, 4, 8, 16}) CHECK_NOTHROW(check_tensor_parallel(lite(), size));
  CHECK(error_text([] { check_tensor_parallel(lite(), 3); }) ==
        "--tensor-parallel-size: expected a size that divides the model's num_attention_heads 16 "
        "(1, 2, 4, 8, 16), found 3");
  for (const int32_t size : {-2, 0, 5, 32})
    CHECK_THROWS_AS(check_tensor_parallel(lite(), size), UsageError);
  CHECK_NOTHROW(check_tensor_parallel(odd("odd_plain"), 3));
}

// Elements of every tensor that the pieces of all ranks read; a rectangle read twice by ranks that
// should share is found by its corner or by the sum.
void check_cover(const ModelConfig& config, int32_t size) {
  std::map<std::string, std::vector<WeightPiece>> pieces;
  std::map<std::string, int> vectors;
  for (int32_t index = 0; index < size; ++index) {
    ModelWeights weights;
    const WeightPlan plan = plan_weights(config, {index, size}, weights);
    for (const MatrixPlan& matrix : plan.matrices)
      for (const WeightPiece& piece : matrix.pieces) {
        INFO(piece.name << " rank " << index << " of " << size);
        CHECK(piece.row_begin + piece.rows <= matrix.rows);
        CHECK(piece.cols <= matrix.cols);
        CHECK(piece.expert < matrix.experts);
        pieces[piece.name].push_back(piece);
      }
    for (const VectorPlan& vector : plan.vectors) ++vectors[vector.name];
  }
  for (const TensorEntry& entry : tensor_table(config)) {
    INFO(entry.name << " over " << size);
    if (entry.shape.size() == 1) {
      CHECK(vectors[entry.name] == size);
      continue;
    }
    std::vector<WeightPiece>& of = pieces[entry.name];
    const int64_t rows = entry.shape[0], cols = entry.shape[1];
    const bool tied_head = config.tie_word_embeddings && entry.name == "model.embed_tokens.weight";
    int64_t whole = 0, area = 0;
    std::set<std::tuple<int64_t, int64_t>> corners;
    for (const WeightPiece& p : of) {
      CHECK(p.tensor_cols == cols);
      CHECK(tensor_table(config)[p.tensor].name == entry.name);
      CHECK(p.first_row + p.rows <= rows);
      CHECK(p.first_col + p.cols <= cols);
      if (entry.shard == ShardAxis::none && p.rows == rows && whole < size) {
        ++whole;
        continue;
      }
      area += p.rows * p.cols;
      CHECK(corners.emplace(p.first_row, p.first_col).second);
      CHECK((entry.shard == ShardAxis::columns ? p.rows == rows : p.cols == cols));
    }
    CHECK(whole == (entry.shard == ShardAxis::none ? size : 0));
    CHECK(area == (entry.shard == ShardAxis::none && !tied_head ? 0 : rows * cols));
    // One behind the other.
    std::sort(of.begin(), of.end(), [](const WeightPiece& a, const WeightPiece& b) {
      return std::tuple(a.first_row, a.first_col) < std::tuple(b.first_row, b.first_col);
    });
    if (entry.shard == ShardAxis::none) continue;
    for (size_t i = 1; i < of.size(); ++i)
      CHECK((entry.shard == ShardAxis::rows
                 ? of[i].first_row == of[i - 1].first_row + of[i - 1].rows
                 : of[i].first_col == of[i - 1].first_col + of[i - 1].cols));
  }
}

TEST_CASE("The ranks together read every element of what is cut once and the rest each") {
  for (const int32_t size : {2, 4, 8, 16}) check_cover(lite(), size);
  for (const char* name : {"odd_plain", "odd_groups"}) check_cover(odd(name), 3);
  for (const char* name : {"lite_yarn", "lite_groups", "lite_dense"}) check_cover(odd(name), 2);
}

TEST_CASE("Sizes without pieces are those of the plan of every rank") {
  for (const auto& [config, size] : {std::pair(lite(), 8),
                                     {odd("odd_groups"), 3},
                                     {odd("odd_tied"), 1},
                                     {odd("lite_dense"), 2}}) {
    ModelWeights weights, sizes;
    const WeightPlan want = plan_weights(config, {.index = size - 1, .size = size}, weights);
    const WeightPlan got = plan_weight_sizes(config, size, sizes);
    REQUIRE(got.matrices.size() == want.matrices.size());
    for (size_t i = 0; i < got.matrices.size(); ++i) {
      const MatrixPlan &a = got.matrices[i], &b = want.matrices[i];
      CHECK(a.pieces.empty());
      CHECK(std::tuple(a.kind, a.experts, a.rows, a.cols) ==
            std::tuple(b.kind, b.experts, b.rows, b.cols));
    }
    REQUIRE(got.vectors.size() == want.vectors.size());
    for (size_t i = 0; i < got.vectors.size(); ++i)
      CHECK(got.vectors[i].size == want.vectors[i].size);
  }
}

TEST_CASE("Weights that no 64 bits count are refused") {
  ModelConfig config = lite();
  const auto backend = make_cpu_backend(DType::bf16, 1);
  config.num_layers = config.num_experts = 4096;
  CHECK(weight_bytes(config, {}, *backend, DType::bf16) > (uint64_t{1} << 47));
  config.hidden_size = config.moe_intermediate_size = 1 << 20;
  CHECK(error_text([&] { weight_bytes(config, {}, *backend, DType::bf16); }) ==
        "weights: expected at most 4611686018427387904 bytes a rank, found more");
}

// Reads what set_rows gets when the matrix is finished, as a device with upload threads may.
class LateBackend : public test::ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  void set_rows(const Matrix& matrix, int64_t expert, int64_t row_begin,
                const HostTensor& source) override {
    queued_.emplace_back([this, matrix, expert, row_begin, source] {
      ForwardingBackend::set_rows(matrix, expert, row_begin, source);
    });
  }
  void finish_matrix(Matrix& matrix) override {
    for (const auto& place : queued_) place();
    queued_.clear();
    ForwardingBackend::finish_matrix(matrix);
  }
  size_t queued() const { return queued_.size(); }

 private:
  std::vector<std::function<void()>> queued_;
};

TEST_CASE("A load that is stopped leaves nothing on its way") {
  const ModelConfig config = load_config(test::source_path("tests/data/tiny-random"));
  const std::vector<TensorEntry> table = tensor_table(config);
  std::vector<float> zeros;
  const TensorSource source = [&](const std::string& name) {
    const auto it = std::find_if(table.begin(), table.end(),
                                 [&](const TensorEntry& entry) { return entry.name == name; });
    const int64_t rows = it->shape.size() > 1 ? it->shape.front() : 1, cols = it->shape.back();
    zeros.resize(std::max(zeros.capacity(), static_cast<size_t>(rows * cols)));
    return HostTensor{zeros.data(), DType::f32, rows, cols, cols};
  };
  zeros.reserve(static_cast<size_t>(config.vocab_size * config.hidden_size));
  for (const int64_t pieces : {1, 2, 20}) {
    LateBackend backend(make_cpu_backend(DType::f32, 1));
    int64_t placed = 0;
    bool queued = false;
    const LoadProgress stop = [&](uint64_t) {
      queued = backend.queued() > 0;
      if (++placed == pieces) fail("loading was stopped");
    };
    CHECK(error_text([&] { load_weights(config, {}, backend, source, stop); }) ==
          "loading was stopped");
    CHECK(queued);
    CHECK(backend.queued() == 0);
  }
}

TEST_CASE("A single rank has every tensor whole") {
  for (const char* name : {"odd_plain", "odd_tied", "odd_groups", "lite_yarn"}) {
    check_cover(odd(name), 1);
    ModelWeights weights;
    const ModelConfig config = odd(name);
    for (const MatrixPlan& matrix : plan_weights(config, {}, weights).matrices)
      for (const WeightPiece& piece : matrix.pieces) CHECK(piece.cols == matrix.cols);
  }
}

TEST_CASE("Each shared expert is cut across the ranks") {
  ModelWeights weights;
  const WeightPlan plan = plan_weights(lite(), {.index = 1, .size = 8}, weights);
  std::vector<WeightPiece> gate, down;
  for (const MatrixPlan& matrix : plan.matrices)
    for (const WeightPiece& piece : matrix.pieces) {
      if (piece.name.ends_with("shared_experts.gate_proj.weight")) gate.push_back(piece);
      if (piece.name.ends_with("shared_experts.down_proj.weight")) down.push_back(piece);
    }
  REQUIRE(gate.size() == 2);
  REQUIRE(down.size() == 2);
  for (size_t s = 0; s < 2; ++s) {
    CHECK(gate[s].expert == 3 + static_cast<int64_t>(s));
    CHECK(gate[s].first_row == 1408 * static_cast<int64_t>(s) + 176);
    CHECK(gate[s].rows == 176);
    CHECK(down[s].first_col == 1408 * static_cast<int64_t>(s) + 176);
    CHECK(down[s].cols == 176);
    CHECK(down[s].rows == 2048);
  }
}

}  // namespace
}  // namespace mla::shard_test
