// A model that several ranks share: one process, a thread a rank, each with a backend, weights and
// a Model of its own, and the same plan for all.
#pragma once

#include <functional>
#include <memory>

#include "kernels/comm/comm.h"
#include "lib/model/model.h"
#include "lib/model/rank_threads.h"
#include "lib/model/shard.h"
#include "lib/model/weights.h"

namespace mla {

class TensorParallelModel final : public ModelRunner {
 public:
  // What makes a rank's parts, in its thread. They own what they use, as a rank may outlive the
  // model.
  struct Options {
    int32_t size = 2;
    std::function<std::unique_ptr<Backend>(int32_t rank)> make_backend;
    // After all ranks have their backends.
    std::function<std::shared_ptr<Comm>(int32_t rank, Backend&)> make_comm;
    double timeout_seconds = 300;  // see RankThreads::Options
    double join_seconds = 10;
    std::function<void()> abandoned;  // a rank did not end: leave the process without destructors
  };
  using Load = std::function<ModelWeights(Rank rank, Backend& backend, const LoadProgress&)>;

  // Makes the backends, then what they communicate with. `config`: the whole model's. Throws Error;
  // so do all calls below when a rank fails, with its number, or does not answer in time.
  TensorParallelModel(const ModelConfig& config, Options options);
  ~TensorParallelModel() override;

  // Calls `weights` in each rank's thread, and makes its model. `progress` gets the sum of the
  // ranks', in this thread; it may throw.
  void load(const Load& weights, const StepLimits& limits, const LoadProgress& progress);

  void launch(const StepPlan& plan, const std::vector<RowSampling>& sampling) override;
  // Throws Error where the ranks' outputs are not the same bits. The stamps are rank 0's.
  StepOutput collect() override;
  size_t in_flight() const override { return in_flight_; }
  RowLogprobs row_logprobs(std::span<const int32_t> rows, std::span<const int32_t> tokens,
                           int32_t top) override;
  void set_clock() override;
  void warm_up() override;
  std::string communication() override;
  uint64_t memory_in_use() override;  // the most of any rank

 private:
  struct Shared;

  std::shared_ptr<Shared> shared_;
  std::unique_ptr<RankThreads> threads_;
  size_t in_flight_ = 0;
};

}  // namespace mla
