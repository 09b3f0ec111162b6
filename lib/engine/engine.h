// The engine: requests in, results out. plan = scheduler.next(); model.launch(plan);
// scheduler.commit(model.collect()). A pipelined engine plans and launches a step before it
// collects the one before, so that the device does not wait for the host.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <variant>

#include "lib/batch/request.h"
#include "lib/batch/result.h"
#include "lib/engine/memory_plan.h"
#include "lib/engine/step_trace.h"
#include "lib/engine/timeline.h"
#include "lib/model/runner.h"
#include "lib/schedule/scheduler.h"
#include "lib/text/chat_template.h"
#include "lib/text/detokenizer.h"
#include "lib/text/tokenizer.h"

namespace mla {

// How text becomes tokens; the pointers may be null (a checkpoint without tokenizer.json).
struct TextSetup {
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat_template = nullptr;
};

// Time and tokens of one kind of step, for tokens/s.
struct StepTimes {
  int64_t steps = 0;
  int64_t prefill_rows = 0;
  int64_t decode_rows = 0;
  double seconds = 0;
};

struct EngineTimes {
  StepTimes prefill, decode, mixed;  // steps with prompt rows only, decode rows only, both
  double model_seconds = 0;          // launching and waiting, of all
  double total_seconds = 0;          // of Engine::step, of all
};

class Engine {
 public:
  using Finished = std::variant<Result, BadLine>;
  using Sink = std::function<void(const Finished&)>;

  // `seed`: of requests that have none, together with their id. All arguments outlive the engine.
  Engine(const ModelConfig& config, ModelRunner& model, const TextSetup& text,
         const MemoryPlan& plan, uint64_t seed, bool pipelined = false);
  ~Engine();

  // Tokenises and queues a request, a sequence for each of its choices. A request that cannot be
  // served (text that is not UTF-8, a prompt at or over max_model_len, more than the KV pool holds
  // …) is handed to the sink at once.
  void add(Request request, const Sink& sink);

  bool has_work() const { return scheduler_.has_work() || !launched_.empty(); }
  // Sequences that do not run yet.
  int64_t waiting() const { return scheduler_.num_waiting(); }

  int32_t max_model_len() const { return max_model_len_; }
  int32_t max_seqs() const { return max_seqs_; }

  // Launches a step, collects one. Requests that end, with all their choices, are handed to the
  // sink.
  void step(const Sink& sink);

  const SchedulerStats& scheduler_stats() const { return scheduler_.stats(); }
  const EngineTimes& times() const { return times_; }
  // Steps are added to `trace`, which outlives the engine, as a run of this name; the model has
  // StepLimits::stamps. Before the first step.
  void trace(StepTrace& trace, const std::string& name);
  const StepTimeline& timeline() const { return timeline_; }  // from the start of the first step
  // Where each step's plan can be looked at before it runs.
  void observe(std::function<void(const StepPlan&)> observer) { observer_ = std::move(observer); }

 private:
  struct Live;        // a request: what its choices share
  struct LiveChoice;  // a sequence of the scheduler
  struct Launched {
    StepPlan plan;
    double start;  // of planning, ms
    TracedStep traced;
  };

  std::string prompt_text(const Request& request) const;
  PrefixReuse reuse_of(const Live& live, int32_t choice) const;
  bool launch();
  void collect(const Sink& sink);
  void count(const Launched& step, double end);
  TracedStep traced(const StepPlan& plan) const;
  // Of the prompts of the step that was launched last, for the first choice of each request: the
  // prompt is the same for all. What it has by an earlier chunk, or from before it was preempted,
  // stays.
  void take_prompt_logprobs(const StepPlan& plan);
  void take_prompt_logprobs(const PrefillSpan& span, std::span<const int32_t> prompt, Live& live);
  RowSampling sampling_of(LiveChoice& live, const SampleRow& row) const;
  // The sampled token of a row; true when the choice has ended.
  bool take(LiveChoice& live, const StepOutput& out, size_t row, double at_ms);
  // What the request says of its prompt's logprobs.
  void show_prompt_logprobs(Live& live) const;
  EchoedPrompt echoed_prompt(const Live& live) const;
  void name_tokens(Result& result) const;
  // Forgets a sequence. The last one of a request, and one that fails, end the request.
  void finish(int64_t id, const Sink& sink);
  std::unique_ptr<LiveChoice> leave(int64_t id);  // null where it is not there
  static double now_ms();

  const ModelConfig& config_;
  ModelRunner& model_;
  TextSetup text_;
  int32_t max_model_len_, max_seqs_;
  uint64_t seed_;
  bool prefix_caching_;
  bool pipelined_;
  int64_t following_ = 0;  // live choices whose sampling needs all tokens before
  Scheduler scheduler_;
  std::unordered_map<int64_t, std::unique_ptr<LiveChoice>> live_;  // by Sequence::id
  std::deque<Launched> launched_;
  double collected_ = 0;  // when the last step was, ms
  EngineTimes times_;
  StepTimeline timeline_;
  StepTrace* trace_ = nullptr;
  int64_t traced_run_ = 0;
  int64_t steps_launched_ = 0;
  double first_step_ = -1;  // when its planning began, ms; -1: not yet
  std::function<void(const StepPlan&)> observer_;
};

// The Sequence::id of a choice: the older its request, the smaller.
constexpr int64_t sequence_id(int64_t request_index, int32_t choice) {
  return request_index * kMaxChoices + choice;
}

// The seed of a request without one: a hash of the run's seed and the id, so that neither its place
// in the file nor its neighbours matter.
uint64_t request_seed(uint64_t run_seed, const Json& id);

}  // namespace mla
