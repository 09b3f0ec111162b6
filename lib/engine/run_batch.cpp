#include "lib/engine/run_batch.h"

#include <algorithm>
#include <chrono>

namespace mla {
namespace {

// Requests that wait in the engine at most, beside those that run.
constexpr int64_t kReadAhead = 1024;

OrderedJson step_json(const StepTimes& times) {
  return {{"steps", times.steps},
          {"prefill_tokens", times.prefill_rows},
          {"decode_tokens", times.decode_rows},
          {"seconds", times.seconds},
          {"tokens_per_second",
           times.seconds > 0
               ? static_cast<double>(times.prefill_rows + times.decode_rows) / times.seconds
               : 0.0}};
}

BadLine not_finite(const Result& result) {
  return {.index = result.index,
          .line = result.line,
          .openai = result.form != Form::simple,
          .id = result.id,
          .code = error_code::kNotFinite,
          .message = "a log-probability is not finite"};
}

}  // namespace

BatchOutcome run_batch(RequestReader& reader, Engine& engine, const BatchOptions& options,
                       const std::function<void(int64_t index, const OrderedJson&)>& sink) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  BatchOutcome outcome;
  SummaryBuilder summary;
  BatchProgress progress;

  const auto failed = [&](const BadLine& bad) {
    if (++progress.failed == 1) {
      outcome.first_failure = bad.message;
      if (options.fail_fast) outcome.end = BatchEnd::failed_fast;
    }
    sink(bad.index, to_json(bad));
  };
  const Engine::Sink finished = [&](const Engine::Finished& item) {
    if (outcome.end != BatchEnd::all) return;  // a step may end several requests
    ++progress.done;
    if (const auto* bad = std::get_if<BadLine>(&item)) return failed(*bad);
    const Result& result = std::get<Result>(item);
    if (!is_finite(result)) return failed(not_finite(result));
    summary.add(result);
    sink(result.index, to_json(result));
  };
  // False once the batch ends early.
  const auto goes_on = [&] {
    if (outcome.end == BatchEnd::all && options.stop && options.stop())
      outcome.end = BatchEnd::stopped;
    return outcome.end == BatchEnd::all;
  };

  bool more = true;
  const auto read_ahead = [&] {
    while (more && engine.waiting() < kReadAhead && goes_on() &&
           (options.limit < 0 || reader.records() < options.limit)) {
      std::optional<Record> record = reader.next();
      if (!record) {
        more = false;
        break;
      }
      const int64_t index = reader.records() - 1;
      if (options.skip && options.skip(index)) continue;
      ++progress.read;
      if (auto* bad = std::get_if<BadLine>(&*record)) {
        finished(std::move(*bad));
      } else {
        engine.add(std::get<Request>(std::move(*record)), finished);
      }
    }
  };

  for (read_ahead(); engine.has_work() && goes_on(); read_ahead()) {
    engine.step(finished);
    const SchedulerStats& stats = engine.scheduler_stats();
    progress.prefill_tokens = stats.prefill_tokens;
    progress.decode_tokens = stats.decode_tokens;
    if (options.progress) options.progress(progress);
  }

  const SchedulerStats& stats = engine.scheduler_stats();
  outcome.counts = {.requests = progress.done,
                    .ok = progress.done - progress.failed,
                    .failed = progress.failed,
                    .prompts_split = stats.prompts_split,
                    .chunks = stats.chunks,
                    .cached_tokens = stats.cached_tokens,
                    .passes = stats.passes,
                    .preemptions = stats.preemptions,
                    .steps = stats.steps};
  outcome.summary = summary.summary(std::chrono::duration<double>(Clock::now() - start).count());
  outcome.timeline = engine.timeline().json();
  const EngineTimes& times = engine.times();
  outcome.summary["prefill_steps"] = step_json(times.prefill);
  outcome.summary["decode_steps"] = step_json(times.decode);
  outcome.summary["mixed_steps"] = step_json(times.mixed);
  outcome.summary["model_share_of_step_time"] =
      times.total_seconds > 0 ? times.model_seconds / times.total_seconds : 0.0;
  return outcome;
}

}  // namespace mla
