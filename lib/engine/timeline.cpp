#include "lib/engine/timeline.h"

#include <algorithm>
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

StepTimeline StepTimeline::merged(const std::vector<const StepTimeline*>& timelines) {
  if (timelines.size() == 1) return *timelines.front();
  std::vector<StepTimeline> parts;
  int64_t coarsest = 1;
  for (const StepTimeline* timeline : timelines) {
    parts.push_back(*timeline);
    coarsest = std::max(coarsest, timeline->steps_per_entry_);
  }
  // Until they are alike and fit together; each keeps at least one.
  for (;; coarsest *= 2) {
    size_t entries = 0, least = 0;
    for (StepTimeline& part : parts) {
      while (part.steps_per_entry_ < coarsest) part.merge_all();
      entries += part.entries_.size();
      least += std::min<size_t>(part.entries_.size(), 1);
    }
    if (entries <= kMaxEntries || entries == least) break;
  }
  StepTimeline all;
  all.steps_per_entry_ = coarsest;
  for (const StepTimeline& part : parts)
    all.entries_.insert(all.entries_.end(), part.entries_.begin(), part.entries_.end());
  std::ranges::stable_sort(all.entries_, {}, &Entry::seconds);
  return all;
}

void StepTimeline::merge_all() {
  if (entries_.empty()) {
    steps_per_entry_ *= 2;
    return;
  }
  if (entries_.size() % 2 == 1) entries_.push_back({entries_.back().seconds, 0, 0});
  merge_pairs();
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
