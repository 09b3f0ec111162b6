#include "kernels/cuda/staging.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/check.h"

namespace mla::cuda {

Staging::Staging(cudaStream_t stream, size_t bytes) : stream_(stream), bytes_(bytes) {
  MLA_CUDA_CHECK(cudaMallocHost(reinterpret_cast<void**>(&block_), bytes));
  for (cudaEvent_t& event : sent_)
    MLA_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
}

Staging::~Staging() {
  for (cudaEvent_t event : sent_)
    if (event) cudaEventDestroy(event);
  cudaFreeHost(block_);
}

std::byte* Staging::take(size_t bytes) {
  bytes = (bytes + 255) / 256 * 256;
  if (bytes > half())
    fail("pinned memory: expected at most {} bytes at once, found {}", half(), bytes);
  if (used_ + bytes > half()) {
    MLA_CUDA_CHECK(cudaEventRecord(sent_[current_], stream_));
    current_ ^= 1;
    used_ = 0;
    MLA_CUDA_CHECK(cudaEventSynchronize(sent_[current_]));
  }
  std::byte* at = block_ + static_cast<size_t>(current_) * half() + used_;
  used_ += bytes;
  return at;
}

void Staging::upload(void* to, const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const size_t piece = std::min(bytes - done, half() / 2);
    std::byte* pinned = take(piece);
    std::memcpy(pinned, static_cast<const std::byte*>(from) + done, piece);
    MLA_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(to) + done, pinned, piece,
                                   cudaMemcpyHostToDevice, stream_));
    done += piece;
  }
}

void Staging::upload_2d(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                        size_t width, size_t height) {
  const size_t rows = std::max<size_t>(1, half() / 2 / width);
  for (size_t done = 0; done < height; done += rows) {
    const size_t count = std::min(rows, height - done);
    std::byte* pinned = take(count * width);
    for (size_t r = 0; r < count; ++r)
      std::memcpy(pinned + r * width, static_cast<const std::byte*>(from) + (done + r) * from_pitch,
                  width);
    MLA_CUDA_CHECK(cudaMemcpy2DAsync(static_cast<std::byte*>(to) + done * to_pitch, to_pitch,
                                     pinned, width, width, count, cudaMemcpyHostToDevice, stream_));
  }
}

}  // namespace mla::cuda
