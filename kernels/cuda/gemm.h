// The matrix products of the model: out = A·Wᵀ, bf16 operands, fp32 accumulation.
//
// Two kernels serve every shape. gemm_tile (gemm_tile.cu) takes 128 rows of A by 256 rows of W and
// is for many rows; gemm_stream (gemm_stream.cu) takes 64 rows of W by 8 to 128 rows of A, W being
// the first operand, and is for few rows, where reading W is all the time. Both add K in order in
// steps of 16 in one accumulator, without splits, so an output has the same bits from either, for
// every number of rows (Hopper's wgmma gives the same bits for every N and with its operands
// swapped; tests/ops/cuda_gemm_test.cpp asserts it).
#pragma once

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace mla::cuda {

enum class Epilogue {
  bf16,  // out bf16
  f32,   // out fp32
  silu,  // W's rows are gate and up interleaved by 8: out = SiLU(gate)·up, bf16, half as many
         // columns
};

// Which rows of A meet which matrix, and where their outputs go. Device pointers.
struct GemmRows {
  enum class Mode { uniform, grouped, pages } mode = Mode::uniform;
  int32_t T = 0;  // uniform: rows of every matrix. grouped: tokens

  // grouped: matrix e < routed has A rows [begin[e], begin[e+1]), matrix routed + s the T rows from
  // shared_row + s·T of A, or of `a_shared` where that is given (then from row 0).
  int32_t routed = 0;
  const int32_t* begin = nullptr;  // [routed + 1]
  int32_t shared_row = 0;
  // Output row of A row i: i, or with `slots` slots[i]; of row t of shared matrix s: A's row, or
  // with `slots` t·slots_per_token + slots_per_token - num_shared + s.
  const int32_t* slots = nullptr;
  int32_t slots_per_token = 0, num_shared = 0;

  // pages: A is the cache; a tile of 128 keys is two pages. Output row: the workspace row.
  const WorkTile* tiles = nullptr;
  int32_t num_tiles = 0;
  const KeySpan* spans = nullptr;
  const PrefillSpan* prefill = nullptr;
  const int32_t* page_table = nullptr;
};

struct Gemm {
  // A [a_rows, a_cols], rows a_stride elements apart. Matrix e reads columns [e·a_step, … + k); k
  // is a multiple of 128 where a_step is not 0, as the last stage reads on.
  const void* a = nullptr;
  const void* a_shared = nullptr;  // grouped: [T, k], see GemmRows
  int64_t a_rows = 0, a_cols = 0, a_stride = 0, a_step = 0;
  // W [matrices][n, k], rows w_stride and matrices w_matrix_stride elements apart.
  const void* w = nullptr;
  int64_t matrices = 1, n = 0, k = 0, w_stride = 0, w_matrix_stride = 0;
  // out: rows out_stride elements apart; matrix e writes from column e·out_step.
  void* out = nullptr;
  int64_t out_stride = 0, out_step = 0;
  Epilogue epilogue = Epilogue::bf16;
  GemmRows rows;
};

// Chooses the kernel by the number of rows. n, k and all strides are multiples of 8 elements.
void gemm(const Gemm&, Launch);

void gemm_tile(const Gemm&, Launch);
// tokens: 8, 16, 32, 64 or 128 rows of A a job. Not for Mode::pages.
void gemm_stream(const Gemm&, int tokens, Launch);

}  // namespace mla::cuda
