// What a run's steps computed, one after the other, in bounded memory.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/base/json.h"

namespace mla {

class StepTimeline {
 public:
  static constexpr size_t kMaxEntries = 1024;

  // A step that ended `seconds` after the run's start with so many rows of each kind.
  void add(double seconds, int64_t prefill_rows, int64_t decode_rows);

  // Of several engines, in order of time. An entry is of one engine; the last of each may have
  // fewer steps.
  static StepTimeline merged(const std::vector<const StepTimeline*>& timelines);

  // An entry is `steps_per_entry` steps, the last one perhaps fewer: a power of 2, 1 for runs of at
  // most kMaxEntries steps. {"steps_per_entry", "seconds": [end of each entry], "prefill_tokens",
  // "decode_tokens": [sums]}; seconds to the microsecond.
  OrderedJson json() const;

 private:
  struct Entry {
    double seconds;
    int64_t prefill, decode;
  };
  void merge_pairs();
  void merge_all();  // pairs, and the last one where it is alone

  std::vector<Entry> entries_;
  int64_t steps_per_entry_ = 1;
  int64_t steps_in_last_ = 0;
};

}  // namespace mla
