#include "kernels/cuda/matrix.h"

#include <cuda_bf16.h>

#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/mix.h"

namespace mla::cuda {
namespace {

// to[head][l][p] = from[head·(P+V) + p][l]; a block is 32 × 32 elements of a head.
__global__ void transpose_kernel(const uint16_t* from, uint16_t* to) {
  __shared__ uint16_t tile[32][33];
  const int l = blockIdx.x * 32, p = blockIdx.y * 32, head = blockIdx.z;
  from += int64_t{head} * kKV * kL;
  to += int64_t{head} * kL * kP;
  for (int i = threadIdx.y; i < 32; i += 8)
    tile[i][threadIdx.x] = from[(p + i) * kL + l + threadIdx.x];
  __syncthreads();
  for (int i = threadIdx.y; i < 32; i += 8)
    to[(l + i) * kP + p + threadIdx.x] = tile[threadIdx.x][i];
}

// Box-Muller on two 32-bit halves.
__device__ float normal(uint64_t seed, int64_t index) {
  const uint64_t bits = mix64(seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(index) + 1);
  const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
  const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

// Source row r goes to row r / group · pitch + r % group of `to`.
__global__ void normal_kernel(__nv_bfloat16* to, int64_t group, int64_t pitch, int64_t cols,
                              NormalTensor source) {
  const int64_t count = source.rows * source.cols, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int64_t r = i / source.cols, c = i % source.cols;
    const int64_t index = (source.first_row + r) * source.row_stride + source.first_col + c;
    to[(r / group * pitch + r % group) * cols + c] =
        __float2bfloat16_rn(source.deviation * normal(source.seed, index));
  }
}

}  // namespace

size_t matrix_bytes(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols) {
  // Rows of a router are its experts; 8 of them fill the vectors of an output.
  const int64_t unit = kind == MatrixKind::linear ? 8 : 16;
  if (rows % unit != 0 || cols % 16 != 0)
    fail("weights on the GPU: expected [multiple of {}, multiple of 16], found [{}, {}]", unit,
         rows, cols);
  int64_t elements = experts * rows * cols;
  if (kind == MatrixKind::kv_b) elements += rows / kKV * kL * kP;
  return static_cast<size_t>(elements) * sizeof(uint16_t);
}

Placement placement(const Matrix& m, int64_t expert, int64_t row_begin, int64_t rows,
                    int64_t cols) {
  if (expert < 0 || expert >= m.experts || row_begin < 0 || row_begin + rows > m.rows ||
      cols != m.cols)
    fail("weight rows [{}, {}) of {} columns do not fit a matrix [{}, {}]", row_begin,
         row_begin + rows, cols, m.rows, m.cols);
  const int64_t row_bytes = m.cols * 2;
  std::byte* base = static_cast<std::byte*>(m.data) + expert * m.rows * row_bytes;
  if (m.kind != MatrixKind::gate_up) return {base + row_begin * row_bytes, 1, rows, rows};
  const int64_t half = m.rows / 2, first = row_begin % half;
  if (first % 8 != 0 || rows % 8 != 0 || first + rows > half)
    fail("rows [{}, {}) of a gate_up matrix of {} rows: expected whole groups of 8 of one half",
         row_begin, row_begin + rows, m.rows);
  return {base + (2 * first + (row_begin < half ? 0 : 8)) * row_bytes, rows / 8, 8, 16};
}

void transpose_uk(const Matrix& m, cudaStream_t stream) {
  const dim3 grid(kL / 32, kP / 32, static_cast<unsigned>(m.rows / kKV));
  transpose_kernel<<<grid, dim3(32, 8), 0, stream>>>(static_cast<const uint16_t*>(m.data),
                                                     static_cast<uint16_t*>(m.absorbed));
  check_launch("transpose of W_UK");
}

void fill_normal(const Placement& to, int64_t cols, const NormalTensor& source,
                 cudaStream_t stream) {
  if (source.rows * source.cols == 0) return;
  normal_kernel<<<1024, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(to.to), to.rows, to.pitch,
                                          cols, source);
  check_launch("random weights");
}

void fill_normal(void* to, int64_t count, uint64_t seed, float deviation, cudaStream_t stream) {
  fill_normal({to, 1, 1, 1}, count,
              {.seed = seed,
               .deviation = deviation,
               .first_row = 0,
               .first_col = 0,
               .rows = 1,
               .cols = count,
               .row_stride = count},
              stream);
}

}  // namespace mla::cuda
