// Descriptors of the tensor memory accelerator (TMA) for bf16 arrays.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mla::cuda {

// A box of box_rows × 64 columns of `matrices` matrices [rows, cols], columns contiguous, rows
// row_stride and matrices matrix_stride elements apart. It lands in shared memory as box_rows rows
// of 128 bytes in the 128-byte swizzle; what lies beyond rows, cols or matrices is zero.
// Coordinates of a load: (column, row, matrix). row_stride, matrix_stride and the base are
// multiples of 16 bytes. Throws Error where the driver refuses it.
CUtensorMap tensor_map(const void* base, int64_t cols, int64_t rows, int64_t matrices,
                       int64_t row_stride, int64_t matrix_stride, int box_rows);

}  // namespace mla::cuda
