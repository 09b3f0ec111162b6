// The DeepSeek-V2 forward pass over one step plan.
#pragma once

#include <span>
#include <vector>

#include "kernels/ops.h"
#include "lib/model/buffers.h"
#include "lib/model/config.h"
#include "lib/model/weights.h"
#include "lib/schedule/step_plan.h"

namespace mla {

// What a step's sampled rows gave; index as StepPlan::samples.
struct StepOutput {
  std::vector<int32_t> tokens;      // [S]; -1 where the logits were not finite
  std::vector<float> logprobs;      // [S]
  std::vector<int32_t> top_ids;     // [S, kMaxTop]; the first SampleSpec::num_top of a row are set
  std::vector<float> top_logprobs;  // [S, kMaxTop]
};

// The tokens that a row may not sample, beside its SampleSpec (whose ban_begin and ban_end are set
// by Model::sample).
struct RowSampling {
  SampleSpec spec;
  std::span<const int32_t> bans;
};

class Model {
 public:
  // Allocates the cache and every buffer of the worst case on the backend. All arguments outlive
  // it.
  Model(const ModelConfig& config, const ModelWeights& weights, Backend& backend,
        const StepLimits& limits);

  // Computes the rows of the plan in all layers. Throws Error where the plan is beyond the limits.
  void forward(const StepPlan& plan);

  // Logits of rows of the last forward, on the device, [rows.size(), vocab]; at most max_seqs rows.
  const float* logits(std::span<const int32_t> rows);

  // forward, logits and sampling of plan.samples; sampling[i] belongs to plan.samples[i].
  StepOutput step(const StepPlan& plan, const std::vector<RowSampling>& sampling);

 private:
  void upload(const StepPlan& plan);
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
};

}  // namespace mla
