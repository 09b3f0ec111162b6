// Launches with programmatic dependence: see start_dependents() in ptx.cuh, which every kernel that
// is launched like this has to follow.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "kernels/cuda/check.h"

namespace mla::cuda {

// Lets a kernel have so much dynamic shared memory, which each device is told once; `allowed` has
// a bit a device.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes, int device, std::atomic<uint64_t>& allowed) {
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (allowed.load(std::memory_order_relaxed) & bit) return;
  MLA_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (device < 64) allowed.fetch_or(bit, std::memory_order_relaxed);
}

template <class... Params, class... Args>
void launch_kernel(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name);
}

}  // namespace mla::cuda
