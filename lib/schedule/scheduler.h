// Decides what each step computes. Pure and deterministic: no clock, no device, no I/O.
//
//   while (scheduler.has_work()) {
//     const StepPlan plan = scheduler.next();
//     … compute plan, sample one token for each of plan.samples …
//     scheduler.commit(plan, tokens);        // tokens[i] belongs to plan.samples[i]
//     … for every sequence that has ended: scheduler.finish(id) …
//   }
//
// off (whole): a step is either prompts only (whole ones that fit the budget together, or
// recomputation after a preemption) or decodes only; waiting prompts go first.
// on (chunked): decodes first, one row each, then prompts in order for the rest of the budget; the
// last one is cut.
// In both modes prompt tokens take the prefill path and generated tokens the absorbed path, also
// when a preempted sequence is computed anew: a token's bits do not depend on scheduling.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "lib/schedule/kv_pool.h"
#include "lib/schedule/step_plan.h"

namespace mla {

struct SchedulerOptions {
  bool chunked = false;
  int32_t max_batched_tokens = 0;  // B, rows of a step
  int32_t max_seqs = 0;            // sequences that run at once
  int32_t max_model_len = 0;       // prompt + generated
  int32_t workspace_rows = 0;      // W, a multiple of kKeyTile
  int32_t max_decode_splits = 0;   // cap on the decode splits (of kDecodeSplit keys) of a step;
                                   // 0: none. A single row may always run.
};

struct SchedulerStats {
  int64_t steps = 0, prefill_steps = 0, decode_steps = 0, mixed_steps = 0;
  int64_t passes = 0, chunks = 0, preemptions = 0;
  int64_t prompts_split = 0;       // prompts whose first computation took more than one step
  int64_t prefill_tokens = 0, decode_tokens = 0, recomputed_tokens = 0;
  int32_t max_running = 0, peak_pages = 0;
};

class Scheduler {
 public:
  // Throws UsageError where the options cannot work: B < max_model_len in off mode (names B,
  // max_model_len and max_seqs), B < 1, W not a multiple of kKeyTile.
  Scheduler(const SchedulerOptions& options, int32_t num_pages);

  // Queues a request; `tokens` is its prompt. Throws Error where it can never fit: an empty prompt,
  // a prompt at or over max_model_len, more pages for prompt + max_new_tokens than the pool has (the
  // message gives the numbers). The caller makes that an error of the request.
  void add(int64_t id, std::vector<int32_t> tokens, int32_t max_new_tokens);

  bool has_work() const;
  StepPlan next();
  // Appends the sampled token of each of plan.samples to its sequence.
  void commit(const StepPlan& plan, const std::vector<int32_t>& tokens);
  // Ends a sequence: its pages go back to the pool. Also valid for one that waits.
  void finish(int64_t id);

  const Sequence& sequence(int64_t id) const;
  int32_t num_waiting() const;
  int32_t num_running() const;
  int32_t free_pages() const;
  const SchedulerStats& stats() const;
  const SchedulerOptions& options() const;
};

}  // namespace mla
