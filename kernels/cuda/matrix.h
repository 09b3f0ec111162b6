// Weights on the device: bf16, row-major, rows of `cols` elements without gaps.
//   gate_up   gate and up interleaved by 8 rows: 16j … 16j+7 are gate rows 8j … 8j+7, then up's;
//             so a thread of a product holds both of a column, in either operand order
//   kv_b      as stored; then, for the absorbed path, W_UK transposed: [N][L][P]
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/ops.h"

namespace mla::cuda {

// Throws Error for sizes that the kernels do not take.
size_t matrix_bytes(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols);

// Where rows of a source go: `groups` groups of `rows` rows, `pitch` rows apart, from `to` on.
struct Placement {
  void* to;
  int64_t groups, rows, pitch;
};
// Of rows [row_begin, row_begin + rows) of one expert, which are gate or up rows, not both, and in
// whole groups of 8 where the kind is gate_up. Throws Error where they do not fit the matrix.
Placement placement(const Matrix& matrix, int64_t expert, int64_t row_begin, int64_t rows,
                    int64_t cols);

// kv_b's W_UK, transposed per head.
void transpose_uk(const Matrix& kv_b, cudaStream_t stream);

// The source's values, rounded to bf16: a hash of its seed and the index in the whole tensor. Rows
// of `cols` elements, of which those past the source's columns stay as they are.
void fill_normal(const Placement& to, int64_t cols, const NormalTensor& source,
                 cudaStream_t stream);
// `count` of them without gaps.
void fill_normal(void* to, int64_t count, uint64_t seed, float deviation, cudaStream_t stream);

}  // namespace mla::cuda
