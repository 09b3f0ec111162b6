#include "tests/support/devices.h"

#include <fmt/format.h>

#include <cstdlib>
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace mla::test {

#ifdef MLA_WITH_CUDA
std::string cuda_absence() { return cuda_available() ? "" : "no Hopper GPU"; }
#else
std::string cuda_absence() { return "a build without the CUDA backend"; }
#endif

#ifdef MLA_WITH_NCCL
std::string cuda_ranks_absence(int32_t ranks) {
  const std::string none = cuda_absence();
  if (!none.empty()) return none;
  return cuda_device_count() < ranks ? fmt::format("fewer than {} GPUs", ranks) : "";
}
#else
std::string cuda_ranks_absence(int32_t) { return "a build without NCCL"; }
#endif

bool cuda_required() { return std::getenv("MLA_REQUIRE_CUDA") != nullptr; }

bool gpus_required(int32_t count) {
  const char* required = std::getenv("MLA_REQUIRE_GPUS");
  return required && std::atoi(required) >= count;
}

}  // namespace mla::test
