#include "kernels/cuda/gemm.h"

#include <algorithm>

#include "lib/base/error.h"

namespace mla::cuda {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest tile of tokens that holds `rows`, at most 128.
int token_tile(int64_t rows) {
  int tile = 8;
  while (tile < rows && tile < 128) tile *= 2;
  return tile;
}

// All numbers below were measured on an H200 (tests/bench/NOTES.md); the bits are the same anyway.

void uniform(const Gemm& g, Launch to) {
  const int64_t T = g.rows.T;
  const auto jobs = [&](int64_t rows, int64_t columns) {
    return ceil_div(T, rows) * ceil_div(g.n, columns) * g.matrices;
  };
  if (T > 128 && g.n > 128 && jobs(128, 256) >= to.sms * 3 / 4) return gemm_tile(g, to);
  // Reading a row of W again for the next tokens costs less than multiprocessors without a job.
  int tokens = token_tile(T);
  while (tokens > 32 && jobs(tokens, 64) < to.sms * 3 / 2) tokens /= 2;
  gemm_stream(g, tokens, to);
}

// Experts get T·K/E rows on average, the shared ones T.
void grouped(const Gemm& g, Launch to) {
  const int64_t rows =
      g.rows.T * int64_t{g.rows.slots_per_token - g.rows.num_shared} / g.rows.routed;
  if (rows >= 24) return gemm_tile(g, to);
  gemm_stream(g, rows >= 18 ? 64 : std::min(32, token_tile(g.rows.T)), to);
}

}  // namespace

void gemm(const Gemm& g, Launch to) {
  if (g.a_step != 0 && g.k % 128 != 0)
    fail("a product over columns of A: expected a multiple of 128 columns, found {}", g.k);
  switch (g.rows.mode) {
    case GemmRows::Mode::pages:
      if (g.rows.num_tiles > 0) gemm_tile(g, to);
      return;
    case GemmRows::Mode::grouped:
      if (g.rows.T > 0) grouped(g, to);
      return;
    case GemmRows::Mode::uniform:
      if (g.rows.T > 0) uniform(g, to);
      return;
  }
}

}  // namespace mla::cuda
