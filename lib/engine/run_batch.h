// One run of a batch: every record of a reader through the engine, every result to a sink.
#pragma once

#include <functional>

#include "lib/batch/request.h"
#include "lib/batch/run_record.h"
#include "lib/engine/engine.h"

namespace mla {

struct BatchProgress {
  int64_t read = 0, done = 0, failed = 0;         // records, without those that are skipped
  int64_t prefill_tokens = 0, decode_tokens = 0;  // computed so far
};

struct BatchOptions {
  int64_t limit = -1;  // the first records of the file, all of them where negative
  // Records that are read, so that their ids count, and not run: those of other shards, and those
  // finished before. Empty: none.
  std::function<bool(int64_t index)> skip;
  // Asked before every step and every record; true ends the batch where it is. Empty: never.
  std::function<bool()> stop;
  bool fail_fast = false;  // the first failed record ends the batch
  // Called after every step.
  std::function<void(const BatchProgress&)> progress;
};

enum class BatchEnd : uint8_t { all, stopped, failed_fast };

struct BatchOutcome {
  BatchEnd end = BatchEnd::all;
  std::string first_failure;  // the message of the first failed record
  RunCounts counts;
  OrderedJson summary;   // of SummaryBuilder, and prefill and decode tokens/s by kind of step
  OrderedJson timeline;  // of StepTimeline
};

// Reads ahead only as far as keeps the engine busy. Records go to `sink` in order of completion,
// with the record's index.
BatchOutcome run_batch(RequestReader& reader, Engine& engine, const BatchOptions& options,
                       const std::function<void(int64_t index, const OrderedJson&)>& sink);

}  // namespace mla
