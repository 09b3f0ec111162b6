// One run of a batch: every record of a reader through the engine, every result to a sink.
#pragma once

#include <functional>

#include "lib/batch/request.h"
#include "lib/batch/run_record.h"
#include "lib/engine/engine.h"

namespace mla {

struct BatchProgress {
  int64_t read = 0, done = 0, failed = 0;         // records
  int64_t prefill_tokens = 0, decode_tokens = 0;  // computed so far
};

struct BatchOptions {
  int64_t limit = -1;  // records, all of them where negative
  // Called after every step.
  std::function<void(const BatchProgress&)> progress;
};

struct BatchOutcome {
  RunCounts counts;
  OrderedJson summary;  // of SummaryBuilder, and prefill and decode tokens/s by kind of step
};

// Reads ahead only as far as keeps the engine busy. Records go to `sink` in order of completion,
// with the record's index.
BatchOutcome run_batch(RequestReader& reader, Engine& engine, const BatchOptions& options,
                       const std::function<void(int64_t index, const OrderedJson&)>& sink);

}  // namespace mla
