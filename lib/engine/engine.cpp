#include "lib/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "kernels/mix.h"
#include "lib/base/error.h"
#include "lib/base/fnv.h"
#include "lib/batch/prompt_tokens.h"
#include "lib/engine/logit_edits.h"

namespace mla {

// A request between add() and its result.
struct Engine::Live {
  Request request;
  Result result;
  int32_t max_tokens;
  uint64_t seed = 0;
  // Tokens that end a choice; they are banned while it is shorter than min_tokens.
  std::vector<int32_t> end_ids;
  // Logprobs of the prompt's tokens but the first, where something asks for them, with as many of
  // the best as the one that wants most.
  std::optional<int32_t> prompt_top;
  std::vector<TokenLogprob> prompt_logprobs;
  std::vector<int32_t> echoed;  // the prompt's tokens, with an echo and logprobs
  size_t running;               // choices

  Live(Request r, int32_t prompt_tokens, int32_t max_model_len)
      : request(std::move(r)), result(make_result(request)), running(result.choices.size()) {
    const SamplingParams& sampling = request.sampling;
    const int32_t room = max_model_len - prompt_tokens;
    // Where only the prompt is asked for, a token is drawn and left out.
    max_tokens = std::min(std::max(sampling.max_tokens.value_or(room), 1), room);
    result.prompt_tokens = prompt_tokens;
    prompt_top = sampling.prompt_logprobs;
    if (sampling.echo && sampling.logprobs)
      prompt_top = std::max(prompt_top.value_or(0), *sampling.logprobs);
    for (Choice& choice : result.choices)
      if (sampling.logprobs) choice.logprobs.emplace();
  }
};

struct Engine::LiveChoice {
  std::shared_ptr<Live> of;
  int32_t index;
  Detokenizer detokenizer;
  LogitEdits edits;
  bool finite = true;

  Choice& choice() const { return of->result.choices[static_cast<size_t>(index)]; }
};

uint64_t request_seed(uint64_t run_seed, const Json& id) {
  return mix64(fnv_of(id.dump()) + run_seed * 0x9e3779b97f4a7c15u);
}

Engine::Engine(const ModelConfig& config, ModelRunner& model, const TextSetup& text,
               const MemoryPlan& plan, uint64_t seed, bool pipelined)
    : config_(config),
      model_(model),
      text_(text),
      max_model_len_(plan.limits.max_model_len),
      max_seqs_(plan.limits.max_seqs),
      seed_(seed),
      prefix_caching_(plan.prefix_caching),
      pipelined_(pipelined),
      scheduler_(plan.scheduler_options(), plan.limits.num_pages) {}

// The model may serve another engine: nothing of this one stays on its way.
Engine::~Engine() {
  try {
    while (model_.in_flight() > 0) model_.collect();
  } catch (const std::exception&) {
    // The device failed, and whoever comes next is told.
  }
}

double Engine::now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

namespace {

// The entries with no more than `top` of the best.
std::vector<TokenLogprob> best_of_each(std::vector<TokenLogprob> entries, int32_t top) {
  for (TokenLogprob& entry : entries)
    if (entry.top.size() > static_cast<size_t>(top)) entry.top.resize(static_cast<size_t>(top));
  return entries;
}

// Ascending, each once.
std::vector<int32_t> end_ids(const SamplingParams& sampling, const ModelConfig& config) {
  std::vector<int32_t> ids = sampling.stop_token_ids;
  if (!sampling.ignore_eos)
    ids.insert(ids.end(), config.eos_token_ids.begin(), config.eos_token_ids.end());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace

std::string Engine::prompt_text(const Request& request) const {
  if (const auto* text = std::get_if<std::string>(&request.prompt)) return *text;
  const auto* ids = std::get_if<std::vector<int32_t>>(&request.prompt);
  return ids ? text_.tokenizer->decode(*ids) : "";
}

void Engine::add(Request request, const Sink& sink) {
  std::vector<int32_t> tokens;
  try {
    tokens = prompt_tokens(request.prompt, request.sampling.add_bos, text_.tokenizer,
                           text_.chat_template);
    for (const int32_t token : tokens)
      if (token < 0 || token >= config_.vocab_size)
        fail("the prompt has token {}, expected ids in [0, {})", token, config_.vocab_size);
  } catch (const Error& e) {
    return sink(make_bad_line(request, error_code::kInvalidRequest, e.what()));
  }
  const auto prompt_len = static_cast<int32_t>(tokens.size());
  if (prompt_len >= max_model_len_)
    return sink(
        make_bad_line(request, error_code::kContextLength,
                      fmt::format("the prompt has {} tokens, expected fewer than max_model_len {}",
                                  prompt_len, max_model_len_)));

  const auto live = std::make_shared<Live>(std::move(request), prompt_len, max_model_len_);
  const SamplingParams& sampling = live->request.sampling;
  live->seed =
      sampling.seed ? static_cast<uint64_t>(*sampling.seed) : request_seed(seed_, live->request.id);
  live->end_ids = end_ids(sampling, config_);
  if (sampling.return_token_ids) live->result.prompt_token_ids = tokens;
  if (sampling.echo && sampling.logprobs) live->echoed = tokens;
  const double now = now_ms();
  for (int32_t index = 0; index < sampling.n; ++index) {
    const int64_t id = sequence_id(live->request.index, index);
    try {
      scheduler_.add(id, tokens, live->max_tokens, reuse_of(*live, index));
    } catch (const Error& e) {
      // What one choice needs the others need too: this is the first.
      return sink(make_bad_line(live->request, error_code::kContextLength, e.what()));
    }
    auto choice = std::make_unique<LiveChoice>(
        LiveChoice{.of = live,
                   .index = index,
                   .detokenizer = Detokenizer(text_.tokenizer, sampling.stop),
                   .edits = LogitEdits(sampling, tokens, live->end_ids)});
    choice->choice().timing.arrive(now);
    if (choice->edits.follow_tokens()) ++following_;
    live_.emplace(id, std::move(choice));
  }
}

// Choices have one prompt: the first computes it for the others, whether or not requests share
// theirs. The rows of a prompt give its logprobs: who has to say them computes all of it.
PrefixReuse Engine::reuse_of(const Live& live, int32_t choice) const {
  if (choice > 0) return PrefixReuse::take;
  if (prefix_caching_) return live.prompt_top ? PrefixReuse::give : PrefixReuse::take;
  return live.request.sampling.n > 1 ? PrefixReuse::give : PrefixReuse::none;
}

RowSampling Engine::sampling_of(LiveChoice& live, const SampleRow& sample) const {
  const SamplingParams& s = live.of->request.sampling;
  // Not the result's: a token may be on its way.
  const int32_t generated = sample.position - live.of->result.prompt_tokens;
  RowSampling row;
  row.spec = {.temperature = s.temperature,
              .top_p = s.top_p,
              .top_k = std::max(s.top_k, 0),
              .min_scaled = std::log(s.min_p),
              .choice = static_cast<uint32_t>(live.index),
              .position = static_cast<uint32_t>(sample.position),
              .seed = live.of->seed,
              .num_top = s.logprobs.value_or(0),
              .repetition_penalty = s.repetition_penalty,
              .frequency_penalty = s.frequency_penalty,
              .presence_penalty = s.presence_penalty};
  if (generated >= s.min_tokens) live.edits.end_bans();
  row.edits = live.edits.list();
  return row;
}

bool Engine::take(LiveChoice& live, const StepOutput& out, size_t row, double at_ms) {
  const int32_t token = out.tokens[row];
  Choice& choice = live.choice();
  const SamplingParams& sampling = live.of->request.sampling;
  if (sampling.max_tokens == 0) {  // whatever was drawn is left out
    choice.timing.token(at_ms);
    choice.finish_reason = "length";
    return true;
  }
  if (token < 0) {
    live.finite = false;
    return true;
  }
  choice.token_ids.push_back(token);
  live.edits.add(token);
  choice.logprob_hash.add(out.logprobs[row]);
  choice.timing.token(at_ms);
  if (choice.logprobs) {
    TokenLogprob entry{.token = token, .logprob = out.logprobs[row], .top = {}};
    for (size_t i = row * kMaxTop; i < row * kMaxTop + static_cast<size_t>(*sampling.logprobs); ++i)
      if (static_cast<int32_t>(i - row * kMaxTop) < config_.vocab_size)
        entry.top.emplace_back(out.top_ids[i], out.top_logprobs[i]);
    choice.logprobs->push_back(std::move(entry));
  }

  const auto generated = static_cast<int32_t>(choice.token_ids.size());
  const auto in = [&](const std::vector<int32_t>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  if (!sampling.ignore_eos && in(config_.eos_token_ids)) {
    choice.finish_reason = "stop";
  } else if (in(sampling.stop_token_ids)) {
    choice.finish_reason = "stop";
    choice.stop_reason = token;
  } else if (live.detokenizer.push(token, generated > sampling.min_tokens)) {
    choice.finish_reason = "stop";
    choice.stop_reason = live.detokenizer.stop_string();
  } else if (generated >= live.of->max_tokens) {
    choice.finish_reason = "length";
  }
  return !choice.finish_reason.empty();
}

void Engine::show_prompt_logprobs(Live& live) const {
  const SamplingParams& sampling = live.request.sampling;
  if (sampling.prompt_logprobs)
    live.result.prompt_logprobs = best_of_each(live.prompt_logprobs, *sampling.prompt_logprobs);
  if (!live.echoed.empty()) live.result.echoed = echoed_prompt(live);
}

EchoedPrompt Engine::echoed_prompt(const Live& live) const {
  EchoedPrompt echoed{
      .token_ids = live.echoed,
      .pieces = std::vector<std::string>(live.echoed.size()),
      .logprobs = best_of_each(live.prompt_logprobs, *live.request.sampling.logprobs)};
  if (!text_.tokenizer) return echoed;
  // Text is echoed as it is, with special tokens that it has; token ids are decoded without them.
  const auto* text = std::get_if<std::string>(&live.request.prompt);
  for (size_t i = 0; i < echoed.token_ids.size(); ++i) {
    const bool added = i == 0 && text && echoed.token_ids[i] == text_.tokenizer->bos_id() &&
                       !text->starts_with(text_.tokenizer->bos_text());
    if (!added) echoed.pieces[i] = text_.tokenizer->token_bytes(echoed.token_ids[i], !text);
  }
  return echoed;
}

// An OpenAI record names tokens by their text, special ones too.
void Engine::name_tokens(Result& result) const {
  using namespace std::chrono;
  result.created = duration_cast<seconds>(system_clock::now().time_since_epoch()).count();
  if (!text_.tokenizer) return;
  const auto name = [&](int32_t token) {
    result.token_bytes.try_emplace(token, text_.tokenizer->token_bytes(token, false));
    if (text_.tokenizer->is_special(token)) result.without_text.insert(token);
  };
  const auto name_all = [&](const std::vector<TokenLogprob>& entries) {
    for (const TokenLogprob& entry : entries) {
      name(entry.token);
      for (const auto& [token, logprob] : entry.top) name(token);
    }
  };
  for (const Choice& choice : result.choices)
    if (choice.logprobs) name_all(*choice.logprobs);
  if (!result.echoed) return;
  name(result.echoed->token_ids.front());
  name_all(result.echoed->logprobs);
}

std::unique_ptr<Engine::LiveChoice> Engine::leave(int64_t id) {
  const auto it = live_.find(id);
  if (it == live_.end()) return nullptr;
  std::unique_ptr<LiveChoice> left = std::move(it->second);
  live_.erase(it);
  if (left->index == 0) left->of->result.cached_tokens = scheduler_.sequence(id).cached_tokens;
  scheduler_.finish(id);
  if (left->edits.follow_tokens()) --following_;
  return left;
}

void Engine::finish(int64_t id, const Sink& sink) {
  const std::unique_ptr<LiveChoice> left = leave(id);
  Live& live = *left->of;
  Choice& choice = left->choice();
  if (!left->finite || !is_finite(choice)) {
    for (int32_t index = 0; index < live.request.sampling.n; ++index)
      leave(sequence_id(live.request.index, index));
    const std::string of_choice =
        live.request.sampling.n > 1 ? fmt::format(" of choice {}", left->index) : "";
    return sink(make_bad_line(
        live.request, error_code::kNotFinite,
        fmt::format("the logits of token {}{} are not finite, or all its tokens are ruled out",
                    choice.token_ids.size(), of_choice)));
  }
  if (text_.tokenizer) {
    left->detokenizer.finish();
    choice.text = left->detokenizer.text();
    if (live.request.sampling.echo) choice.text = prompt_text(live.request) + *choice.text;
  }
  if (--live.running > 0) return;
  show_prompt_logprobs(live);
  if (!is_finite(live.result))
    return sink(make_bad_line(live.request, error_code::kNotFinite,
                              "a log-probability of the prompt is not finite"));
  if (live.result.form != Form::simple) name_tokens(live.result);
  sink(std::move(live.result));
}

void Engine::step(const Sink& sink) {
  const double start = now_ms();
  // A step is planned before the tokens of the last are known, but for penalties, which need them.
  const bool ahead = launch() && pipelined_ && following_ == 0;
  while (launched_.size() > (ahead ? 1 : 0)) collect(sink);
  times_.total_seconds += (now_ms() - start) / 1000;
}

void Engine::trace(StepTrace& trace, const std::string& name) {
  if (!trace.on()) return;
  trace_ = &trace;
  traced_run_ = trace.begin_run(name);
  model_.set_clock();
}

TracedStep Engine::traced(const StepPlan& plan) const {
  TracedStep step{.number = steps_launched_,
                  .prompts = {},
                  .num_prompts = static_cast<int64_t>(plan.prefill.size()),
                  .prefill_tokens = plan.prefill_rows,
                  .decode_tokens = plan.rows() - plan.prefill_rows,
                  .sampled = static_cast<int64_t>(plan.samples.size())};
  for (size_t i = 0; i < std::min(plan.prefill.size(), TracedStep::kMaxPrompts); ++i) {
    const PrefillSpan& span = plan.prefill[i];
    step.prompts.push_back(
        {live_.at(plan.prefill_ids[i])->of->request.id, span.context, span.q_len});
  }
  return step;
}

bool Engine::launch() {
  const double start = now_ms();
  const int64_t begin = steady_ns();
  StepPlan plan = scheduler_.next();
  if (plan.empty()) return false;
  if (observer_) observer_(plan);
  std::vector<RowSampling> sampling;
  for (const SampleRow& sample : plan.samples)
    sampling.push_back(sampling_of(*live_.at(sample.sequence), sample));
  for (const int64_t id : plan.prefill_ids) live_.at(id)->choice().timing.schedule(start);
  const double model_start = now_ms();
  model_.launch(plan, sampling);
  take_prompt_logprobs(plan);
  times_.model_seconds += (now_ms() - model_start) / 1000;
  TracedStep step;
  if (trace_) step = traced(plan);
  step.plan_begin = begin;
  step.plan_end = steady_ns();
  ++steps_launched_;
  launched_.push_back({std::move(plan), start, std::move(step)});
  return true;
}

void Engine::take_prompt_logprobs(const StepPlan& plan) {
  for (size_t i = 0; i < plan.prefill.size(); ++i) {
    const LiveChoice& choice = *live_.at(plan.prefill_ids[i]);
    if (choice.index > 0 || !choice.of->prompt_top) continue;
    take_prompt_logprobs(plan.prefill[i], scheduler_.sequence(plan.prefill_ids[i]).tokens,
                         *choice.of);
  }
}

// The row of position p says how likely token p + 1 was.
void Engine::take_prompt_logprobs(const PrefillSpan& span, std::span<const int32_t> prompt,
                                  Live& live) {
  std::vector<TokenLogprob>& entries = live.prompt_logprobs;
  const int32_t end = std::min(span.context + span.q_len, live.result.prompt_tokens - 1);
  std::vector<int32_t> rows, tokens;
  for (int32_t p = std::max(span.context, static_cast<int32_t>(entries.size())); p < end; ++p) {
    rows.push_back(span.row_begin + p - span.context);
    tokens.push_back(prompt[static_cast<size_t>(p) + 1]);
  }
  if (rows.empty()) return;
  const auto found = model_.row_logprobs(rows, tokens, *live.prompt_top);
  const size_t top = found.top_ids.size() / rows.size();
  for (size_t r = 0; r < rows.size(); ++r) {
    TokenLogprob entry{.token = tokens[r], .logprob = found.logprobs[r], .top = {}};
    for (size_t t = r * top; t < (r + 1) * top; ++t)
      entry.top.emplace_back(found.top_ids[t], found.top_logprobs[t]);
    entries.push_back(std::move(entry));
  }
}

void Engine::collect(const Sink& sink) {
  Launched step = std::move(launched_.front());
  launched_.pop_front();
  const double model_start = now_ms();
  const StepOutput out = model_.collect();
  const double now = now_ms();
  step.traced.take_begin = steady_ns();
  times_.model_seconds += (now - model_start) / 1000;
  scheduler_.commit(step.plan, out.tokens);
  for (size_t i = 0; i < step.plan.samples.size(); ++i) {
    const int64_t id = step.plan.samples[i].sequence;
    const auto it = live_.find(id);
    if (it == live_.end()) continue;  // it ended while this step was on its way
    LiveChoice& live = *it->second;
    live.choice().timing.prefill_chunks = scheduler_.sequence(id).first_pass_chunks;
    if (!take(live, out, i, now)) continue;
    finish(id, sink);
    ++step.traced.finished;
  }
  if (trace_) {
    step.traced.compute_begin = out.stamps.begin;
    step.traced.compute_end = out.stamps.logits;
    step.traced.sample_end = out.stamps.tokens;
    step.traced.take_end = steady_ns();
    trace_->add(traced_run_, step.traced);
  }
  count(step, now_ms());
}

// A step's time is that from its planning, or from the end of the one before, to its end.
void Engine::count(const Launched& step, double end) {
  const int64_t decode_rows = step.plan.rows() - step.plan.prefill_rows;
  StepTimes& times = decode_rows == 0              ? times_.prefill
                     : step.plan.prefill_rows == 0 ? times_.decode
                                                   : times_.mixed;
  ++times.steps;
  times.prefill_rows += step.plan.prefill_rows;
  times.decode_rows += decode_rows;
  times.seconds += (end - std::max(step.start, collected_)) / 1000;
  if (first_step_ < 0) first_step_ = step.start;
  timeline_.add((end - first_step_) / 1000, step.plan.prefill_rows, decode_rows);
  collected_ = end;
}

}  // namespace mla
