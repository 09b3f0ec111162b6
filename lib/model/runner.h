// What the engine asks of a model, on one device or on several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/ops.h"
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

// How a row is sampled: its SampleSpec, whose edit_begin, edit_end and token_slot launch() sets,
// and the logits that are changed before, tokens distinct.
struct RowSampling {
  SampleSpec spec;
  std::span<const LogitEdit> edits;
};

class ModelRunner {
 public:
  static constexpr size_t kMaxInFlight = 2;

  virtual ~ModelRunner() = default;

  // Has the device do forward, logits and sampling of plan.samples, and waits for nothing;
  // sampling[i] belongs to plan.samples[i]. The arguments may go when it returns. Throws Error
  // where the plan is beyond the limits, or with kMaxInFlight steps on their way.
  virtual void launch(const StepPlan& plan, const std::vector<RowSampling>& sampling) = 0;
  // Waits for the oldest step that was launched.
  virtual StepOutput collect() = 0;
  virtual size_t in_flight() const = 0;
  // Compares the clocks of device and host, for the stamps of steps that are collected from now on.
  // Waits for the device.
  virtual void set_clock() = 0;

  // Log-softmax of the raw logits of rows of the last launch: of one token a row, and of the `top`
  // best (ties to the lower id), best first. Waits for the device. A row's numbers do not depend on
  // the other rows; one whose logits are not finite gives NaN. The rows are computed in blocks, not
  // all at once.
  struct RowLogprobs {
    std::vector<float> logprobs;      // [rows]
    std::vector<int32_t> top_ids;     // [rows, top]
    std::vector<float> top_logprobs;  // [rows, top]
  };
  virtual RowLogprobs row_logprobs(std::span<const int32_t> rows, std::span<const int32_t> tokens,
                                   int32_t top) = 0;

  // With StepLimits::graphs: runs a step of each size once, so that later ones replay it.
  virtual void warm_up() = 0;

  // How ranks communicate, for people; "" of a single one.
  virtual std::string communication() { return ""; }

  // Bytes of the device, of one rank, that are taken; 0: unknown.
  virtual uint64_t memory_in_use() = 0;
};

}  // namespace mla
