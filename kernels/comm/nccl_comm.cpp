#include "kernels/comm/nccl_comm.h"

#include <nccl.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "kernels/comm/peer_memory.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_backend_impl.h"
#include "lib/base/error.h"

namespace mla {

class NcclGroup {
 public:
  NcclGroup(int32_t ranks, bool may_fuse) : size(ranks), fused(may_fuse), peers(ranks) {}

  const int32_t size;
  const bool fused;
  ncclUniqueId id;
  PeerTable peers;
};

namespace {

void check(ncclResult_t status, ncclComm_t comm, const char* what) {
  if (status == ncclSuccess) return;
  fail("NCCL: {}: {} ({})", what, ncclGetErrorString(status), ncclGetLastError(comm));
}

class NcclComm final : public Comm {
  static constexpr size_t kWordBytes = 4096;  // ranks · 4 and more

 public:
  NcclComm(std::shared_ptr<NcclGroup> group, int32_t rank, cuda::CudaBackend& backend)
      : Comm(rank, group->size), group_(std::move(group)), launch_(backend.launch()) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    // A communicator that does not block makes a thread for every call, and a capture of ours is of
    // one thread. Whoever makes the ranks watches them instead.
    config.blocking = 1;
    check(ncclCommInitRankConfig(&comm_, size(), group_->id, rank, &config), nullptr,
          "joining the group");
    word_ = static_cast<int64_t*>(backend.allocate(kWordBytes, "communication"));
    connect();
    if (group_->fused && size() <= cuda::kMaxPeers) choose_fused(backend);
  }

  ~NcclComm() override {
    if (comm_) ncclCommDestroy(comm_);
  }

  std::string name() const override { return "nccl"; }
  std::string description() const override { return description_; }
  bool fuses(int64_t rows, int64_t H) const override {
    return rows <= cuda::kMaxPeerRows && rows * H <= fused_elements_;
  }
  void* fused_partial(int64_t turn) override { return peers_->partial(rank(), turn); }

  // A rank that is inside of a call of NCCL's keeps its communicator; the process ends then.
  void abort(const std::string& why) override {
    {
      const std::lock_guard lock(why_mutex_);
      if (!why_.empty()) return;
      why_ = why;
    }
    aborted_ = true;
    if (peers_) peers_->stop();
    const std::unique_lock lock(use_, std::chrono::seconds(1));
    if (!lock || !comm_) return;
    ncclCommAbort(comm_);
    comm_ = nullptr;
  }

 private:
  // Two ranks: one sum, in whatever order.
  void reduce(void* data, int64_t count, void* scratch) override {
    const std::lock_guard lock(use_);
    check_alive();
    if (size() == 2) {
      check(ncclAllReduce(data, data, static_cast<size_t>(count), ncclBfloat16, ncclSum, comm_,
                          launch_.stream),
            comm_, "all-reduce");
      return;
    }
    auto* at = static_cast<bf16*>(data);
    for (int64_t first = 0; first < count; first += kReduceChunk) {
      const int64_t n = std::min(kReduceChunk, count - first);
      check(ncclAllGather(at + first, scratch, static_cast<size_t>(n), ncclBfloat16, comm_,
                          launch_.stream),
            comm_, "all-gather of an all-reduce");
      cuda::sum_ranks(scratch, size(), n, at + first, launch_);
    }
  }

  void gather(const float* local, float* all, int64_t count) override {
    const std::lock_guard lock(use_);
    check_alive();
    check(ncclAllGather(local, all, static_cast<size_t>(count), ncclFloat32, comm_, launch_.stream),
          comm_, "all-gather");
  }

  void reduce_add_norm(int64_t turn, const AddNormParams& p) override {
    check_alive();
    cuda::reduce_add_norm(peers_->buffers(rank(), turn), p, launch_);
  }
  void reduce_rows(int64_t turn, void* sum, int64_t rows, int64_t H) override {
    check_alive();
    cuda::reduce_rows(peers_->buffers(rank(), turn), sum, rows, H, launch_);
  }

  void check_alive() {
    if (!aborted_) return;
    const std::lock_guard lock(why_mutex_);
    throw Error(why_);
  }

  // The least of the ranks' values, in all of them; none goes on before all are here.
  int64_t least(int64_t value) {
    MLA_CUDA_CHECK(
        cudaMemcpyAsync(word_, &value, sizeof value, cudaMemcpyHostToDevice, launch_.stream));
    check(ncclAllReduce(word_, word_, 1, ncclInt64, ncclMin, comm_, launch_.stream), comm_,
          "agreeing");
    MLA_CUDA_CHECK(
        cudaMemcpyAsync(&value, word_, sizeof value, cudaMemcpyDeviceToHost, launch_.stream));
    MLA_CUDA_CHECK(cudaStreamSynchronize(launch_.stream));
    return value;
  }

  // NCCL connects at first use, which it cannot while a graph is recorded.
  void connect() {
    least(0);
    auto* floats = reinterpret_cast<float*>(word_);
    check(ncclAllGather(floats, floats + 2, 1, ncclFloat32, comm_, launch_.stream), comm_,
          "connecting");
    MLA_CUDA_CHECK(cudaStreamSynchronize(launch_.stream));
  }

  void choose_fused(cuda::CudaBackend& backend) {
    group_->peers.add(rank(), launch_.device, backend);
    least(0);  // all have added theirs
    if (least(group_->peers.reachable_from(rank()) ? 1 : 0) == 0) {
      description_ = "nccl (no peer access for a fused all-reduce)";
      return;
    }
    peers_ = &group_->peers;
    const ReduceTimes times = measure_reduce(
        launch_, [this] { least(0); },
        [this](void* data, int64_t count) { reduce(data, count, measured_scratch_); },
        [this](int64_t turn, const AddNormParams& p) {
          cuda::reduce_add_norm(peers_->buffers(rank(), turn), p, launch_);
        },
        [this](int64_t turn) { return peers_->partial(rank(), turn); }, size(), measured_scratch_);
    fused_elements_ = least(rank() == 0 ? times.fused_elements : kPeerElements);
    description_ = times.description;
  }

  const std::shared_ptr<NcclGroup> group_;
  const cuda::Launch launch_;
  ncclComm_t comm_ = nullptr;
  int64_t* word_ = nullptr;     // device memory
  PeerTable* peers_ = nullptr;  // the group's, where its memory can be reached
  void* measured_scratch_ = nullptr;
  int64_t fused_elements_ = 0;
  std::string description_ = "nccl";
  std::timed_mutex use_;  // of comm_
  std::mutex why_mutex_;
  std::string why_;
  std::atomic<bool> aborted_{false};
};

}  // namespace

std::shared_ptr<NcclGroup> make_nccl_group(int32_t size, bool fused) {
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);  // all connections when the group is made
  auto group = std::make_shared<NcclGroup>(size, fused);
  check(ncclGetUniqueId(&group->id), nullptr, "ncclGetUniqueId");
  return group;
}

std::shared_ptr<Comm> make_nccl_comm(const std::shared_ptr<NcclGroup>& group, int32_t rank,
                                     Backend& backend) {
  auto* on_gpu = dynamic_cast<cuda::CudaBackend*>(&backend.device());
  if (!on_gpu) fail("NCCL: expected a CUDA backend, found {}", backend.name());
  return std::make_shared<NcclComm>(group, rank, *on_gpu);
}

}  // namespace mla
