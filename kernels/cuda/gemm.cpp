#include "kernels/cuda/gemm.h"

#include <algorithm>

namespace mla::cuda {
namespace {

// The smallest tile of tokens that holds `rows`, at most 128.
int token_tile(int64_t rows) {
  int tile = 8;
  while (tile < rows && tile < 128) tile *= 2;
  return tile;
}

}  // namespace

void gemm(const Gemm& g, Launch to) {
  const int64_t T = g.rows.T;
  switch (g.rows.mode) {
    case GemmRows::Mode::pages:
      if (g.rows.num_tiles > 0) gemm_tile(g, to);
      return;
    case GemmRows::Mode::grouped:
      if (T == 0) return;
      // Rows of an expert on average, and half as many again for those above it.
      if (T >= 512) return gemm_tile(g, to);
      return gemm_stream(
          g, token_tile(3 * T * (g.rows.slots_per_token - g.rows.num_shared) / (2 * g.rows.routed)),
          to);
    case GemmRows::Mode::uniform:
      if (T == 0) return;
      const int64_t tiles = (T + 127) / 128 * ((g.n + 255) / 256) * g.matrices;
      // A tile of 256 rows of W is wasted on a narrow W, and too few tiles leave multiprocessors
      // idle.
      if (T <= 128 || g.n <= 128 || tiles < to.sms * 3 / 4)
        return gemm_stream(g, token_tile(T), to);
      return gemm_tile(g, to);
  }
}

}  // namespace mla::cuda
