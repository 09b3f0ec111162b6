// What the GPU does at best: the numbers that measurements are compared to.
#include <algorithm>
#include <array>

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "kernels/cuda/matrix.h"

namespace mla::cuda {
namespace {

constexpr size_t kCopyBytes = size_t{1} << 30;  // far beyond the L2 cache
constexpr int kCopies = 6, kProducts = 10;
constexpr int64_t kSize = 8192;  // of a square product

struct Block {
  explicit Block(size_t bytes) { MLA_CUDA_CHECK(cudaMalloc(&data, bytes)); }
  ~Block() { cudaFree(data); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* data = nullptr;
};

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t& event : events_) MLA_CUDA_CHECK(cudaEventCreate(&event));
  }
  ~Timer() {
    for (cudaEvent_t event : events_)
      if (event) cudaEventDestroy(event);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  template <class Call>
  double seconds(const Call& call) {
    MLA_CUDA_CHECK(cudaEventRecord(events_[0], stream_));
    call();
    MLA_CUDA_CHECK(cudaEventRecord(events_[1], stream_));
    MLA_CUDA_CHECK(cudaEventSynchronize(events_[1]));
    float ms = 0;
    MLA_CUDA_CHECK(cudaEventElapsedTime(&ms, events_[0], events_[1]));
    return ms / 1000;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t events_[2] = {};
};

// Bytes read and written a second, the best of some copies.
double copy_rate(Timer& timer, cudaStream_t stream) {
  const Block from(kCopyBytes), to(kCopyBytes);
  MLA_CUDA_CHECK(cudaMemsetAsync(from.data, 1, kCopyBytes, stream));
  double best = 0;
  for (int i = 0; i < kCopies; ++i) {
    const double seconds = timer.seconds([&] {
      MLA_CUDA_CHECK(
          cudaMemcpyAsync(to.data, from.data, kCopyBytes, cudaMemcpyDeviceToDevice, stream));
    });
    best = std::max(best, 2.0 * kCopyBytes / seconds);
  }
  return best;
}

// FLOP/s of our own product, the median: the clock falls under load, and the best is not kept up.
double product_rate(Timer& timer, Launch launch) {
  constexpr size_t kBytes = kSize * kSize * 2;
  const Block a(kBytes), w(kBytes), out(kBytes);
  fill_normal(a.data, kSize * kSize, 1, 1.0f, launch.stream);
  fill_normal(w.data, kSize * kSize, 2, 0.02f, launch.stream);
  Gemm g;
  g.a = a.data;
  g.w = w.data;
  g.out = out.data;
  g.a_rows = g.a_cols = g.a_stride = kSize;
  g.n = g.k = g.w_stride = kSize;
  g.w_matrix_stride = kSize * kSize;
  g.out_stride = kSize;
  g.rows.T = static_cast<int32_t>(kSize);
  for (int i = 0; i < 2; ++i) gemm_tile(g, launch);
  std::array<double, kProducts> seconds;
  for (double& s : seconds) s = timer.seconds([&] { gemm_tile(g, launch); });
  std::sort(seconds.begin(), seconds.end());
  const double median = (seconds[kProducts / 2 - 1] + seconds[kProducts / 2]) / 2;
  return 2.0 * kSize * kSize * kSize / median;
}

}  // namespace

DevicePeaks CudaBackend::measure_peaks() {
  Timer timer(launch_.stream);
  DevicePeaks peaks;
  peaks.bytes_per_second = copy_rate(timer, launch_.stream);
  peaks.flops = product_rate(timer, launch_);
  return peaks;
}

}  // namespace mla::cuda
