#include "apps/mla_run/device.h"

#include "kernels/cpu/cpu_backend.h"
#include "lib/base/error.h"
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace mla {

#ifdef MLA_WITH_CUDA
namespace {

constexpr int kDevice = 0;

}  // namespace

void check_dtype(DeviceKind device, DType dtype) {
  if (device == DeviceKind::cuda && dtype != DType::bf16)
    usage_fail("--dtype {}: --device cuda runs in bfloat16; use --dtype bfloat16 or --device cpu",
               name_of(dtype));
}

DeviceKind choose_device(const std::string& device) {
  if (device == "cuda" || (device == "auto" && cuda_available())) return DeviceKind::cuda;
  return DeviceKind::cpu;
}

DeviceMemory device_memory(DeviceKind device) {
  if (device == DeviceKind::cpu) return {"cpu"};
  const CudaDeviceInfo info = cuda_device_info(kDevice);
  return {info.name, info.total_bytes, info.free_bytes};
}

std::unique_ptr<Backend> make_counting_backend(DeviceKind device, DType dtype) {
  if (device == DeviceKind::cpu) return make_cpu_backend(dtype, 1);
  check_dtype(device, dtype);
  return make_cuda_counter();
}
#else
DeviceKind choose_device(const std::string& device) {
  if (device == "cuda")
    usage_fail("--device cuda: this build has no CUDA backend; use --device cpu");
  return DeviceKind::cpu;
}

void check_dtype(DeviceKind, DType) {}

DeviceMemory device_memory(DeviceKind) { return {"cpu"}; }

std::unique_ptr<Backend> make_counting_backend(DeviceKind, DType dtype) {
  return make_cpu_backend(dtype, 1);
}
#endif

}  // namespace mla
