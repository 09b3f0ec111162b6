#include "lib/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "lib/base/error.h"
#include "lib/batch/prompt_tokens.h"
#include "lib/engine/logit_edits.h"

namespace mla {

// A request between add() and its result.
struct Engine::Live {
  Request request;
  Result result;
  Detokenizer detokenizer;
  int32_t max_tokens;
  uint64_t seed;
  // Tokens that end the request; they are banned while it is shorter than min_tokens.
  std::vector<int32_t> end_ids;
  std::optional<LogitEdits> edits;
  bool finite = true;

  Live(Request r, const TextSetup& text)
      : request(std::move(r)),
        result(make_result(request)),
        detokenizer(text.tokenizer, request.sampling.stop) {}
};

uint64_t request_seed(uint64_t run_seed, const Json& id) {
  // FNV-1a 64 of the id as JSON text, mixed with the seed by the finaliser of splitmix64.
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : id.dump()) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  uint64_t z = hash + run_seed * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

Engine::Engine(const ModelConfig& config, Model& model, const TextSetup& text,
               const MemoryPlan& plan, uint64_t seed, bool pipelined)
    : config_(config),
      model_(model),
      text_(text),
      max_model_len_(plan.limits.max_model_len),
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

// What a line may ask for and the engine does not do yet.
bool is_unserved(const SamplingParams& s) { return s.n > 1; }

}  // namespace

std::string Engine::prompt_text(const Request& request) const {
  if (const auto* text = std::get_if<std::string>(&request.prompt)) return *text;
  const auto* ids = std::get_if<std::vector<int32_t>>(&request.prompt);
  return ids ? text_.tokenizer->decode(*ids) : "";
}

void Engine::add(Request request, const Sink& sink) {
  if (is_unserved(request.sampling))
    return sink(make_bad_line(request, error_code::kUnsupported, "n > 1 is not served yet"));
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

  auto live = std::make_unique<Live>(std::move(request), text_);
  const SamplingParams& sampling = live->request.sampling;
  const int32_t room = max_model_len_ - prompt_len;
  live->max_tokens = std::min(sampling.max_tokens.value_or(room), room);
  live->seed =
      sampling.seed ? static_cast<uint64_t>(*sampling.seed) : request_seed(seed_, live->request.id);
  live->end_ids = sampling.stop_token_ids;
  if (!sampling.ignore_eos)
    live->end_ids.insert(live->end_ids.end(), config_.eos_token_ids.begin(),
                         config_.eos_token_ids.end());
  std::sort(live->end_ids.begin(), live->end_ids.end());
  live->end_ids.erase(std::unique(live->end_ids.begin(), live->end_ids.end()), live->end_ids.end());
  live->edits.emplace(sampling, tokens, live->end_ids);
  live->result.prompt_tokens = prompt_len;
  Choice& choice = live->result.choices.front();
  if (sampling.logprobs) choice.logprobs.emplace();
  if (sampling.prompt_logprobs) live->result.prompt_logprobs.emplace();
  if (sampling.return_token_ids) live->result.prompt_token_ids = tokens;
  choice.timing.arrive(now_ms());
  try {
    scheduler_.add(live->request.index, std::move(tokens), live->max_tokens, reuse_of(sampling));
  } catch (const Error& e) {
    return sink(make_bad_line(live->request, error_code::kContextLength, e.what()));
  }
  const int64_t id = live->request.index;
  if (live->edits->follow_tokens()) ++following_;
  live_.emplace(id, std::move(live));
}

// The rows of a prompt give its logprobs: such a request computes all of them.
PrefixReuse Engine::reuse_of(const SamplingParams& sampling) const {
  if (!prefix_caching_) return PrefixReuse::none;
  return sampling.prompt_logprobs ? PrefixReuse::give : PrefixReuse::take;
}

RowSampling Engine::sampling_of(Live& live, const SampleRow& sample) const {
  const SamplingParams& s = live.request.sampling;
  // Not the result's: a token may be on its way.
  const int32_t generated = sample.position - live.result.prompt_tokens;
  RowSampling row;
  row.spec = {.temperature = s.temperature,
              .top_p = s.top_p,
              .top_k = std::max(s.top_k, 0),
              .min_scaled = std::log(s.min_p),
              .choice = 0,
              .position = static_cast<uint32_t>(sample.position),
              .seed = live.seed,
              .num_top = s.logprobs.value_or(0),
              .repetition_penalty = s.repetition_penalty,
              .frequency_penalty = s.frequency_penalty,
              .presence_penalty = s.presence_penalty};
  if (generated >= s.min_tokens) live.edits->end_bans();
  row.edits = live.edits->list();
  return row;
}

bool Engine::take(Live& live, const StepOutput& out, size_t row, double at_ms) {
  const int32_t token = out.tokens[row];
  if (token < 0) {
    live.finite = false;
    return true;
  }
  Choice& choice = live.result.choices.front();
  const SamplingParams& sampling = live.request.sampling;
  choice.token_ids.push_back(token);
  live.edits->add(token);
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
  } else if (generated >= live.max_tokens) {
    choice.finish_reason = "length";
  }
  return !choice.finish_reason.empty();
}

// An OpenAI record names tokens by their text, special ones too.
void Engine::name_tokens(Result& result) const {
  using namespace std::chrono;
  result.created = duration_cast<seconds>(system_clock::now().time_since_epoch()).count();
  if (!text_.tokenizer) return;
  const auto name = [&](int32_t token) {
    result.token_bytes.try_emplace(token, text_.tokenizer->token_bytes(token, false));
  };
  for (const Choice& choice : result.choices) {
    if (!choice.logprobs) continue;
    for (const TokenLogprob& entry : *choice.logprobs) {
      name(entry.token);
      for (const auto& [token, logprob] : entry.top) name(token);
    }
  }
}

void Engine::finish(Live& live, const Sink& sink) {
  live.result.cached_tokens = scheduler_.sequence(live.request.index).cached_tokens;
  scheduler_.finish(live.request.index);
  if (live.edits->follow_tokens()) --following_;
  if (!live.finite || !is_finite(live.result)) {
    sink(make_bad_line(
        live.request, error_code::kNotFinite,
        fmt::format("the logits of token {} are not finite, or all its tokens are ruled out",
                    live.result.choices.front().token_ids.size())));
    return;
  }
  if (text_.tokenizer) {
    live.detokenizer.finish();
    Choice& choice = live.result.choices.front();
    choice.text = live.detokenizer.text();
    if (live.request.sampling.echo) choice.text = prompt_text(live.request) + *choice.text;
  }
  if (live.result.form != Form::simple) name_tokens(live.result);
  sink(live.result);
}

void Engine::step(const Sink& sink) {
  const double start = now_ms();
  // A step is planned before the tokens of the last are known, but for penalties, which need them.
  const bool ahead = launch() && pipelined_ && following_ == 0;
  while (launched_.size() > (ahead ? 1 : 0)) collect(sink);
  times_.total_seconds += (now_ms() - start) / 1000;
}

bool Engine::launch() {
  const double start = now_ms();
  StepPlan plan = scheduler_.next();
  if (plan.empty()) return false;
  if (observer_) observer_(plan);
  std::vector<RowSampling> sampling;
  for (const SampleRow& sample : plan.samples)
    sampling.push_back(sampling_of(*live_.at(sample.sequence), sample));
  for (const int64_t id : plan.prefill_ids)
    live_.at(id)->result.choices.front().timing.schedule(start);
  const double model_start = now_ms();
  model_.launch(plan, sampling);
  take_prompt_logprobs(plan);
  times_.model_seconds += (now_ms() - model_start) / 1000;
  launched_.push_back({std::move(plan), start});
  return true;
}

void Engine::take_prompt_logprobs(const StepPlan& plan) {
  for (size_t i = 0; i < plan.prefill.size(); ++i) {
    Live& live = *live_.at(plan.prefill_ids[i]);
    if (live.result.prompt_logprobs) take_prompt_logprobs(plan.prefill[i], live);
  }
}

// The row of position p says how likely token p + 1 was.
void Engine::take_prompt_logprobs(const PrefillSpan& span, Live& live) {
  std::vector<TokenLogprob>& entries = *live.result.prompt_logprobs;
  const std::vector<int32_t>& prompt = scheduler_.sequence(live.request.index).tokens;
  const int32_t end = std::min(span.context + span.q_len, live.result.prompt_tokens - 1);
  std::vector<int32_t> rows, tokens;
  for (int32_t p = std::max(span.context, static_cast<int32_t>(entries.size())); p < end; ++p) {
    rows.push_back(span.row_begin + p - span.context);
    tokens.push_back(prompt[static_cast<size_t>(p) + 1]);
  }
  if (rows.empty()) return;
  const auto found = model_.row_logprobs(rows, tokens, *live.request.sampling.prompt_logprobs);
  const size_t top = found.top_ids.size() / rows.size();
  for (size_t r = 0; r < rows.size(); ++r) {
    TokenLogprob entry{.token = tokens[r], .logprob = found.logprobs[r], .top = {}};
    for (size_t t = r * top; t < (r + 1) * top; ++t)
      entry.top.emplace_back(found.top_ids[t], found.top_logprobs[t]);
    entries.push_back(std::move(entry));
  }
}

void Engine::collect(const Sink& sink) {
  const Launched step = std::move(launched_.front());
  launched_.pop_front();
  const double model_start = now_ms();
  const StepOutput out = model_.collect();
  const double now = now_ms();
  times_.model_seconds += (now - model_start) / 1000;
  scheduler_.commit(step.plan, out.tokens);
  for (size_t i = 0; i < step.plan.samples.size(); ++i) {
    const auto it = live_.find(step.plan.samples[i].sequence);
    if (it == live_.end()) continue;  // it ended while this step was on its way
    Live& live = *it->second;
    live.result.choices.front().timing.prefill_chunks =
        scheduler_.sequence(it->first).first_pass_chunks;
    if (!take(live, out, i, now)) continue;
    finish(live, sink);
    live_.erase(it);
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
