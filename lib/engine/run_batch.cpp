#include "lib/engine/run_batch.h"

#include "lib/base/error.h"
#include "lib/engine/batch.h"
#include "lib/engine/parallel_batch.h"

namespace mla {
namespace {

// Requests that wait in the engine at most, beside those that run.
constexpr int64_t kReadAhead = 1024;

void run_on_this_thread(Batch& batch, Engine& engine) {
  const Engine::Sink finished = [&](const Engine::Finished& item) { batch.finished(item); };
  const Engine::Sink refused = [&](const Engine::Finished& item) { batch.refused(item); };
  const auto read_ahead = [&] {
    while (engine.waiting() < kReadAhead) {
      std::optional<Request> request = batch.next(!engine.has_work());
      if (!request) return;
      engine.add(std::move(*request), refused);
    }
  };
  for (read_ahead(); engine.has_work() && batch.goes_on(); read_ahead()) {
    engine.step(finished);
    const SchedulerStats& stats = engine.scheduler_stats();
    batch.show_progress(stats.prefill_tokens, stats.decode_tokens);
  }
}

}  // namespace

BatchOutcome run_batch(RequestReader& reader, std::span<Engine* const> engines,
                       const BatchOptions& options, const BatchSink& sink) {
  if (engines.empty()) fail("a batch: expected at least one engine, found none");
  Batch batch(reader, options, sink);
  if (engines.size() == 1) {
    run_on_this_thread(batch, *engines.front());
  } else {
    run_in_parallel(batch, engines);
  }
  return batch.outcome(engines);
}

}  // namespace mla
