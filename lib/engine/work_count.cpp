#include "lib/engine/work_count.h"

#include <algorithm>
#include <cmath>

namespace mla {

double limit_seconds(const Work& work, const DevicePeaks& peaks) {
  if (!(peaks.flops > 0 && peaks.bytes_per_second > 0)) return 0;
  return std::max(work.flop / peaks.flops, work.bytes / peaks.bytes_per_second);
}

WorkCounter::WorkCounter(const ModelConfig& c, DType weights, DType cache)
    : experts_(c.num_experts), experts_per_token_(c.num_experts_per_tok) {
  const double H = c.hidden_size, N = c.num_heads, P = c.qk_nope_head_dim, R = c.qk_rope_head_dim;
  const double V = c.v_head_dim, L = c.kv_lora_rank, A = c.q_lora_rank;
  const double layers = c.num_layers,
               dense_layers = std::min(c.first_k_dense_replace, c.num_layers);
  moe_layers_ = layers - dense_layers;

  // Elements of weights; a token takes two FLOP with each that it passes.
  const double q = A > 0 ? A * (H + c.q_dim()) : H * c.q_dim();
  const double attention = q + H * (L + R) + L * c.kv_b_dim() + N * V * H;
  const double expert = 3 * H * c.moe_intermediate_size;
  const double always = layers * attention + dense_layers * 3 * H * c.intermediate_size +
                        moe_layers_ * (H * experts_ + c.num_shared_experts * expert);
  const double head = H * c.vocab_size;

  linear_flop_ = 2 * (always + moe_layers_ * experts_per_token_ * expert);
  logits_flop_ = 2 * head;
  prompt_pair_flop_ = layers * 2 * N * (P + R + V);
  generated_pair_flop_ = layers * 2 * N * (2 * L + R);

  const auto element = static_cast<double>(size_of(weights));
  dense_bytes_ = element * always;
  expert_bytes_ = element * expert;
  head_bytes_ = element * head;
  cache_bytes_ = static_cast<double>(size_of(cache)) * layers * (L + R);
}

double WorkCounter::touched_experts(double rows) const {
  if (experts_ == 0) return 0;
  return experts_ * (1 - std::pow((experts_ - experts_per_token_) / experts_, rows));
}

double WorkCounter::weight_bytes(double rows, bool samples) const {
  if (rows == 0) return 0;
  return dense_bytes_ + moe_layers_ * touched_experts(rows) * expert_bytes_ +
         (samples ? head_bytes_ : 0);
}

Work WorkCounter::step(const StepPlan& plan) const {
  const double rows = plan.rows();
  double prompt_pairs = 0, generated_pairs = 0, cached = 0;  // cached: rows read or written
  for (const PrefillSpan& span : plan.prefill) {
    const double n = span.q_len, context = span.context;
    prompt_pairs += n * context + n * (n + 1) / 2;
    cached += context + n;
  }
  for (const DecodeRow& row : plan.decode) generated_pairs += row.key_len;
  cached += generated_pairs;
  return {rows * linear_flop_ + static_cast<double>(plan.samples.size()) * logits_flop_ +
              prompt_pairs * prompt_pair_flop_ + generated_pairs * generated_pair_flop_,
          weight_bytes(rows, !plan.samples.empty()) + cached * cache_bytes_};
}

}  // namespace mla
