#include "lib/batch/request_parse.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace mla {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

// Fields of other programs that would change the answer. They are served by saying nothing, or the
// value that has no effect; anything else is refused rather than passed over.
enum class Kind { number, boolean, empty, nothing };
struct Unserved {
  const char* name;
  Kind kind;
  double neutral;  // of a number; 0 or 1 of a boolean
};
constexpr Unserved kUnserved[] = {
    {"n", Kind::number, 1},
    {"best_of", Kind::number, 1},
    {"presence_penalty", Kind::number, 0},
    {"frequency_penalty", Kind::number, 0},
    {"repetition_penalty", Kind::number, 1},
    {"length_penalty", Kind::number, 1},
    {"min_p", Kind::number, 0},
    {"stream", Kind::boolean, 0},
    {"echo", Kind::boolean, 0},
    {"use_beam_search", Kind::boolean, 0},
    {"include_stop_str_in_output", Kind::boolean, 0},
    {"continue_final_message", Kind::boolean, 0},
    {"skip_special_tokens", Kind::boolean, 1},
    {"add_generation_prompt", Kind::boolean, 1},
    {"logit_bias", Kind::empty, 0},
    {"suffix", Kind::empty, 0},
    {"tools", Kind::empty, 0},
    {"bad_words", Kind::empty, 0},
    {"tool_choice", Kind::nothing, 0},
    {"response_format", Kind::nothing, 0},
    {"structured_outputs", Kind::nothing, 0},
    {"guided_json", Kind::nothing, 0},
    {"guided_regex", Kind::nothing, 0},
    {"guided_choice", Kind::nothing, 0},
    {"guided_grammar", Kind::nothing, 0},
    {"allowed_token_ids", Kind::nothing, 0},
    {"truncate_prompt_tokens", Kind::nothing, 0},
    {"prompt_logprobs", Kind::nothing, 0},
    {"top_logprobs", Kind::nothing, 0},
    {"chat_template", Kind::nothing, 0},
    {"add_special_tokens", Kind::nothing, 0},
};

const std::set<std::string, std::less<>>& served_fields() {
  static const std::set<std::string, std::less<>> names = {
      "id",         "prompt",      "messages",      "answer", "max_tokens", "max_completion_tokens",
      "min_tokens", "temperature", "top_k",         "top_p",  "seed",       "stop",
      "ignore_eos", "logprobs",    "stop_token_ids"};
  return names;
}

const Json* field(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

[[noreturn]] void refuse(const char* key, const std::string& expected, const Json& found,
                         std::string_view what) {
  fail("{}: field '{}': expected {}, found {}", what, key, expected, describe(found));
}

[[noreturn]] void refuse_unsupported(std::string_view what, const std::string& message) {
  throw RequestError(error_code::kUnsupported, fmt::format("{}: {}", what, message));
}

void check_unserved(const Json& object, std::string_view what) {
  for (const Unserved& known : kUnserved) {
    const Json* value = field(object, known.name);
    if (!value) continue;
    const bool boolean = known.kind == Kind::boolean;
    if (known.kind == Kind::number && !value->is_number())
      refuse(known.name, "a number", *value, what);
    if (boolean && !value->is_boolean()) refuse(known.name, "true or false", *value, what);
    if (known.kind == Kind::number && value->get<double>() == known.neutral) continue;
    if (boolean && value->get<bool>() == (known.neutral != 0)) continue;
    const bool empty = value->is_string() ? value->get_ref<const std::string&>().empty()
                                          : value->is_structured() && value->empty();
    if (known.kind == Kind::empty && empty) continue;
    std::string neutral = "no such field";
    if (known.kind == Kind::number) neutral = fmt::format("{}", known.neutral);
    if (boolean) neutral = known.neutral != 0 ? "true" : "false";
    refuse_unsupported(what, fmt::format("field '{}': {} is not supported, expected {}", known.name,
                                         describe(*value), neutral));
  }
}

std::optional<int64_t> ranged(const Json& object, const char* key, int64_t low, int64_t high,
                              std::string_view what) {
  const auto value = find_int(object, key, what);
  if (value && !(low <= *value && *value <= high)) {
    const std::string expected = high == kMaxInt
                                     ? fmt::format("an integer of at least {}", low)
                                     : fmt::format("an integer from {} to {}", low, high);
    refuse(key, expected, *value, what);
  }
  return value;
}

template <class T>
void set_if(T& target, std::optional<int64_t> value) {
  if (value) target = static_cast<int32_t>(*value);
}

std::vector<int32_t> token_ids(const Json& list, const char* key, int64_t vocab_size,
                               std::string_view what) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const Json& id = list[i];
    const bool fits = id.is_number_integer() &&
                      !(id.is_number_unsigned() && id.get<uint64_t>() > uint64_t{kMaxInt}) &&
                      0 <= id.get<int64_t>() && id.get<int64_t>() < vocab_size;
    if (!fits) {
      fail("{}: field '{}': entry {}: expected a token id from 0 to {}, found {}", what, key, i,
           vocab_size - 1, describe(id));
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

std::vector<std::string> stop_strings(const Json& value, std::string_view what) {
  std::vector<std::string> stop;
  if (value.is_string()) {
    stop.push_back(value.get<std::string>());
  } else if (value.is_array()) {
    for (const Json& entry : value) {
      if (!entry.is_string()) refuse("stop", "a string or a list of strings, each", entry, what);
      stop.push_back(entry.get<std::string>());
    }
  } else {
    refuse("stop", "a string or a list of strings", value, what);
  }
  if (stop.size() > kMaxStopStrings) {
    fail("{}: field 'stop': expected at most {} strings, found {}", what, kMaxStopStrings,
         stop.size());
  }
  for (const std::string& s : stop) {
    if (s.empty()) fail("{}: field 'stop': expected strings that are not empty, found \"\"", what);
  }
  return stop;
}

void parse_lengths(const Json& object, bool chat, SamplingParams& p, std::string_view what) {
  const auto max_tokens = ranged(object, "max_tokens", 1, kMaxInt, what);
  const auto completion = ranged(object, "max_completion_tokens", 1, kMaxInt, what);
  if (max_tokens && completion && *max_tokens != *completion) {
    fail("{}: expected max_tokens and max_completion_tokens to be one number, found {} and {}",
         what, *max_tokens, *completion);
  }
  set_if(p.max_tokens, max_tokens ? max_tokens : completion);
  if (!p.max_tokens && !chat) p.max_tokens = kDefaultMaxTokens;
  set_if(p.min_tokens, ranged(object, "min_tokens", 0, kMaxInt, what));
  if (p.max_tokens && p.min_tokens > *p.max_tokens) {
    fail("{}: field 'min_tokens': expected at most max_tokens, {}, found {}", what, *p.max_tokens,
         p.min_tokens);
  }
}

SamplingParams parse_sampling(const Json& object, bool chat, const ReaderOptions& options,
                              std::string_view what) {
  SamplingParams p = options.defaults;
  if (const auto t = find_number(object, "temperature", what)) {
    p.temperature = static_cast<float>(*t);
    if (!(*t >= 0) || !std::isfinite(p.temperature))
      refuse("temperature", "a finite number of at least 0", *t, what);
  }
  if (const auto top_p = find_number(object, "top_p", what)) {
    p.top_p = static_cast<float>(*top_p);
    if (!(p.top_p > 0 && *top_p <= 1))
      refuse("top_p", "a number above 0 and at most 1", *top_p, what);
  }
  set_if(p.top_k, ranged(object, "top_k", -1, kMaxInt, what));
  parse_lengths(object, chat, p, what);
  if (const auto seed = find_int(object, "seed", what)) p.seed = seed;
  if (const Json* stop = field(object, "stop")) p.stop = stop_strings(*stop, what);
  if (const Json* ids = field(object, "stop_token_ids")) {
    if (!ids->is_array()) refuse("stop_token_ids", "a list of token ids", *ids, what);
    p.stop_token_ids = token_ids(*ids, "stop_token_ids", options.vocab_size, what);
  }
  if (const auto ignore = find_bool(object, "ignore_eos", what)) p.ignore_eos = *ignore;
  set_if(p.logprobs, ranged(object, "logprobs", 0, kMaxLogprobs, what));
  return p;
}

std::vector<ChatMessage> parse_messages(const Json& list, std::string_view what) {
  if (!list.is_array()) refuse("messages", "a list of messages", list, what);
  if (list.empty()) fail("{}: field 'messages': expected at least one message, found none", what);
  std::vector<ChatMessage> messages;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string where = fmt::format("{}: message {}", what, i);
    for (const char* key : {"tool_calls", "function_call"}) {
      if (list[i].is_object() && field(list[i], key))
        refuse_unsupported(where, fmt::format("field '{}' is not supported", key));
    }
    messages.push_back({get_string(list[i], "role", where), get_string(list[i], "content", where)});
  }
  return messages;
}

Prompt parse_prompt(const Json& object, const ReaderOptions& options, std::string_view what) {
  const Json* prompt = field(object, "prompt");
  const Json* messages = field(object, "messages");
  if (!prompt == !messages) {
    fail("{}: expected one of the fields 'prompt' and 'messages', found {}", what,
         prompt ? "both" : "neither");
  }
  if (messages) return parse_messages(*messages, what);
  if (!prompt->is_string() && !prompt->is_array())
    refuse("prompt", "a string or a list of token ids", *prompt, what);
  const bool empty =
      prompt->is_string() ? prompt->get_ref<const std::string&>().empty() : prompt->empty();
  if (empty) fail("{}: field 'prompt': expected at least one token, found an empty prompt", what);
  if (prompt->is_string()) return prompt->get<std::string>();
  return token_ids(*prompt, "prompt", options.vocab_size, what);
}

}  // namespace

Json parse_id(const Json& object, int64_t line, std::string_view what) {
  const Json* id = field(object, "id");
  if (!id) id = field(object, "custom_id");
  if (!id) return line;
  if (!id->is_string() && !id->is_number_integer())
    refuse("id", "a string or an integer", *id, what);
  return *id;
}

Request parse_request(const Json& object, const ReaderOptions& options, std::string_view what) {
  for (const char* key : {"custom_id", "url", "method", "body"}) {
    if (object.contains(key)) {
      refuse_unsupported(what, fmt::format("field '{}': the OpenAI batch form is not supported, "
                                           "expected 'id' and 'prompt' or 'messages'",
                                           key));
    }
  }
  check_unserved(object, what);
  Request request;
  request.prompt = parse_prompt(object, options, what);
  const bool tokens = std::holds_alternative<std::vector<int32_t>>(request.prompt);
  const bool chat = std::holds_alternative<std::vector<ChatMessage>>(request.prompt);
  request.sampling = parse_sampling(object, chat, options, what);
  request.answer = find_string(object, "answer", what);
  if (!options.has_tokenizer && !tokens) {
    fail(
        "{}: field '{}': expected token ids, because the checkpoint has no tokenizer.json, found "
        "text",
        what, chat ? "messages" : "prompt");
  }
  if (!options.has_tokenizer && !request.sampling.stop.empty()) {
    fail("{}: field 'stop': expected none, because the checkpoint has no tokenizer.json, found {}",
         what, request.sampling.stop.size());
  }
  return request;
}

std::vector<std::string> unknown_field_names(const Json& object) {
  std::set<std::string> names;
  for (const auto& [name, value] : object.items()) {
    const bool unserved = std::any_of(std::begin(kUnserved), std::end(kUnserved),
                                      [&](const Unserved& known) { return name == known.name; });
    if (!served_fields().contains(name) && !unserved) names.insert(name);
    if (name != "messages" || !value.is_array()) continue;
    for (const Json& message : value) {
      if (!message.is_object()) continue;
      for (const auto& [inner, ignored] : message.items())
        if (inner != "role" && inner != "content") names.insert("messages[]." + inner);
    }
  }
  return {names.begin(), names.end()};
}

}  // namespace mla
