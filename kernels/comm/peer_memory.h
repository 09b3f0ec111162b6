// Memory of the ranks' GPUs that the others read, for the fused all-reduce, and when it pays.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_backend_impl.h"

namespace mla {

// Of one buffer of partials, of two.
inline constexpr int64_t kPeerElements = int64_t{1} << 22;

class PeerTable {
 public:
  explicit PeerTable(int32_t ranks) : ranks_(static_cast<size_t>(ranks)) {}

  // Takes the memory of a rank, in its thread.
  void add(int32_t rank, int device, cuda::CudaBackend& backend);
  // After all have been added, in the rank's thread: opens the others' memory. False where a GPU
  // cannot reach another.
  bool reachable_from(int32_t rank);

  void* partial(int32_t rank, int64_t turn) const;
  cuda::PeerBuffers buffers(int32_t rank, int64_t turn) const;
  // Of all ranks: kernels that wait go on. From any thread.
  void stop();

 private:
  struct Rank {
    int device = -1;
    std::byte* memory = nullptr;  // two buffers of partials, flags, turns
    uint32_t* stop = nullptr;     // host memory
  };
  mutable std::mutex mutex_;
  std::vector<Rank> ranks_;
};

struct ReduceTimes {
  int64_t fused_elements = 0;  // up to which the fused one was the faster of the two; 0: never
  std::string description;
};

// Both all-reduces with add and norm, at several sizes, replayed from graphs. Every rank calls it
// at once; `meet` returns when all have called it; `scratch` is set for `reduce` while it runs.
ReduceTimes measure_reduce(const cuda::Launch& launch, const std::function<void()>& meet,
                           const std::function<void(void* data, int64_t count)>& reduce,
                           const std::function<void(int64_t turn, const AddNormParams&)>& fused,
                           const std::function<void*(int64_t turn)>& partial, int32_t ranks,
                           void*& scratch);

}  // namespace mla
