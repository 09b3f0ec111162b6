#include "lib/batch/result.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lib/base/error.h"
#include "lib/batch/openai.h"
#include "lib/batch/run_record.h"

namespace mla {
namespace {

double finite(double value, const Result& result, const char* name) {
  if (!std::isfinite(value))
    fail("request {}: {}: expected a finite number, found {}", result.id.dump(), name, value);
  return value;
}

OrderedJson milliseconds(double value, const Result& result, const char* name) {
  return std::round(finite(value, result, name) * 1000) / 1000;
}

void add_logprobs(const std::vector<TokenLogprob>& entries, const Result& result,
                  OrderedJson& list) {
  const auto exact = [&](float x) { return exact_logprob(x, result); };
  for (const TokenLogprob& entry : entries) {
    OrderedJson top = OrderedJson::array();
    for (const auto& [token, logprob] : entry.top)
      top.push_back(OrderedJson::array({token, exact(logprob)}));
    list.push_back({{"token_id", entry.token}, {"logprob", exact(entry.logprob)}});
    list.back()["top"] = std::move(top);
  }
}

OrderedJson logprobs_json(const Choice& choice, const Result& result) {
  OrderedJson list = OrderedJson::array();
  add_logprobs(*choice.logprobs, result, list);
  return list;
}

OrderedJson itl_json(const Choice& choice, const Result& result) {
  const auto& values = choice.timing.itl_ms();
  if (values.empty()) return nullptr;
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const double sum = std::accumulate(sorted.begin(), sorted.end(), 0.0);
  const auto ms = [&](double x) { return milliseconds(x, result, "itl"); };
  OrderedJson itl;
  itl["mean"] = ms(sum / static_cast<double>(sorted.size()));
  itl["p50"] = ms(percentile(sorted, 50));
  itl["p99"] = ms(percentile(sorted, 99));
  itl["max"] = ms(sorted.back());
  return itl;
}

// One of several.
OrderedJson choice_json(const Choice& choice, size_t index, const Result& result) {
  OrderedJson j;
  j["index"] = index;
  j["text"] = choice.text ? OrderedJson(*choice.text) : OrderedJson(nullptr);
  j["token_ids"] = choice.token_ids;
  j["finish_reason"] = choice.finish_reason;
  j["stop_reason"] = choice.stop_reason;
  j["completion_tokens"] = choice.tokens();
  j["logprob_hash"] = choice.logprob_hash.hex();
  if (choice.logprobs) j["logprobs"] = logprobs_json(choice, result);
  j["timing"] = timing_json(choice, result);
  return j;
}

OrderedJson choices_json(const Result& result) {
  OrderedJson list = OrderedJson::array();
  for (size_t i = 0; i < result.choices.size(); ++i)
    list.push_back(choice_json(result.choices[i], i, result));
  return list;
}

}  // namespace

OrderedJson timing_json(const Choice& choice, const Result& result) {
  const RequestTiming& t = choice.timing;
  OrderedJson timing;
  timing["queue"] = milliseconds(t.queue_ms(), result, "queue");
  timing["prefill"] = milliseconds(t.prefill_ms(), result, "prefill");
  timing["ttft"] = milliseconds(t.ttft_ms(), result, "ttft");
  const auto tpot = t.tpot_ms();
  timing["tpot"] = tpot ? milliseconds(*tpot, result, "tpot") : OrderedJson(nullptr);
  timing["e2e"] = milliseconds(t.e2e_ms(), result, "e2e");
  timing["itl"] = itl_json(choice, result);
  timing["prefill_chunks"] = t.prefill_chunks;
  return timing;
}

OrderedJson prompt_logprobs_json(const Result& result) {
  OrderedJson list = OrderedJson::array({nullptr});
  add_logprobs(*result.prompt_logprobs, result, list);
  return list;
}

// A float as a double is exact, and its shortest decimal form reads back to the same double.
double exact_logprob(float logprob, const Result& result) {
  return finite(logprob, result, "logprob");
}

void RequestTiming::schedule(double now_ms) {
  if (scheduled_) return;
  scheduled_ = true;
  first_scheduled_ms_ = now_ms;
}

void RequestTiming::token(double now_ms) {
  if (tokens_ == 0) {
    first_token_ms_ = now_ms;
  } else {
    itl_ms_.push_back(static_cast<float>(now_ms - last_token_ms_));
  }
  last_token_ms_ = now_ms;
  ++tokens_;
}

std::optional<double> RequestTiming::tpot_ms() const {
  if (tokens_ < 2) return std::nullopt;
  return (last_token_ms_ - first_token_ms_) / static_cast<double>(tokens_ - 1);
}

Result make_result(const Request& request) {
  Result result;
  result.index = request.index;
  result.line = request.line;
  result.form = request.form;
  result.model = request.model;
  result.id = request.id;
  result.answer = request.answer;
  result.choices.resize(static_cast<size_t>(request.sampling.n));
  return result;
}

int64_t Result::completion_tokens() const {
  return std::accumulate(choices.begin(), choices.end(), int64_t{0},
                         [](int64_t sum, const Choice& choice) { return sum + choice.tokens(); });
}

namespace {

bool all_finite(const std::vector<TokenLogprob>& entries) {
  const auto entry_is_finite = [](const TokenLogprob& entry) {
    return std::isfinite(entry.logprob) &&
           std::all_of(entry.top.begin(), entry.top.end(),
                       [](const auto& pair) { return std::isfinite(pair.second); });
  };
  return std::all_of(entries.begin(), entries.end(), entry_is_finite);
}

bool all_finite(const std::optional<std::vector<TokenLogprob>>& entries) {
  return !entries || all_finite(*entries);
}

}  // namespace

bool is_finite(const Choice& choice) {
  return choice.logprob_hash.finite() && all_finite(choice.logprobs);
}

bool is_finite(const Result& result) {
  return all_finite(result.prompt_logprobs) &&
         (!result.echoed || all_finite(result.echoed->logprobs)) &&
         std::all_of(result.choices.begin(), result.choices.end(),
                     [](const Choice& choice) { return is_finite(choice); });
}

OrderedJson to_json(const Result& result) {
  for (const Choice& choice : result.choices)
    if (!choice.logprob_hash.finite()) finite(NAN, result, "logprob");
  if (result.form != Form::simple) return openai_record(result);
  OrderedJson record;
  record["id"] = result.id;
  record["index"] = result.index;
  record["status"] = "ok";
  const Choice* only = result.choices.size() == 1 ? &result.choices.front() : nullptr;
  if (only) {
    record["text"] = only->text ? OrderedJson(*only->text) : OrderedJson(nullptr);
    record["token_ids"] = only->token_ids;
    record["finish_reason"] = only->finish_reason;
    record["stop_reason"] = only->stop_reason;
  } else {
    record["choices"] = choices_json(result);
  }
  record["prompt_tokens"] = result.prompt_tokens;
  record["completion_tokens"] = result.completion_tokens();
  record["cached_tokens"] = result.cached_tokens;
  if (only) record["logprob_hash"] = only->logprob_hash.hex();
  if (result.answer) record["answer"] = *result.answer;
  if (result.prompt_token_ids) record["prompt_token_ids"] = *result.prompt_token_ids;
  if (only && only->logprobs) record["logprobs"] = logprobs_json(*only, result);
  if (result.prompt_logprobs) record["prompt_logprobs"] = prompt_logprobs_json(result);
  if (only) record["timing"] = timing_json(*only, result);
  return record;
}

OrderedJson to_json(const BadLine& bad) {
  if (bad.openai) return openai_record(bad);
  OrderedJson record;
  record["id"] = bad.id;
  record["index"] = bad.index;
  record["line"] = bad.line;
  record["status"] = "error";
  record["error"] = {{"code", bad.code}, {"message", bad.message}};
  if (bad.answer) record["answer"] = *bad.answer;
  return record;
}

}  // namespace mla
