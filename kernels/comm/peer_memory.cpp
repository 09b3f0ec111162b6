#include "kernels/comm/peer_memory.h"

#include <algorithm>

#include "kernels/comm/comm.h"
#include "kernels/cuda/check.h"
#include "lib/base/error.h"

namespace mla {
namespace {

constexpr int64_t kBufferBytes = kPeerElements * 2;
constexpr int64_t kFlagBytes = int64_t{cuda::kMaxPeers} * cuda::kMaxPeerRows * 4;
constexpr int64_t kTurnBytes = int64_t{cuda::kMaxPeerRows} * 4;

constexpr int64_t kMeasuredWidth = 2048;  // of a row
constexpr int64_t kMeasuredRows[] = {1, 16, 64, 256, 512, 1024, 2048};
constexpr int kInGraph = 16, kReplays = 8;

// Memory of the device while something is measured.
class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) {
    if (bytes == 0) return;
    MLA_CUDA_CHECK(cudaMalloc(&data_, static_cast<size_t>(bytes)));
    MLA_CUDA_CHECK(cudaMemset(data_, 0, static_cast<size_t>(bytes)));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Microseconds of a call among kInGraph in a graph, the least of kReplays.
double time_in_graph(cudaStream_t stream, const std::function<void(int64_t turn)>& call) {
  cudaGraph_t graph = nullptr;
  MLA_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int64_t turn = 0; turn < kInGraph; ++turn) call(turn);
  MLA_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  MLA_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  MLA_CUDA_CHECK(cudaEventCreate(&begin));
  MLA_CUDA_CHECK(cudaEventCreate(&end));
  float least = 1e30f;
  for (int i = 0; i < kReplays; ++i) {
    MLA_CUDA_CHECK(cudaEventRecord(begin, stream));
    MLA_CUDA_CHECK(cudaGraphLaunch(executable, stream));
    MLA_CUDA_CHECK(cudaEventRecord(end, stream));
    MLA_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    MLA_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    least = std::min(least, ms);
  }
  MLA_CUDA_CHECK(cudaEventDestroy(begin));
  MLA_CUDA_CHECK(cudaEventDestroy(end));
  MLA_CUDA_CHECK(cudaGraphExecDestroy(executable));
  MLA_CUDA_CHECK(cudaGraphDestroy(graph));
  return least * 1000 / kInGraph;
}

}  // namespace

void PeerTable::add(int32_t rank, int device, cuda::CudaBackend& backend) {
  const auto bytes = static_cast<size_t>(2 * kBufferBytes + kFlagBytes + kTurnBytes);
  const Rank mine{.device = device,
                  .memory = static_cast<std::byte*>(backend.allocate(bytes, "peer memory")),
                  .stop = static_cast<uint32_t*>(backend.allocate_host(sizeof(uint32_t)))};
  *mine.stop = 0;
  const std::lock_guard lock(mutex_);
  ranks_[static_cast<size_t>(rank)] = mine;
}

bool PeerTable::reachable_from(int32_t rank) {
  const std::lock_guard lock(mutex_);
  const int device = ranks_[static_cast<size_t>(rank)].device;
  for (const Rank& other : ranks_) {
    if (other.device == device) continue;
    int can = 0;
    MLA_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, device, other.device));
    if (!can) return false;
    const cudaError_t status = cudaDeviceEnablePeerAccess(other.device, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      cuda::check(status, "cudaDeviceEnablePeerAccess");
    }
  }
  return true;
}

void* PeerTable::partial(int32_t rank, int64_t turn) const {
  return ranks_[static_cast<size_t>(rank)].memory + turn % 2 * kBufferBytes;
}

cuda::PeerBuffers PeerTable::buffers(int32_t rank, int64_t turn) const {
  cuda::PeerBuffers b{};
  b.rank = rank;
  b.size = static_cast<int>(ranks_.size());
  for (int32_t r = 0; r < b.size; ++r) {
    b.partial[r] = partial(r, turn);
    b.flags[r] =
        reinterpret_cast<uint32_t*>(ranks_[static_cast<size_t>(r)].memory + 2 * kBufferBytes);
  }
  const Rank& mine = ranks_[static_cast<size_t>(rank)];
  b.turns = reinterpret_cast<uint32_t*>(mine.memory + 2 * kBufferBytes + kFlagBytes);
  b.stop = mine.stop;
  return b;
}

void PeerTable::stop() {
  const std::lock_guard lock(mutex_);
  for (const Rank& rank : ranks_)
    if (rank.stop) __atomic_store_n(rank.stop, 1u, __ATOMIC_RELEASE);
}

ReduceTimes measure_reduce(const cuda::Launch& launch, const std::function<void()>& meet,
                           const std::function<void(void*, int64_t)>& reduce,
                           const std::function<void(int64_t, const AddNormParams&)>& fused,
                           const std::function<void*(int64_t)>& partial, int32_t ranks,
                           void*& scratch) {
  const int64_t most = kMeasuredRows[std::size(kMeasuredRows) - 1] * kMeasuredWidth;
  const DeviceMemory residual(most * 2), out(most * 2), weight(kMeasuredWidth * 4),
      gathered(reduce_scratch(ranks, most) * 2);
  scratch = gathered.get();
  meet();  // the large blocks are there before anybody waits in a kernel
  ReduceTimes times;
  bool faster = true;
  for (const int64_t rows : kMeasuredRows) {
    AddNormParams p{.residual = residual.get(),
                    .delta = nullptr,
                    .weight = static_cast<const float*>(weight.get()),
                    .rows = nullptr,
                    .out = out.get(),
                    .T = rows,
                    .H = kMeasuredWidth,
                    .eps = 1e-6f};
    const double own = time_in_graph(launch.stream, [&](int64_t turn) { fused(turn, p); });
    const double theirs = time_in_graph(launch.stream, [&](int64_t turn) {
      p.delta_rounded = partial(turn);
      reduce(partial(turn), rows * kMeasuredWidth);
      cuda::add_norm(p, launch);
    });
    faster = faster && own < theirs;
    if (faster) times.fused_elements = rows * kMeasuredWidth;
    times.description += fmt::format("{}{} rows {:.1f} and {:.1f} us",
                                     times.description.empty() ? "" : ", ", rows, own, theirs);
  }
  scratch = nullptr;
  times.description = fmt::format(
      "nccl, and a fused all-reduce of up to {} elements; fused and nccl with add and "
      "norm, of {} elements a row: {}",
      times.fused_elements, kMeasuredWidth, times.description);
  return times;
}

}  // namespace mla
