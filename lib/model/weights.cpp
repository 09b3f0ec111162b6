#include "lib/model/weights.h"

#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include "kernels/mix.h"
#include "lib/base/error.h"
#include "lib/model/weight_plan.h"

namespace mla {
namespace {

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
HostTensor part_of(HostTensor tensor, const WeightPiece& piece) {
  tensor.data = static_cast<const std::byte*>(tensor.data) +
                (piece.first_row * tensor.row_stride + piece.first_col) *
                    static_cast<int64_t>(size_of(tensor.dtype));
  tensor.rows = piece.rows;
  tensor.cols = piece.cols;
  return tensor;
}

// Rows that are too short, with zeros behind them, in `room`.
HostTensor widened(const HostTensor& part, int64_t cols, std::vector<std::byte>& room) {
  const size_t element = size_of(part.dtype), width = static_cast<size_t>(cols) * element;
  room.assign(static_cast<size_t>(part.rows) * width, std::byte{0});
  for (int64_t r = 0; r < part.rows; ++r)
    std::memcpy(room.data() + static_cast<size_t>(r) * width,
                static_cast<const std::byte*>(part.data) +
                    r * part.row_stride * static_cast<int64_t>(element),
                static_cast<size_t>(part.cols) * element);
  return {.data = room.data(),
          .dtype = part.dtype,
          .rows = part.rows,
          .cols = cols,
          .row_stride = cols};
}

// The widest dtype of a matrix's sources: one F32 tensor makes the whole matrix F32.
DType stored_dtype(const MatrixPlan& plan, const TensorSource& source) {
  for (const WeightPiece& piece : plan.pieces)
    if (source(piece.name).dtype != DType::bf16) return DType::f32;
  return DType::bf16;
}

uint64_t bytes_of(const WeightPiece& piece, DType dtype) {
  return static_cast<uint64_t>(piece.rows * piece.cols) * size_of(dtype);
}

Matrix create(const MatrixPlan& plan, const ModelConfig& local, Backend& backend, DType stored) {
  return backend.create_matrix(plan.kind, plan.experts, plan.rows, plan.cols, stored,
                               local.num_heads, local.qk_nope_head_dim);
}

}  // namespace

ModelWeights load_weights(const ModelConfig& config, Rank rank, Backend& backend,
                          const TensorSource& source, const LoadProgress& progress) {
  const ModelConfig local = rank_config(config, rank.size);
  ModelWeights weights;
  const WeightPlan plan = plan_weights(config, rank, weights);
  uint64_t bytes = 0;
  for (const VectorPlan& vector : plan.vectors) {
    std::vector<float> values = floats_of(source(vector.name), vector.name, vector.size);
    // A bfloat16 run holds its weights in bfloat16.
    if (backend.dtype() == DType::bf16)
      for (float& x : values) x = to_f32(to_bf16(x));
    void* data = backend.allocate(values.size() * sizeof(float), vector.name);
    backend.upload(data, values.data(), values.size() * sizeof(float));
    *vector.target = static_cast<const float*>(data);
    bytes += static_cast<uint64_t>(vector.size) * size_of(source(vector.name).dtype);
  }
  for (const MatrixPlan& matrix : plan.matrices) {
    *matrix.target = create(matrix, local, backend, stored_dtype(matrix, source));
    std::vector<std::vector<std::byte>> rooms;  // until finish_matrix
    try {
      for (const WeightPiece& piece : matrix.pieces) {
        HostTensor part = part_of(source(piece.name), piece);
        if (part.cols < matrix.cols) part = widened(part, matrix.cols, rooms.emplace_back());
        backend.set_rows(*matrix.target, piece.expert, piece.row_begin, part);
        bytes += bytes_of(piece, part.dtype);
        if (progress) progress(bytes);
      }
    } catch (...) {  // what is on its way still reads the rooms
      try {
        backend.finish_matrix(*matrix.target);
      } catch (...) {  // the first failure is the one to tell
      }
      throw;
    }
    backend.finish_matrix(*matrix.target);
  }
  return weights;
}

namespace {

constexpr float kDummyDeviation = 0.02f;  // initializer_range of the released models

// For backends that do not fill a matrix themselves. Box-Muller on a hash of the place.
void set_normal(Backend& backend, const Matrix& m, const WeightPiece& piece,
                const NormalTensor& source) {
  std::vector<float> values(static_cast<size_t>(source.rows * m.cols));
  for (int64_t r = 0; r < source.rows; ++r)
    for (int64_t c = 0; c < source.cols; ++c) {
      const int64_t index = (source.first_row + r) * source.row_stride + source.first_col + c;
      const uint64_t bits =
          mix64(source.seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(index) + 1);
      const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
      const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
      values[static_cast<size_t>(r * m.cols + c)] = source.deviation *
                                                    std::sqrt(-2.0f * std::log(u)) *
                                                    std::cos(2.0f * std::numbers::pi_v<float> * v);
    }
  backend.set_rows(m, piece.expert, piece.row_begin,
                   {.data = values.data(),
                    .dtype = DType::f32,
                    .rows = source.rows,
                    .cols = m.cols,
                    .row_stride = m.cols});
}

}  // namespace

ModelWeights dummy_weights(const ModelConfig& config, Rank rank, Backend& backend, uint64_t seed,
                           const LoadProgress& progress) {
  const ModelConfig local = rank_config(config, rank.size);
  ModelWeights weights;
  const WeightPlan plan = plan_weights(config, rank, weights);
  for (const VectorPlan& vector : plan.vectors) {
    const std::vector<float> ones(static_cast<size_t>(vector.size), 1.0f);
    void* data = backend.allocate(ones.size() * sizeof(float), vector.name);
    backend.upload(data, ones.data(), ones.size() * sizeof(float));
    *vector.target = static_cast<const float*>(data);
  }
  uint64_t elements = 0;
  for (const MatrixPlan& matrix : plan.matrices) {
    Matrix& m = *matrix.target;
    m = create(matrix, local, backend, DType::bf16);
    for (const WeightPiece& piece : matrix.pieces) {
      const NormalTensor source{.seed = seed * 1000003 + piece.tensor,
                                .deviation = kDummyDeviation,
                                .first_row = piece.first_row,
                                .first_col = piece.first_col,
                                .rows = piece.rows,
                                .cols = piece.cols,
                                .row_stride = piece.tensor_cols};
      if (!backend.fill_normal(m, piece.expert, piece.row_begin, source))
        set_normal(backend, m, piece, source);
      elements += static_cast<uint64_t>(piece.rows * piece.cols);
      if (progress) progress(elements);
    }
    backend.finish_matrix(m);
  }
  return weights;
}

size_t weight_bytes(const ModelConfig& config, Rank rank, const Backend& backend, DType stored) {
  constexpr size_t kMost = size_t{1} << 62;  // a plan adds to it
  const ModelConfig local = rank_config(config, rank.size);
  ModelWeights weights;
  const WeightPlan plan = plan_weight_sizes(config, rank.size, weights);
  size_t bytes = 0;
  const auto add = [&](size_t more) {
    if (more > kMost - bytes) fail("weights: expected at most {} bytes a rank, found more", kMost);
    bytes += more;
  };
  for (const VectorPlan& vector : plan.vectors)
    add(static_cast<size_t>(vector.size) * sizeof(float));
  // A matrix alone stays far below: its sizes are those of a config that was read.
  for (const MatrixPlan& matrix : plan.matrices)
    add(backend.matrix_bytes(matrix.kind, matrix.experts, matrix.rows, matrix.cols, stored,
                             local.num_heads, local.qk_nope_head_dim));
  return bytes;
}

uint64_t source_bytes(const ModelConfig& config, Rank rank, const TensorSource& source) {
  ModelWeights weights;
  const WeightPlan plan = plan_weights(config, rank, weights);
  uint64_t bytes = 0;
  for (const VectorPlan& vector : plan.vectors)
    bytes += static_cast<uint64_t>(vector.size) * size_of(source(vector.name).dtype);
  for (const MatrixPlan& matrix : plan.matrices)
    for (const WeightPiece& piece : matrix.pieces)
      bytes += bytes_of(piece, source(piece.name).dtype);
  return bytes;
}

}  // namespace mla
