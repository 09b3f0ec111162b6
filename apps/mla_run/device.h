// Where a run takes place: the one place that knows which backends this build has.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/comm/comm.h"
#include "kernels/ops.h"

namespace mla {

enum class DeviceKind : uint8_t { cpu, cuda };

// Of --device: auto is cuda where this build has it and a GPU that it serves is there, else cpu.
// Throws UsageError for cuda in a build without it.
DeviceKind choose_device(const std::string& device);
// Of --device beside --device-memory, which no GPU has to be there for: auto is cuda. Throws
// UsageError in a build without it, unless the device is cpu.
DeviceKind choose_planned_device(const std::string& device);

struct DeviceMemory {
  std::string name;
  uint64_t total_bytes = 0;  // 0: a CPU, whose memory is not planned
  uint64_t free_bytes = 0;
};
// Devices as --tensor-parallel-size and --data-parallel-size want them.
struct DeviceCount {
  int32_t ranks = 1;     // that share a model
  int32_t replicas = 1;  // of the model
  int32_t all() const { return ranks * replicas; }
};
// The least of so many GPUs. Throws Error where there is no GPU, UsageError where there are fewer,
// or no NCCL for ranks.
DeviceMemory device_memory(DeviceKind device, DeviceCount count = {});

// Throws UsageError where the device does not run in that dtype.
void check_dtype(DeviceKind device, DType dtype);

// After check_dtype. Throws Error where there is no GPU of that number. It serves the thread that
// makes it.
std::unique_ptr<Backend> make_backend(DeviceKind device, DType dtype, int threads, bool graphs,
                                      int32_t number = 0);

// What makes each rank's end of a group, in the rank's thread; null of a single rank.
using MakeComm = std::function<std::shared_ptr<Comm>(int32_t rank, Backend& backend)>;
// `fused`: whether GPUs may use an all-reduce of ours where it is faster than NCCL's.
MakeComm make_comms(DeviceKind device, DType dtype, int32_t ranks, double timeout_seconds,
                    bool fused);
// Counts bytes and checks shapes as the backend does; needs no device.
std::unique_ptr<Backend> make_counting_backend(DeviceKind device, DType dtype);

}  // namespace mla
