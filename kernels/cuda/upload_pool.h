// Weights on their way to the device: several host threads copy from the page cache to pinned
// memory, each with a stream of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/cuda/matrix.h"

namespace mla::cuda {

class UploadPool {
 public:
  UploadPool(int device, int threads);
  ~UploadPool();
  UploadPool(const UploadPool&) = delete;
  UploadPool& operator=(const UploadPool&) = delete;

  // Queues a copy; float32 and float16 become bf16 on the way. `source` stays as it is until
  // drain() returns.
  void add(const Placement& to, const HostTensor& source);
  // Returns when all that was queued is on the device. Throws what a copy threw.
  void drain();

 private:
  struct Task {
    Placement to;
    HostTensor source;
  };
  void work(int device);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  int busy_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

}  // namespace mla::cuda
