// The CUDA backend for Hopper GPUs (sm_90), bfloat16. Plain C++: no CUDA header.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/ops.h"

namespace mla {

struct CudaOptions {
  int device = 0;
  bool graphs = true;  // Backend::replay records and replays; false: it calls
};

struct CudaDeviceInfo {
  std::string name;
  int major = 0, minor = 0;
  uint64_t total_bytes = 0, free_bytes = 0;
};

// GPUs that CUDA shows; 0 without a driver.
int cuda_device_count();

// True where there is a GPU of compute capability 9.0 and its driver.
bool cuda_available();

// Throws Error that says what is missing: no driver, no GPU of that number.
CudaDeviceInfo cuda_device_info(int device);

// Throws Error: no GPU, one that is not sm_90. It serves the thread that makes it, whose device it
// sets.
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);

// Counts bytes (matrix_bytes, scratch_bytes) and checks shapes as the backend does, without a GPU.
// Every op throws.
std::unique_ptr<Backend> make_cuda_counter();

}  // namespace mla
