// Device memory of the ops' own: carved out of the block that Backend::use_scratch hands over.
#pragma once

#include "kernels/cuda/launch.h"

namespace mla::cuda {

struct Scratch {
  void* gathered;  // [rows·K, H] bf16: rows of x, grouped by expert
  Grouping grouping;
  float* partial;     // of decode splits, see launch.h
  int32_t* arrivals;  // [D], zero between calls
  int32_t* taken;     // [N / 16, rounded up], zero between calls
  void* sample;
  int64_t max_mlp_rows, max_splits, max_samples;

  // With base null only `bytes` is set.
  static Scratch carve(void* base, const ModelShape& shape, size_t& bytes);
};

}  // namespace mla::cuda
