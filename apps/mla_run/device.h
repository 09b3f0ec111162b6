// Where a run takes place: the one place that knows which backends this build has.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/ops.h"

namespace mla {

enum class DeviceKind : uint8_t { cpu, cuda };

// Of --device: auto is cuda where this build has it and a GPU that it serves is there, else cpu.
// Throws UsageError for cuda in a build without it.
DeviceKind choose_device(const std::string& device);

struct DeviceMemory {
  std::string name;
  uint64_t total_bytes = 0;  // 0: a CPU, whose memory is not planned
  uint64_t free_bytes = 0;
};
// Throws Error where there is no GPU.
DeviceMemory device_memory(DeviceKind device);

// Throws UsageError where the device does not run in that dtype.
void check_dtype(DeviceKind device, DType dtype);

// After check_dtype. Throws Error where there is no GPU.
std::unique_ptr<Backend> make_backend(DeviceKind device, DType dtype, int threads, bool graphs);
// Counts bytes and checks shapes as the backend does; needs no device.
std::unique_ptr<Backend> make_counting_backend(DeviceKind device, DType dtype);

}  // namespace mla
