// The work list of a product: a job is one tile of rows of A by one tile of rows of W.
#pragma once

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/tensor_map.h"
#include "lib/base/error.h"

namespace mla::cuda {

// What the kernels need of a Gemm, beside its tensor maps.
struct GemmArgs {
  GemmRows rows;
  int32_t matrices, n, k, a_step;
  bool has_shared_map;
  void* out;
  int64_t out_stride, out_step;
};

inline GemmArgs gemm_args(const Gemm& g) {
  if (g.rows.mode == GemmRows::Mode::grouped && g.matrices > kMaxMatrices)
    fail("a grouped product takes at most {} matrices, found {}", kMaxMatrices, g.matrices);
  return {g.rows,
          static_cast<int32_t>(g.matrices),
          static_cast<int32_t>(g.n),
          static_cast<int32_t>(g.k),
          static_cast<int32_t>(g.a_step),
          g.a_shared != nullptr,
          g.out,
          g.out_stride,
          g.out_step};
}

struct GemmMaps {
  CUtensorMap a, a_shared, w;
};

inline GemmMaps gemm_maps(const Gemm& g, int a_box, int w_box) {
  const CUtensorMap a =
      tensor_map(g.a, g.a_cols, g.a_rows, 1, g.a_stride, g.a_rows * g.a_stride, a_box);
  return {a, g.a_shared ? tensor_map(g.a_shared, g.k, g.rows.T, 1, g.k, g.rows.T * g.k, a_box) : a,
          tensor_map(g.w, g.k, g.n, g.matrices, g.w_stride, g.w_matrix_stride, w_box)};
}

struct Job {
  int32_t a_row, a_row_64;  // A rows of the tile's first row and of its 64th
  int32_t a_column;
  bool shared_map;  // A rows are those of a_shared
  int32_t matrix;   // of W
  int32_t w_row;    // first
  int32_t rows;     // of A that count
  // Output row of row i of the tile: slots[out_row + i], or without slots out_row + i·out_step.
  const int32_t* slots;
  int64_t out_row;
  int32_t out_step;
};

// Decodes job numbers. Tiles of A have `TileA` rows, tiles of W `TileW`. Jobs of a matrix are
// neighbours; within it, 16 tiles of A go through all tiles of W before the next 16, so that what
// runs at one time shares both.
//
// Reads the rows' `begin` and tiles, which therefore have to be there before the kernel in front of
// this one, or that one settles its inputs (ptx.cuh): a product lists its jobs without waiting.
template <int TileA, int TileW>
class JobList {
 public:
  // Shared memory for Mode::grouped; filled by the first warp; the block must synchronise after.
  struct Storage {
    int32_t first_tile[kMaxMatrices + 1];  // of A, of each matrix
    int32_t begin[kMaxMatrices + 1];       // GemmRows::begin, up to `routed`
  };

  __device__ JobList(const GemmArgs& args, Storage& storage) : g_(args), s_(storage) {
    w_tiles_ = (g_.n + TileW - 1) / TileW;
    if (g_.rows.mode == GemmRows::Mode::grouped) {
      scan();
    }
  }

  // After the block has synchronised.
  __device__ int count() const { return a_tiles() * w_tiles_; }

  __device__ Job operator[](int job) const {
    switch (g_.rows.mode) {
      case GemmRows::Mode::uniform:
        return uniform(job);
      case GemmRows::Mode::grouped:
        return grouped(job);
      default:
        return pages(job);
    }
  }

 private:
  static constexpr int kBand = 16;

  __device__ int a_tiles() const {
    switch (g_.rows.mode) {
      case GemmRows::Mode::uniform:
        return g_.matrices * ((g_.rows.T + TileA - 1) / TileA);
      case GemmRows::Mode::grouped:
        return s_.first_tile[g_.matrices];
      default:
        return g_.rows.num_tiles;
    }
  }

  // One warp: counts of the matrices, and the prefix sum of their tiles.
  __device__ void scan() {
    if (threadIdx.x >= 32) return;
    const int lane = static_cast<int>(threadIdx.x);
    int sum = 0;
    for (int first = 0; first < g_.matrices; first += 32) {
      const int e = first + lane;
      int rows = 0;
      if (e < g_.rows.routed) {
        // Past the L1 cache, which may have those of the layer before.
        const int begin = __ldcg(g_.rows.begin + e), end = __ldcg(g_.rows.begin + e + 1);
        s_.begin[e] = begin;
        s_.begin[e + 1] = end;
        rows = end - begin;
      } else if (e < g_.matrices) {
        rows = g_.rows.T;
      }
      int tiles = (rows + TileA - 1) / TileA;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(~0u, tiles, step);
        if (lane >= step) tiles += left;
      }
      if (e < g_.matrices) s_.first_tile[e + 1] = sum + tiles;
      sum += __shfl_sync(~0u, tiles, 31);
    }
    if (lane == 0) s_.first_tile[0] = 0;
  }

  // Tile of A and of W of job `i` among those of a matrix with `a_tiles` tiles of A.
  __device__ void place(int i, int a_tiles, int& a_tile, int& w_tile) const {
    const int band = i / (kBand * w_tiles_), rest = i - band * kBand * w_tiles_;
    const int height = min(kBand, a_tiles - band * kBand);
    w_tile = rest / height;
    a_tile = band * kBand + rest - w_tile * height;
  }

  __device__ Job uniform(int job) const {
    const int per_matrix = (g_.rows.T + TileA - 1) / TileA, jobs = per_matrix * w_tiles_;
    const int matrix = job / jobs;
    int a_tile, w_tile;
    place(job - matrix * jobs, per_matrix, a_tile, w_tile);
    const int row = a_tile * TileA;
    return {row,
            row + 64,
            matrix * g_.a_step,
            false,
            matrix,
            w_tile * TileW,
            min(TileA, g_.rows.T - row),
            nullptr,
            row,
            1};
  }

  __device__ Job grouped(int job) const {
    int low = 0, high = g_.matrices;  // the matrix is in [low, high)
    const int tile = job / w_tiles_;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (s_.first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int first = s_.first_tile[low];
    int a_tile, w_tile;
    place(job - first * w_tiles_, s_.first_tile[low + 1] - first, a_tile, w_tile);
    const int row = a_tile * TileA;
    Job result{0, 0, 0, false, low, w_tile * TileW, 0, g_.rows.slots, 0, 1};
    if (low < g_.rows.routed) {
      const int begin = s_.begin[low];
      result.a_row = begin + row;
      result.rows = min(TileA, s_.begin[low + 1] - begin - row);
      result.out_row = begin + row;
    } else {
      const int shared = low - g_.rows.routed, base = g_.rows.shared_row + shared * g_.rows.T;
      result.shared_map = g_.has_shared_map;
      result.a_row = g_.has_shared_map ? row : base + row;
      result.rows = min(TileA, g_.rows.T - row);
      result.out_row = base + row;
      if (g_.rows.slots) {
        result.slots = nullptr;
        result.out_step = g_.rows.slots_per_token;
        result.out_row = int64_t{row} * g_.rows.slots_per_token + g_.rows.slots_per_token -
                         g_.rows.num_shared + shared;
      }
    }
    result.a_row_64 = result.a_row + 64;
    return result;
  }

  // A tile's keys past the span's end belong to nobody; a page that is not there is the first
  // again.
  __device__ Job pages(int job) const {
    int a_tile, w_tile;
    place(job, g_.rows.num_tiles, a_tile, w_tile);
    const WorkTile tile = g_.rows.tiles[a_tile];
    const KeySpan span = g_.rows.spans[tile.span];
    const int32_t* table = g_.rows.page_table + g_.rows.prefill[span.prefill].table_begin;
    const int page = tile.begin / kPageTokens;
    const int first = table[page] * kPageTokens;
    const bool second = tile.begin + kPageTokens < span.key_end;
    return {first,
            second ? table[page + 1] * kPageTokens : first,
            0,
            false,
            0,
            w_tile * TileW,
            min(TileA, span.key_end - tile.begin),
            nullptr,
            span.workspace_row + tile.begin - span.key_begin,
            1};
  }

  const GemmArgs& g_;
  Storage& s_;
  int w_tiles_;
};

__device__ inline int64_t output_row(const Job& job, int i) {
  return job.slots ? job.slots[job.out_row + i] : job.out_row + int64_t{i} * job.out_step;
}

}  // namespace mla::cuda
