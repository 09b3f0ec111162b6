#include "kernels/cuda/tensor_map.h"

#include "kernels/cuda/check.h"

namespace mla::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Asked of the runtime, so that the program needs no link to the driver library and starts where
// there is none.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  MLA_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                  cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || !function)
    fail("CUDA: the driver has no cuTensorMapEncodeTiled; expected driver 525 or newer");
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap tensor_map(const void* base, int64_t cols, int64_t rows, int64_t matrices,
                       int64_t row_stride, int64_t matrix_stride, int box_rows) {
  static const Encode encode = find_encode();
  CUtensorMap map;
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride) * 2,
                                 static_cast<cuuint64_t>(matrix_stride) * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base), dims, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail("CUDA: tensor map of [{}, {}, {}] with strides {} and {}: driver error {}", matrices, rows,
         cols, matrix_stride, row_stride, static_cast<int>(status));
  return map;
}

}  // namespace mla::cuda
