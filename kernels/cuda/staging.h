// Pinned host memory on the way to the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace mla::cuda {

// Copies that return when the source may be used again, in order with the stream's work. Two halves
// of one pinned block: a half is filled while the other is on its way.
class Staging {
 public:
  Staging(cudaStream_t stream, size_t bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  void upload(void* to, const void* from, size_t bytes);
  // `height` rows of `width` bytes, `from_pitch` apart on the host, `to_pitch` on the device.
  void upload_2d(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                 size_t height);

 private:
  // Pinned memory for `bytes`, at most half(). What is copied out of it has been enqueued when this
  // is called again.
  std::byte* take(size_t bytes);
  size_t half() const { return bytes_ / 2; }

  cudaStream_t stream_;
  size_t bytes_;
  std::byte* block_ = nullptr;
  cudaEvent_t sent_[2] = {};
  int current_ = 0;
  size_t used_ = 0;
};

}  // namespace mla::cuda
