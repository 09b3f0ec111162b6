// What sampling does to a logit before it chooses, the same on every backend.
#pragma once

#include "kernels/device_too.h"
#include "kernels/ops.h"

namespace mla {

// In vLLM's order: the bias; the repetition penalty of tokens in the prompt or the answer, which
// takes positive logits down by division and others by multiplication; the frequency penalty, times
// the count, and the presence penalty, once, of tokens in the answer. Each step is rounded to fp32.
MLA_DEVICE_TOO inline float edited_logit(float x, const SampleSpec& spec, const LogitEdit& edit) {
  x += edit.bias;
  if (edit.count < 0) return x;
  x = x > 0.0f ? x / spec.repetition_penalty : x * spec.repetition_penalty;
  if (edit.count == 0) return x;
  x -= spec.frequency_penalty * static_cast<float>(edit.count);
  return x - spec.presence_penalty;
}

}  // namespace mla
