#include "apps/mla_run/device.h"

#include <algorithm>

#include "kernels/comm/thread_comm.h"
#include "kernels/cpu/cpu_backend.h"
#include "lib/base/error.h"
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif
#ifdef MLA_WITH_NCCL
#include "kernels/comm/nccl_comm.h"
#endif

namespace mla {
namespace {

MakeComm thread_comms(DType dtype, int32_t ranks, double timeout_seconds) {
  return [comms = make_thread_comms(ranks, dtype, timeout_seconds)](int32_t rank, Backend&) {
    return comms[static_cast<size_t>(rank)];
  };
}

}  // namespace

#ifdef MLA_WITH_CUDA
void check_dtype(DeviceKind device, DType dtype) {
  if (device == DeviceKind::cuda && dtype != DType::bf16)
    usage_fail("--dtype {}: --device cuda runs in bfloat16; use --dtype bfloat16 or --device cpu",
               name_of(dtype));
}

namespace {

void check_gpus(DeviceCount wanted) {
  if (wanted.all() == 1) return;
#ifndef MLA_WITH_NCCL
  if (wanted.ranks > 1)
    usage_fail(
        "--tensor-parallel-size {}: expected a build with NCCL, which GPUs need for it; found one "
        "without: install NCCL and build again, or use --device cpu",
        wanted.ranks);
#endif
  const int count = cuda_device_count();
  if (count == 0 || count >= wanted.all()) return;
  std::string options;
  if (wanted.ranks > 1) options = fmt::format("--tensor-parallel-size {}", wanted.ranks);
  if (wanted.replicas > 1)
    options +=
        fmt::format("{}--data-parallel-size {}", options.empty() ? "" : " and ", wanted.replicas);
  usage_fail("expected {} GPUs for {}, found {}", wanted.all(), options, count);
}

}  // namespace

DeviceKind choose_device(const std::string& device) {
  if (device == "cuda" || (device == "auto" && cuda_available())) return DeviceKind::cuda;
  return DeviceKind::cpu;
}

DeviceKind choose_planned_device(const std::string& device) {
  return device == "cpu" ? DeviceKind::cpu : DeviceKind::cuda;
}

DeviceMemory device_memory(DeviceKind device, DeviceCount count) {
  if (device == DeviceKind::cpu) return {"cpu"};
  check_gpus(count);
  DeviceMemory least;
  for (int32_t number = 0; number < count.all(); ++number) {
    const CudaDeviceInfo info = cuda_device_info(number);
    if (number == 0) least = {info.name, info.total_bytes, info.free_bytes};
    least.total_bytes = std::min(least.total_bytes, info.total_bytes);
    least.free_bytes = std::min(least.free_bytes, info.free_bytes);
  }
  return least;
}

MakeComm make_comms(DeviceKind device, DType dtype, int32_t ranks, double timeout_seconds,
                    [[maybe_unused]] bool fused) {
  if (ranks == 1) return [](int32_t, Backend&) { return nullptr; };
  if (device == DeviceKind::cpu) return thread_comms(dtype, ranks, timeout_seconds);
#ifdef MLA_WITH_NCCL
  return [group = make_nccl_group(ranks, fused)](int32_t rank, Backend& backend) {
    return make_nccl_comm(group, rank, backend);
  };
#else
  return {};
#endif
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

DeviceKind choose_planned_device(const std::string& device) {
  if (device == "auto")
    usage_fail(
        "--device-memory: expected a build with CUDA, as the memory is a GPU's; found one without: "
        "use --device cpu");
  return choose_device(device);
}

void check_dtype(DeviceKind, DType) {}

DeviceMemory device_memory(DeviceKind, DeviceCount) { return {"cpu"}; }

MakeComm make_comms(DeviceKind, DType dtype, int32_t ranks, double timeout_seconds, bool) {
  if (ranks == 1) return [](int32_t, Backend&) { return nullptr; };
  return thread_comms(dtype, ranks, timeout_seconds);
}

std::unique_ptr<Backend> make_counting_backend(DeviceKind, DType dtype) {
  return make_cpu_backend(dtype, 1);
}
#endif

}  // namespace mla
