// Decides what each step computes. Pure and deterministic: no clock, no device, no I/O.
//
//   while (scheduler.has_work()) {
//     const StepPlan plan = scheduler.next();
//     … compute plan, sample one token for each of plan.samples …
//     scheduler.commit(plan, tokens);        // tokens[i] belongs to plan.samples[i]
//     … for every sequence that has ended: scheduler.finish(id) …
//   }
//
// The commit of a step may come after the plan of the next one, if steps run in the order of their
// plans: that plan has a row for a token which only the device knows, in the sequence's token slot.
// Where the sequence turns out to have ended, what the row gives is ignored, and its pages are free
// for later steps.
//
// off (whole): a step is either prompts only (whole ones that fit the budget together, or
// recomputation after a preemption) or decodes only; waiting prompts go first.
// on (chunked): decodes first, one row each, then prompts in order for the rest of the budget; the
// last one is cut.
//
// A request is admitted when pages for its tokens so far, and one more, are free; it gets those of
// its tokens at once. When the pool is exhausted the latest sequence is preempted, never the
// oldest: it gives its pages back and goes to the front of the queue. The oldest can always go on,
// so every request ends.
//
// Sequences that begin with the same tokens may share the pages of those (prefix caching), also
// within one step, which writes all its cache rows before it reads any. The last prompt token is
// always computed: its row gives the first token.
//
// In both modes prompt tokens take the prefill path and generated tokens the absorbed path, also
// when a preempted sequence is computed anew: a token's bits do not depend on scheduling.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
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
                                   // 0: none. The oldest go first, and one row may always run.
  bool prefix_caching = false;     // pages of prompts can be found after their sequences have ended
};

struct SchedulerStats {
  // Steps that are not empty. A step of the off mode that fills in is a prefill step, also where it
  // computes generated tokens anew; in the on mode a step with rows of both kinds is mixed.
  int64_t steps = 0, prefill_steps = 0, decode_steps = 0, mixed_steps = 0;
  int64_t passes = 0, chunks = 0, preemptions = 0;
  int64_t prompts_split = 0;  // prompts whose first computation took more than one step
  int64_t prefill_tokens = 0, decode_tokens = 0;  // rows of each kind
  int64_t recomputed_tokens = 0;                  // those of both kinds computed before
  int64_t cached_tokens = 0;                      // of prompts, found when they were admitted first; of every choice
  int32_t max_running = 0, peak_pages = 0;
};

class Scheduler {
 public:
  // Throws UsageError where the options cannot work: B < max_model_len in off mode (names B,
  // max_model_len and max_seqs), B < 1, max_seqs < 1, W not a positive multiple of kKeyTile.
  Scheduler(const SchedulerOptions& options, int32_t num_pages);

  // Queues a sequence; `tokens` is its prompt. Ids are unique, and a smaller id is served first.
  // Generation ends at max_new_tokens (0 samples once, as 1 does) or at max_model_len; a sequence
  // that has got there is planned no more. Throws Error where the request can never fit: an empty
  // prompt, a prompt at or over max_model_len, more pages for prompt + max_new_tokens (at most
  // max_model_len) than the pool has; the message gives the numbers. The caller makes that an error
  // of the request.
  void add(int64_t id, std::vector<int32_t> tokens, int32_t max_new_tokens,
           PrefixReuse reuse = PrefixReuse::none);

  // Sequences are there that have not been finished.
  bool has_work() const;
  // The plan is empty only where every running sequence, and one that was preempted, waits for
  // commit() or finish().
  StepPlan next();
  // Appends the sampled token of each of plan.samples to its sequence; plans come in their order. A
  // token is ignored whose sequence was finished in the meantime, or has a token at its position
  // already.
  void commit(const StepPlan& plan, const std::vector<int32_t>& tokens);
  // Ends a sequence, running or waiting: its pages go back to the pool and it is forgotten.
  void finish(int64_t id);

  const Sequence& sequence(int64_t id) const;  // throws Error for an id that is not there
  int32_t num_waiting() const;
  int32_t num_running() const;
  int32_t free_pages() const;
  const SchedulerStats& stats() const;
  const SchedulerOptions& options() const;

 private:
  // Tokens [begin, end) of a sequence, to be computed in the step.
  struct Work {
    Sequence* sequence;
    int32_t begin, end;
  };
  // What a step does, before it is written out as rows. All decisions fall here, the oldest
  // sequence first, so no row has to be taken back when a sequence is preempted.
  struct Draft {
    int32_t budget = 0;            // rows left
    int64_t splits = 0;            // decode splits left
    bool has_decode_rows = false;  // the first one runs whatever its splits
    // Pages of keys that prompt rows may attend to: no more than the pool has, also where sequences
    // share them, so that the lists of a step are bounded. The first prompt runs whatever it has.
    int64_t key_pages = 0;
    bool has_prompts = false;
    std::vector<Work> work;

    bool allows_decode_row(int32_t key_len) const;
    bool allows_prompt(int32_t key_len) const;
  };

  void draft_decodes(Draft& draft);
  void draft_fills(Draft& draft);
  void admit(Draft& draft);
  // `found`: the pages that it would share.
  bool may_admit(const Sequence& sequence, const std::vector<int32_t>& found,
                 const Draft& draft) const;
  void take(Sequence& sequence, Draft& draft);
  bool make_room(Sequence& sequence);
  void preempt(Sequence& sequence);
  void leave(Sequence& sequence);
  StepPlan write_plan(const Draft& draft) const;
  void advance(const Work& work);
  void count(const StepPlan& plan, bool decode_step);

  SchedulerOptions options_;
  int32_t max_running_;  // min(max_seqs, B)
  KvPool pool_;
  std::unordered_map<int64_t, Sequence> sequences_;  // never iterated: its order is not defined
  std::set<int64_t> waiting_;                        // oldest first
  std::vector<Sequence*> running_;                   // oldest first
  std::vector<int32_t> free_slots_;                  // token slots, a stack
  SchedulerStats stats_;
};

}  // namespace mla
