// What a step costs at least: FLOP of its products and bytes of memory that it has to touch,
// counted from the config alone, and the time that a device of known peaks needs for them.
#pragma once

#include "kernels/ops.h"
#include "lib/model/config.h"
#include "lib/schedule/step_plan.h"

namespace mla {

struct Work {
  double flop = 0, bytes = 0;

  // Where it took so many seconds; 0 in none.
  double tflop_per_second(double seconds) const { return seconds > 0 ? flop / seconds / 1e12 : 0; }
  double gbyte_per_second(double seconds) const { return seconds > 0 ? bytes / seconds / 1e9 : 0; }

  Work& operator+=(const Work& other) {
    flop += other.flop;
    bytes += other.bytes;
    return *this;
  }
};

// The longer of the two times, in seconds; 0 where the peaks are not known.
double limit_seconds(const Work& work, const DevicePeaks& peaks);

// Counts what the answers need, not what a way to compute them adds: no padding, no K and V that
// are recomputed for a later chunk, no activations that leave the chip. Symbols as in
// kernels/ops.h.
class WorkCounter {
 public:
  // `weights`, `cache`: as the backend stores them.
  WorkCounter(const ModelConfig& config, DType weights, DType cache);

  // Of a token in all layers, without attention and logits. Absorbed, kv_b costs the same.
  double linear_flop() const { return linear_flop_; }
  // Of a row that is sampled.
  double logits_flop() const { return logits_flop_; }
  // Attention of one token to one key in all layers: 2·N·(P+R+V) with K and V recomputed,
  // 2·N·(2·L+R) absorbed.
  double prompt_pair_flop() const { return prompt_pair_flop_; }
  double generated_pair_flop() const { return generated_pair_flop_; }

  // Routed experts of a layer that `rows` tokens touch, were each token's K of E drawn evenly:
  // E·(1 − ((E−K)/E)^rows). The expected number.
  double touched_experts(double rows) const;
  // Weights that a step of `rows` tokens reads. The embedding's few rows are left out.
  double weight_bytes(double rows, bool samples) const;
  // Cache rows of one token in all layers.
  double cache_bytes() const { return cache_bytes_; }

  Work step(const StepPlan& plan) const;

 private:
  double experts_, experts_per_token_, moe_layers_;
  double linear_flop_, logits_flop_, prompt_pair_flop_, generated_pair_flop_;
  double dense_bytes_;   // weights that every token passes, the LM head apart
  double expert_bytes_;  // one routed expert
  double head_bytes_, cache_bytes_;
};

}  // namespace mla
