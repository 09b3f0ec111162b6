// Checked calls of the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include "lib/base/error.h"

namespace mla::cuda {

// Throws Error with CUDA's own words and the name of what was tried.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // not to be blamed on the next call
  fail("CUDA: {}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

#define MLA_CUDA_CHECK(call) ::mla::cuda::check((call), #call)

// After a launch: what the launch itself reports. Faults of the kernel come at the next wait.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

}  // namespace mla::cuda
