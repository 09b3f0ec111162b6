// What a batch is, whichever way its engines run: its input, its records, its ends.
#pragma once

#include <chrono>
#include <optional>
#include <span>

#include "lib/engine/run_batch.h"

namespace mla {

class Batch {
 public:
  Batch(RequestReader& reader, const BatchOptions& options, const BatchSink& sink);

  // False once it ends early.
  bool goes_on();
  // The next request to run; absent at the end of the input, or of the batch, or where it is not
  // there yet and may not be waited for (nothing runs any more where it may). Records that cannot
  // be served are finished on the way.
  std::optional<Request> next(bool may_wait);
  void finished(const Engine::Finished& item);
  // Of a line that cannot be served, when it is its turn to be started. With fail_fast nothing
  // behind it is read, and it fails when those in front of it have ended.
  void refused(const Engine::Finished& item);
  void show_progress(int64_t prefill_tokens, int64_t decode_tokens);
  BatchOutcome outcome(std::span<Engine* const> engines);

 private:
  void failed(const BadLine& bad);

  RequestReader& reader_;
  const BatchOptions& options_;
  const BatchSink& sink_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  BatchOutcome outcome_;
  SummaryBuilder summary_;
  BatchProgress progress_;
  bool more_ = true;
  std::optional<Engine::Finished> refused_;  // with fail_fast; not failed yet
};

}  // namespace mla
