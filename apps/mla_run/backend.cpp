// By itself, so that a test's program can be linked with another make_backend.
#include "apps/mla_run/device.h"
#include "kernels/cpu/cpu_backend.h"
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace mla {

std::unique_ptr<Backend> make_backend([[maybe_unused]] DeviceKind device, DType dtype, int threads,
                                      [[maybe_unused]] bool graphs,
                                      [[maybe_unused]] int32_t number) {
#ifdef MLA_WITH_CUDA
  if (device == DeviceKind::cuda) return make_cuda_backend({.device = number, .graphs = graphs});
#endif
  return make_cpu_backend(dtype, threads);
}

}  // namespace mla
