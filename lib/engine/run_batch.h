// One run of a batch: every record of a reader through one engine or several, every result to a
// sink.
#pragma once

#include <functional>
#include <span>

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
  // The first failed record ends the batch: one that cannot be served when those in front of it
  // have ended, as long as a single engine or the reader says so; any other at once.
  bool fail_fast = false;
  // Called after every step; of several engines, every now and then.
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

using BatchSink = std::function<void(int64_t index, const OrderedJson&)>;

// Reads ahead only as far as keeps the engines busy, and waits for a record only where they are
// not. Records go to `sink` in order of completion, with the record's index, on the calling thread;
// however the batch ends, all that are finished by then. One engine runs on the calling thread.
// Several (data parallelism) run on a thread each; a request goes to the one with the least work
// before it, as estimated_work() has it. What an engine throws ends them all and is thrown here.
BatchOutcome run_batch(RequestReader& reader, std::span<Engine* const> engines,
                       const BatchOptions& options, const BatchSink& sink);

// In prompt tokens: a generated token counts as some of them, and text as a token for four bytes.
int64_t estimated_work(const Request& request, int32_t max_model_len);

}  // namespace mla
