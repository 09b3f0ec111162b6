// The DeepSeek-V2 forward pass over one step plan.
#pragma once

#include <array>
#include <deque>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "lib/model/buffers.h"
#include "lib/model/config.h"
#include "lib/model/weights.h"
#include "lib/schedule/step_plan.h"

namespace mla {

// When a step was computed, in nanoseconds of the host's steady clock.
struct StepStamps {
  int64_t begin = 0, logits = 0, tokens = 0;  // its first op, its logits, its sampled tokens
};

// What a step's sampled rows gave; index as StepPlan::samples.
struct StepOutput {
  StepStamps stamps;                // 0 without StepLimits::stamps
  std::vector<int32_t> tokens;      // [S]; -1 where the logits were not finite
  std::vector<float> logprobs;      // [S]
  std::vector<int32_t> top_ids;     // [S, kMaxTop]; the first SampleSpec::num_top of a row are set
  std::vector<float> top_logprobs;  // [S, kMaxTop]
};

// How a row is sampled: its SampleSpec, whose edit_begin, edit_end and token_slot Model::launch
// sets, and the logits that are changed before, tokens distinct.
struct RowSampling {
  SampleSpec spec;
  std::span<const LogitEdit> edits;
};

class Model {
 public:
  static constexpr size_t kMaxInFlight = 2;

  // Allocates the cache and every buffer of the worst case on the backend. All arguments outlive
  // it. A backend serves one model at a time.
  Model(const ModelConfig& config, const ModelWeights& weights, Backend& backend,
        const StepLimits& limits);

  // Computes the rows of the plan in all layers. Throws Error where the plan is beyond the limits.
  void forward(const StepPlan& plan);

  // Logits of rows of the last forward, on the device, [rows.size(), vocab]; at most max_seqs rows.
  const float* logits(std::span<const int32_t> rows);

  // Log-softmax of the raw logits of rows of the last forward or launch: of one token a row, and of
  // the `top` best (ties to the lower id), best first. Waits for the device. A row's numbers do not
  // depend on the other rows; one whose logits are not finite gives NaN. The rows are computed in
  // blocks, not all at once.
  struct RowLogprobs {
    std::vector<float> logprobs;      // [rows]
    std::vector<int32_t> top_ids;     // [rows, top]
    std::vector<float> top_logprobs;  // [rows, top]
  };
  RowLogprobs row_logprobs(std::span<const int32_t> rows, std::span<const int32_t> tokens,
                           int32_t top);

  // Has the device do forward, logits and sampling of plan.samples, and waits for nothing;
  // sampling[i] belongs to plan.samples[i]. Throws Error with kMaxInFlight steps on their way.
  void launch(const StepPlan& plan, const std::vector<RowSampling>& sampling);
  // Waits for the oldest step that was launched.
  StepOutput collect();
  size_t in_flight() const { return in_flight_.size(); }
  // Compares the clocks of device and host, for the stamps of steps that are collected from now on.
  // Waits for the device.
  void set_clock();
  // Both.
  StepOutput step(const StepPlan& plan, const std::vector<RowSampling>& sampling);

  // With StepLimits::graphs: runs a step of each size once, so that later ones replay it.
  void warm_up();

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
  // Rows [begin, end) of `rows`.
  void sample(int64_t begin, int64_t end, int64_t rows, int64_t top);
  void attention(const StepPlan& plan, const LayerWeights& w, int32_t layer);
  void prefill_passes(const StepPlan& plan, const LayerWeights& w, void* cache, const void* q,
                      int64_t q_stride);
  void feed_forward(const LayerWeights& w, int32_t layer, int64_t T);
  void dense(const LayerWeights& w, int64_t first, int64_t rows);
  void mixture(const LayerWeights& w, int64_t first, int64_t rows);
  // Row `first` of an activation of `width` elements a row.
  void* row_at(void* base, int64_t first, int64_t width) const;

  const ModelConfig& c_;
  const ModelWeights& w_;
  Backend& backend_;
  StepLimits limits_;
  float softmax_scale_;
  float* rope_table_;  // [max_model_len, R]
  std::byte* cache_;   // [layers, pages · 64, L+R]
  int64_t slots_;      // pages · 64
  PlanBuffers plan_{};
  WorkspaceBuffers work_{};
  ActivationBuffers a_{};
  bool pending_delta_ = false;  // a_.delta has yet to be added to the residual
  std::vector<int32_t> graph_sizes_;
  uint64_t replay_keys_ = 0;  // other than those of any other model: its steps have our buffers
  std::array<std::byte*, kMaxInFlight> host_{};  // of SampledOutput
  size_t launches_ = 0;
  std::deque<Launched> in_flight_;
  int64_t clock_ahead_ = 0;  // of the host, before the device's, ns
};

}  // namespace mla
