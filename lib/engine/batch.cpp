#include "lib/engine/batch.h"

namespace mla {
namespace {

// Of all engines, which run side by side: their rates add up.
OrderedJson step_json(std::span<Engine* const> engines, StepTimes EngineTimes::*kind) {
  StepTimes sum;
  double rate = 0;
  for (const Engine* engine : engines) {
    const StepTimes& times = engine->times().*kind;
    sum.steps += times.steps;
    sum.prefill_rows += times.prefill_rows;
    sum.decode_rows += times.decode_rows;
    sum.seconds += times.seconds;
    if (times.seconds > 0)
      rate += static_cast<double>(times.prefill_rows + times.decode_rows) / times.seconds;
  }
  return {{"steps", sum.steps},
          {"prefill_tokens", sum.prefill_rows},
          {"decode_tokens", sum.decode_rows},
          {"seconds", sum.seconds},
          {"tokens_per_second", rate}};
}

BadLine not_finite(const Result& result) {
  return {.index = result.index,
          .line = result.line,
          .openai = result.form != Form::simple,
          .id = result.id,
          .code = error_code::kNotFinite,
          .message = "a log-probability is not finite",
          .answer = result.answer};
}

}  // namespace

Batch::Batch(RequestReader& reader, const BatchOptions& options, const BatchSink& sink)
    : reader_(reader), options_(options), sink_(sink) {}

bool Batch::goes_on() {
  if (outcome_.end == BatchEnd::all && options_.stop && options_.stop())
    outcome_.end = BatchEnd::stopped;
  return outcome_.end == BatchEnd::all;
}

void Batch::failed(const BadLine& bad) {
  if (++progress_.failed == 1) {
    outcome_.first_failure = bad.message;
    if (options_.fail_fast) outcome_.end = BatchEnd::failed_fast;
  }
  sink_(bad.index, to_json(bad));
}

void Batch::finished(const Engine::Finished& item) {
  const auto* result = std::get_if<Result>(&item);
  const bool answered = result && is_finite(*result);
  // A step may end several requests: answers are kept behind the end, failures run again.
  if (!answered && outcome_.end != BatchEnd::all) return;
  ++progress_.done;
  if (!answered) return failed(result ? not_finite(*result) : std::get<BadLine>(item));
  summary_.add(*result);
  outcome_.counts.cached_tokens += result->cached_tokens;
  sink_(result->index, to_json(*result));
}

void Batch::refused(const Engine::Finished& item) {
  if (!options_.fail_fast) return finished(item);
  refused_ = item;
  more_ = false;
}

std::optional<Request> Batch::next(bool may_wait) {
  while (more_ && goes_on() && (options_.limit < 0 || reader_.records() < options_.limit)) {
    if (!may_wait && !reader_.ready()) return std::nullopt;
    std::optional<Record> record = reader_.next();
    // What ends the wait for a line makes no record of half of it.
    if (!goes_on() || !record) break;
    const int64_t index = reader_.records() - 1;
    if (options_.skip && options_.skip(index)) continue;
    ++progress_.read;
    if (auto* request = std::get_if<Request>(&*record)) return std::move(*request);
    refused(std::get<BadLine>(std::move(*record)));
  }
  more_ = false;
  if (may_wait && refused_) {
    finished(*refused_);
    refused_.reset();
  }
  return std::nullopt;
}

void Batch::show_progress(int64_t prefill_tokens, int64_t decode_tokens) {
  progress_.prefill_tokens = prefill_tokens;
  progress_.decode_tokens = decode_tokens;
  if (options_.progress) options_.progress(progress_);
}

BatchOutcome Batch::outcome(std::span<Engine* const> engines) {
  RunCounts& counts = outcome_.counts;
  counts.requests = progress_.done;
  counts.ok = progress_.done - progress_.failed;
  counts.failed = progress_.failed;
  double model_seconds = 0, total_seconds = 0;
  std::vector<const StepTimeline*> timelines;
  for (const Engine* engine : engines) {
    const SchedulerStats& stats = engine->scheduler_stats();
    counts.prompts_split += stats.prompts_split;
    counts.chunks += stats.chunks;
    counts.passes += stats.passes;
    counts.preemptions += stats.preemptions;
    counts.steps += stats.steps;
    model_seconds += engine->times().model_seconds;
    total_seconds += engine->times().total_seconds;
    timelines.push_back(&engine->timeline());
  }
  using namespace std::chrono;
  outcome_.summary = summary_.summary(duration<double>(steady_clock::now() - start_).count());
  outcome_.timeline = StepTimeline::merged(timelines).json();
  outcome_.summary["prefill_steps"] = step_json(engines, &EngineTimes::prefill);
  outcome_.summary["decode_steps"] = step_json(engines, &EngineTimes::decode);
  outcome_.summary["mixed_steps"] = step_json(engines, &EngineTimes::mixed);
  outcome_.summary["model_share_of_step_time"] =
      total_seconds > 0 ? model_seconds / total_seconds : 0.0;
  return std::move(outcome_);
}

}  // namespace mla
