// What a finished request gives, its timing, and its output record.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/batch/hash.h"
#include "lib/batch/request.h"

namespace mla {

// Log-softmax of the raw fp32 logits, natural log.
struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;  // [k], best first; k of the request, 0 allowed
};

// Moments of a choice, in milliseconds of one monotonic clock that the caller reads.
class RequestTiming {
 public:
  void arrive(double now_ms) { arrival_ms_ = now_ms; }
  // The first step that runs prompt tokens for it; later calls change nothing.
  void schedule(double now_ms);
  // One call a generated token, when the host has it; also where only the prompt was asked for.
  void token(double now_ms);

  int32_t prefill_chunks = 0;

  int64_t tokens() const { return tokens_; }
  double queue_ms() const { return first_scheduled_ms_ - arrival_ms_; }
  double prefill_ms() const { return first_token_ms_ - first_scheduled_ms_; }
  double ttft_ms() const { return first_token_ms_ - arrival_ms_; }
  double e2e_ms() const { return last_token_ms_ - arrival_ms_; }
  std::optional<double> tpot_ms() const;  // (last - first) / (tokens - 1); absent for one token
  const std::vector<float>& itl_ms() const { return itl_ms_; }  // [tokens - 1]

 private:
  double arrival_ms_ = 0, first_scheduled_ms_ = 0, first_token_ms_ = 0, last_token_ms_ = 0;
  bool scheduled_ = false;
  int64_t tokens_ = 0;
  std::vector<float> itl_ms_;
};

// One of the texts that a request asked for.
struct Choice {
  std::optional<std::string> text;  // absent (null in the record) without a tokenizer
  std::vector<int32_t> token_ids;   // with a final EOS or stop token
  std::string finish_reason;        // "stop" or "length"
  Json stop_reason;                 // null for EOS and length, else the stop string or the id
  LogprobHash logprob_hash;         // of the chosen tokens' logprobs, one add() a token
  std::optional<std::vector<TokenLogprob>> logprobs;  // [token_ids.size()] where asked for
  RequestTiming timing;

  int64_t tokens() const { return static_cast<int64_t>(token_ids.size()); }
};

// The prompt in front of the logprobs of a completion, where an echo and logprobs are asked for.
struct EchoedPrompt {
  std::vector<int32_t> token_ids;  // [prompt_tokens]
  // [prompt_tokens]: the bytes that each token gives the text. None for what the text does not
  // have: a BOS that was put in front, special tokens among token ids.
  std::vector<std::string> pieces;
  std::vector<TokenLogprob> logprobs;  // [prompt_tokens - 1], of all but the first
};

struct Result {
  int64_t index = 0;
  int64_t line = 0;
  Form form = Form::simple;
  Json id;
  std::string model;                         // as Request::model
  std::vector<Choice> choices = {Choice()};  // [n] of the request
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;
  std::optional<std::string> answer;
  std::optional<std::vector<int32_t>> prompt_token_ids;
  // [prompt_tokens - 1] where asked for: nothing comes before the first token.
  std::optional<std::vector<TokenLogprob>> prompt_logprobs;
  std::optional<EchoedPrompt> echoed;
  // What an OpenAI record says beside: the bytes of every token that logprobs and `echoed` name,
  // where there is a tokenizer, and when the request ended, in seconds since 1970.
  std::map<int32_t, std::string> token_bytes;
  std::set<int32_t> without_text;  // special tokens among them: a choice's text has none of theirs
  int64_t created = 0;

  int64_t completion_tokens() const;  // of all choices
};

// A result with the request's index, line, form, id, model and answer, and n empty choices.
Result make_result(const Request& request);

// False when a logprob is NaN or infinite: such a request must be written as an error record with
// error_code::kNotFinite instead.
bool is_finite(const Result& result);
bool is_finite(const Choice& choice);

// The record of outputs.jsonl, in the form of its line. What belongs to a choice stands in the
// record itself where there is one, else in the list `choices`; OpenAI's form always has the list,
// and its body has the timing of a single choice. Logprobs read back to the same fp32 bits;
// timings are rounded to a microsecond. Throws Error when a number is not finite: NaN is never
// printed.
OrderedJson to_json(const Result& result);
OrderedJson to_json(const BadLine& bad);

// Parts of a record that both forms have.
OrderedJson timing_json(const Choice& choice, const Result& result);
OrderedJson prompt_logprobs_json(const Result& result);     // of result.prompt_logprobs
double exact_logprob(float logprob, const Result& result);  // throws Error where it is not finite

}  // namespace mla
