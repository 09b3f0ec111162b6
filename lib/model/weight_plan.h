// Which parts of which tensors become a rank's weights: loading, counting and random weights share
// this walk.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/model/shard.h"
#include "lib/model/weights.h"

namespace mla {

// Rows [row_begin, row_begin + rows) of matrix `expert` are [first_row, first_row + rows) of the
// tensor, columns [first_col, first_col + cols). `cols` may be fewer than the matrix has: the
// others are zero, and so are rows of the matrix that no piece fills.
struct WeightPiece {
  std::string name;
  int64_t expert = 0, row_begin = 0;
  int64_t first_row = 0, first_col = 0;
  int64_t rows = 0, cols = 0;  // both above 0
  size_t tensor = 0;           // its place in tensor_table
  int64_t tensor_cols = 0;
};

struct MatrixPlan {
  Matrix* target;
  MatrixKind kind;
  int64_t experts, rows, cols;
  std::vector<WeightPiece> pieces;
};

struct VectorPlan {
  const float** target;
  std::string name;
  int64_t size;
};

struct WeightPlan {
  std::vector<MatrixPlan> matrices;
  std::vector<VectorPlan> vectors;
};

// `config` is the whole model's. The targets are in `weights`, whose layers are made here.
WeightPlan plan_weights(const ModelConfig& config, Rank rank, ModelWeights& weights);

// The same without pieces, which are many where the experts are: what each of the ranks has room
// for.
WeightPlan plan_weight_sizes(const ModelConfig& config, int32_t ranks, ModelWeights& weights);

}  // namespace mla
