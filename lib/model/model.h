// The DeepSeek-V2 forward pass over one step plan.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <span>
#include <vector>

#include "kernels/comm/comm.h"
#include "kernels/ops.h"
#include "lib/model/buffers.h"
#include "lib/model/config.h"
#include "lib/model/runner.h"
#include "lib/model/weights.h"

namespace mla {

class Model final : public ModelRunner {
 public:
  // Allocates the cache and every buffer of the worst case on the backend. All arguments outlive
  // it. A backend serves one model at a time. With `comm` it is one of the ranks that share a
  // model, all of which make the same calls: config (rank_config's) and weights are the rank's,
  // limits.ranks is the group's size.
  Model(const ModelConfig& config, const ModelWeights& weights, Backend& backend,
        const StepLimits& limits, Comm* comm = nullptr);

  // Computes the rows of the plan in all layers. Throws Error where the plan is beyond the limits.
  void forward(const StepPlan& plan);

  // Logits of rows of the last forward, on the device, [rows.size(), vocab]; at most max_seqs rows.
  const float* logits(std::span<const int32_t> rows);

  // Of the last forward too.
  RowLogprobs row_logprobs(std::span<const int32_t> rows, std::span<const int32_t> tokens,
                           int32_t top) override;

  void launch(const StepPlan& plan, const std::vector<RowSampling>& sampling) override;
  StepOutput collect() override;
  size_t in_flight() const override { return in_flight_.size(); }
  void set_clock() override;
  // launch() and collect().
  StepOutput step(const StepPlan& plan, const std::vector<RowSampling>& sampling);

  // Counts each layer that is computed, or launched, in `layers`, which outlives the model.
  void count_layers(std::atomic<uint64_t>& layers) { layers_ = &layers; }

  void warm_up() override;
  uint64_t memory_in_use() override { return backend_.memory_in_use(); }

 private:
  // A step on its way to the host: `rows` and `top` of its SampledOutput.
  struct Launched {
    size_t samples;
    int64_t rows, top;
    bool has_top;
    std::byte* host;
    uint64_t ticket;
  };

  void upload(const StepPlan& plan);
  // Sampled rows up to `end` whose logit edits are on the device at once.
  struct EditGroup {
    int64_t end;
    std::vector<LogitEdit> edits;
  };
  // Where and how to sample; rows beyond plan.samples are padding, sampled from the row itself. Has
  // the edits of the first group there; most steps have one.
  std::vector<EditGroup> upload(const StepPlan& plan, const std::vector<RowSampling>& sampling,
                                int64_t rows);
  void compute(const StepPlan& plan);
  // A step of decode rows that all sample, padded to one of graph_sizes.
  void replay(StepPlan plan, const std::vector<RowSampling>& sampling, int32_t size);
  void sampled_logits(int64_t rows);
  void stamp(int64_t which);
  // Logits of `rows` rows, of which each rank has its part of the vocabulary.
  void gather_logits(int64_t rows);
  // Rows [begin, end) of `rows`.
  void sample(int64_t begin, int64_t end, int64_t rows, int64_t top);
  void attention(const StepPlan& plan, const LayerWeights& w, int32_t layer);
  void prefill_passes(const StepPlan& plan, const LayerWeights& w, void* cache, const void* q,
                      int64_t q_stride);
  void feed_forward(const LayerWeights& w, int32_t layer, int64_t T);
  void dense(const LayerWeights& w, int64_t first, int64_t rows);
  // The residual plus what is to be added, normed. `rows`: as of AddNormParams, null for all.
  void add_norm(const float* weight, bool delta, const int32_t* rows, void* out, int64_t T);
  // Where attention and the feed-forward of a step of `rows` rows leave this rank's part, [rows,
  // H].
  void* partial() const;
  // The ranks' parts are added to the residual, which is normed.
  void reduce_add_norm(const float* weight, int64_t rows);
  // a_.partial: the sum of the ranks' parts.
  void all_reduce(int64_t rows);
  void mixture(const LayerWeights& w, int64_t first, int64_t rows);
  // Row `first` of an activation of `width` elements a row.
  void* row_at(void* base, int64_t first, int64_t width) const;

  const ModelConfig& c_;
  const ModelWeights& w_;
  Backend& backend_;
  StepLimits limits_;
  Comm* comm_;  // null: there is one rank
  float softmax_scale_;
  float* rope_table_;  // [max_model_len, R]
  std::byte* cache_;   // [layers, pages · 64, L+R]
  int64_t slots_;      // pages · 64
  PlanBuffers plan_{};
  WorkspaceBuffers work_{};
  ActivationBuffers a_{};
  bool pending_delta_ = false;  // a_.delta (or partial) has yet to be added to the residual
  std::atomic<uint64_t>* layers_ = nullptr;
  bool fused_ = false;  // true while this step uses the fused all-reduce
  int64_t turn_ = 0;    // number of the next fused all-reduce in this step
  std::vector<int32_t> graph_sizes_;
  uint64_t replay_keys_ = 0;  // of this model alone: the recorded steps use its buffers
  std::array<std::byte*, kMaxInFlight> host_{};  // of SampledOutput
  size_t launches_ = 0;
  std::deque<Launched> in_flight_;
  int64_t clock_ahead_ = 0;  // of the host, before the device's, ns
};

}  // namespace mla
