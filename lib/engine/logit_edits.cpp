#include "lib/engine/logit_edits.h"

#include <limits>

namespace mla {

LogitEdits::LogitEdits(const SamplingParams& s, std::span<const int32_t> prompt,
                       std::span<const int32_t> end_ids)
    : follow_tokens_(s.repetition_penalty != 1 || s.frequency_penalty != 0 ||
                     s.presence_penalty != 0) {
  if (s.repetition_penalty != 1)
    for (const int32_t token : prompt) of(token).count = 0;
  for (const auto& [token, bias] : s.logit_bias) of(token).bias = bias;
  if (s.min_tokens == 0) return;
  for (const int32_t token : end_ids) {
    LogitEdit& edit = of(token);
    banned_.emplace_back(token, edit.bias);
    edit.bias = -std::numeric_limits<float>::infinity();
  }
}

LogitEdit& LogitEdits::of(int32_t token) {
  const auto [place, is_new] = places_.try_emplace(token, list_.size());
  if (is_new) list_.push_back({.token = token, .count = -1, .bias = 0, .raw = 0});
  return list_[place->second];
}

void LogitEdits::add(int32_t token) {
  if (!follow_tokens_) return;
  LogitEdit& edit = of(token);
  edit.count = edit.count < 0 ? 1 : edit.count + 1;
}

void LogitEdits::end_bans() {
  for (const auto& [token, bias] : banned_) of(token).bias = bias;
  banned_.clear();
}

}  // namespace mla
