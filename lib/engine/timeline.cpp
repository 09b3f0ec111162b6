#include "lib/engine/timeline.h"

#include <cmath>

namespace mla {

void StepTimeline::add(double seconds, int64_t prefill_rows, int64_t decode_rows) {
  if (entries_.empty() || steps_in_last_ == steps_per_entry_) {
    if (entries_.size() == kMaxEntries) merge_pairs();
    entries_.push_back({});
    steps_in_last_ = 0;
  }
  Entry& last = entries_.back();
  last.seconds = seconds;
  last.prefill += prefill_rows;
  last.decode += decode_rows;
  ++steps_in_last_;
}

void StepTimeline::merge_pairs() {
  for (size_t i = 0; i < entries_.size() / 2; ++i) {
    const Entry &a = entries_[2 * i], &b = entries_[2 * i + 1];
    entries_[i] = {b.seconds, a.prefill + b.prefill, a.decode + b.decode};
  }
  entries_.resize(entries_.size() / 2);
  steps_per_entry_ *= 2;
}

OrderedJson StepTimeline::json() const {
  OrderedJson seconds = OrderedJson::array(), prefill = OrderedJson::array(),
              decode = OrderedJson::array();
  for (const Entry& entry : entries_) {
    seconds.push_back(std::round(entry.seconds * 1e6) / 1e6);
    prefill.push_back(entry.prefill);
    decode.push_back(entry.decode);
  }
  return {{"steps_per_entry", steps_per_entry_},
          {"seconds", std::move(seconds)},
          {"prefill_tokens", std::move(prefill)},
          {"decode_tokens", std::move(decode)}};
}

}  // namespace mla
