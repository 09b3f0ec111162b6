#include "lib/batch/request_parse.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "lib/batch/request_fields.h"

namespace mla {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

std::optional<int64_t> ranged(const Json& object, const char* key, int64_t low, int64_t high,
                              std::string_view what) {
  const auto value = find_int(object, key, what);
  if (value && !(low <= *value && *value <= high)) {
    const std::string expected = high == kMaxInt
                                     ? fmt::format("an integer of at least {}", low)
                                     : fmt::format("an integer from {} to {}", low, high);
    refuse_field(key, expected, *value, what);
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

// A field that has to lie in [low, high].
void set_between(const Json& object, const char* key, int low, int high, float& target,
                 std::string_view what) {
  const auto value = find_number(object, key, what);
  if (!value) return;
  if (!(low <= *value && *value <= high))
    refuse_field(key, fmt::format("a number from {} to {}", low, high), *value, what);
  target = static_cast<float>(*value);
}

// The same for (0, high]; what is 0 as a float is too small.
void set_above_zero(const Json& object, const char* key, int high, float& target,
                    std::string_view what) {
  const auto value = find_number(object, key, what);
  if (!value) return;
  target = static_cast<float>(*value);
  if (!(target > 0 && *value <= high))
    refuse_field(key, fmt::format("a number above 0 and at most {}", high), *value, what);
}

// A key of logit_bias: the id in its shortest form, so that two keys are never one token.
std::optional<int32_t> token_key(std::string_view key, int64_t vocab_size) {
  const bool digits = key.find_first_not_of("0123456789") == std::string_view::npos;
  const bool shortest = key.size() == 1 || !key.starts_with('0');
  int32_t id = -1;
  const auto parsed = std::from_chars(key.data(), key.data() + key.size(), id);
  if (!digits || !shortest || parsed.ec != std::errc()) return std::nullopt;
  return id < vocab_size ? std::optional(id) : std::nullopt;
}

std::vector<std::pair<int32_t, float>> parse_logit_bias(const Json& object, int64_t vocab_size,
                                                        std::string_view what) {
  if (!object.is_object())
    refuse_field("logit_bias", "an object of token ids and numbers", object, what);
  std::vector<std::pair<int32_t, float>> biases;
  for (const auto& [key, bias] : object.items()) {
    const auto id = token_key(key, vocab_size);
    if (!id)
      fail("{}: field 'logit_bias': expected token ids from 0 to {} as keys, found \"{}\"", what,
           vocab_size - 1, key);
    if (!bias.is_number() || !(std::fabs(bias.get<double>()) <= 100))
      fail("{}: field 'logit_bias': token {}: expected a number from -100 to 100, found {}", what,
           *id, describe(bias));
    biases.emplace_back(*id, bias.get<float>());
  }
  std::sort(biases.begin(), biases.end());
  return biases;
}

std::vector<std::string> stop_strings(const Json& value, std::string_view what) {
  std::vector<std::string> stop;
  if (value.is_string()) {
    stop.push_back(value.get<std::string>());
  } else if (value.is_array()) {
    for (const Json& entry : value) {
      if (!entry.is_string())
        refuse_field("stop", "a string or a list of strings, each", entry, what);
      stop.push_back(entry.get<std::string>());
    }
  } else {
    refuse_field("stop", "a string or a list of strings", value, what);
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

// Of a chat in OpenAI's form: `logprobs` says whether, `top_logprobs` how many.
void parse_chat_logprobs(const Json& object, SamplingParams& p, std::string_view what) {
  const auto wanted = find_bool(object, "logprobs", what);
  const auto top = ranged(object, "top_logprobs", 0, kMaxLogprobs, what);
  if (top.value_or(0) > 0 && !wanted.value_or(false)) {
    fail("{}: field 'top_logprobs': expected logprobs to be true with it, found {}", what,
         wanted ? "false" : "no such field");
  }
  if (wanted && !*wanted) p.logprobs.reset();
  if (wanted && *wanted) p.logprobs = static_cast<int32_t>(top.value_or(0));
}

// What is echoed may be all.
void parse_lengths(const Json& object, bool chat, SamplingParams& p, std::string_view what) {
  const int64_t least = p.echo ? 0 : 1;
  const auto max_tokens = ranged(object, "max_tokens", least, kMaxInt, what);
  const auto completion = ranged(object, "max_completion_tokens", least, kMaxInt, what);
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

// Of the best of more than n choices nothing is known here; 1 is what clients say by default.
void parse_choices(const Json& object, SamplingParams& p, std::string_view what) {
  set_if(p.n, ranged(object, "n", 1, kMaxChoices, what));
  const auto best_of = ranged(object, "best_of", 1, kMaxInt, what);
  if (best_of && *best_of != 1 && *best_of != p.n)
    refuse_unsupported(
        what, fmt::format("field 'best_of': the number {} is not supported, expected n, {}",
                          *best_of, p.n));
}

// How the next token is drawn.
void parse_draw(const Json& object, const ReaderOptions& options, SamplingParams& p,
                std::string_view what) {
  if (const auto t = find_number(object, "temperature", what)) {
    p.temperature = static_cast<float>(*t);
    if (!(*t >= 0) || !std::isfinite(p.temperature))
      refuse_field("temperature", "a finite number of at least 0", *t, what);
  }
  set_above_zero(object, "top_p", 1, p.top_p, what);
  set_if(p.top_k, ranged(object, "top_k", -1, kMaxInt, what));
  set_between(object, "min_p", 0, 1, p.min_p, what);
  set_between(object, "presence_penalty", -2, 2, p.presence_penalty, what);
  set_between(object, "frequency_penalty", -2, 2, p.frequency_penalty, what);
  set_above_zero(object, "repetition_penalty", 2, p.repetition_penalty, what);
  if (const Json* bias = find_field(object, "logit_bias"))
    p.logit_bias = parse_logit_bias(*bias, options.vocab_size, what);
  // -1 is no seed, as vLLM has it.
  if (const auto seed = find_int(object, "seed", what))
    p.seed = *seed == -1 ? std::nullopt : std::optional(*seed);
}

SamplingParams parse_sampling(const Json& object, Form form, bool chat,
                              const ReaderOptions& options, std::string_view what) {
  SamplingParams p = options.defaults;
  if (form == Form::completion) p.echo = find_bool(object, "echo", what).value_or(false);
  parse_draw(object, options, p, what);
  parse_choices(object, p, what);
  parse_lengths(object, chat, p, what);
  if (const Json* stop = find_field(object, "stop")) p.stop = stop_strings(*stop, what);
  if (const Json* ids = find_field(object, "stop_token_ids")) {
    if (!ids->is_array()) refuse_field("stop_token_ids", "a list of token ids", *ids, what);
    p.stop_token_ids = token_ids(*ids, "stop_token_ids", options.vocab_size, what);
  }
  if (const auto ignore = find_bool(object, "ignore_eos", what)) p.ignore_eos = *ignore;
  set_if(p.prompt_logprobs, ranged(object, "prompt_logprobs", 0, kMaxLogprobs, what));
  if (const auto ids = find_bool(object, "return_token_ids", what)) p.return_token_ids = *ids;
  if (form == Form::chat) {
    parse_chat_logprobs(object, p, what);
  } else {
    set_if(p.logprobs, ranged(object, "logprobs", 0, kMaxLogprobs, what));
  }
  return p;
}

// A string, or a list of text parts, which are lines of one text as vLLM has it.
std::string parse_content(const Json& message, std::string_view what) {
  const Json* content = message.is_object() ? find_field(message, "content") : nullptr;
  if (!content || !content->is_array()) return get_string(message, "content", what);
  if (content->empty()) fail("{}: field 'content': expected at least one part, found none", what);
  std::string text;
  for (size_t i = 0; i < content->size(); ++i) {
    const std::string where = fmt::format("{}: field 'content': part {}", what, i);
    const std::string type = get_string((*content)[i], "type", where);
    if (type != "text")
      refuse_unsupported(where, fmt::format("expected the type \"text\", found \"{}\"", type));
    if (i > 0) text += '\n';
    text += get_string((*content)[i], "text", where);
  }
  return text;
}

std::vector<ChatMessage> parse_messages(const Json& list, std::string_view what) {
  if (!list.is_array()) refuse_field("messages", "a list of messages", list, what);
  if (list.empty()) fail("{}: field 'messages': expected at least one message, found none", what);
  std::vector<ChatMessage> messages;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string where = fmt::format("{}: message {}", what, i);
    for (const char* key : {"tool_calls", "function_call"}) {
      if (list[i].is_object() && find_field(list[i], key))
        refuse_unsupported(where, fmt::format("field '{}' is not supported", key));
    }
    messages.push_back({get_string(list[i], "role", where), parse_content(list[i], where)});
  }
  return messages;
}

// OpenAI's prompt may be a list of prompts; a line of a batch has one.
const Json& only_prompt(const Json& prompt, std::string_view what) {
  if (!prompt.is_array() || prompt.empty() || prompt[0].is_number()) return prompt;
  if (!prompt[0].is_string() && !prompt[0].is_array()) return prompt;
  if (prompt.size() > 1) {
    refuse_unsupported(what, fmt::format("field 'prompt': expected one prompt, found a list of {}",
                                         prompt.size()));
  }
  return prompt[0];
}

Prompt parse_text_or_tokens(const Json& prompt, const ReaderOptions& options,
                            std::string_view what) {
  if (!prompt.is_string() && !prompt.is_array())
    refuse_field("prompt", "a string or a list of token ids", prompt, what);
  const bool empty =
      prompt.is_string() ? prompt.get_ref<const std::string&>().empty() : prompt.empty();
  if (empty) fail("{}: field 'prompt': expected at least one token, found an empty prompt", what);
  if (prompt.is_string()) return prompt.get<std::string>();
  return token_ids(prompt, "prompt", options.vocab_size, what);
}

Prompt parse_prompt(const Json& object, Form form, const ReaderOptions& options,
                    std::string_view what) {
  const Json* prompt = find_field(object, "prompt");
  const Json* messages = find_field(object, "messages");
  if (form != Form::simple) {
    const bool chat = form == Form::chat;
    const char* key = chat ? "messages" : "prompt";
    if (!(chat ? messages : prompt) || (chat ? prompt : messages)) {
      fail("{}: field '{}': expected it and no '{}', found {}", what, key,
           chat ? "prompt" : "messages",
           prompt && messages ? "both"
           : prompt           ? "'prompt'"
           : messages         ? "'messages'"
                              : "neither");
    }
    if (chat) return parse_messages(*messages, what);
    return parse_text_or_tokens(only_prompt(*prompt, what), options, what);
  }
  if (!prompt == !messages) {
    fail("{}: expected one of the fields 'prompt' and 'messages', found {}", what,
         prompt ? "both" : "neither");
  }
  return messages ? Prompt(parse_messages(*messages, what))
                  : parse_text_or_tokens(*prompt, options, what);
}

// What a checkpoint without tokenizer.json cannot serve.
void check_tokens_only(const Request& request, std::string_view what) {
  const char* reason = "because the checkpoint has no tokenizer.json";
  if (!std::holds_alternative<std::vector<int32_t>>(request.prompt)) {
    const bool chat = std::holds_alternative<std::vector<ChatMessage>>(request.prompt);
    fail("{}: field '{}': expected token ids, {}, found text", what, chat ? "messages" : "prompt",
         reason);
  }
  if (!request.sampling.stop.empty())
    fail("{}: field 'stop': expected none, {}, found {}", what, reason,
         request.sampling.stop.size());
}

}  // namespace

Json parse_id(const Json& object, int64_t line, std::string_view what) {
  const Json* id = find_field(object, "id");
  if (!id) return line;
  if (!id->is_string() && !id->is_number_integer())
    refuse_field("id", "a string or an integer", *id, what);
  return *id;
}

bool is_openai_line(const Json& object) {
  return object.contains("custom_id") || object.contains("method") || object.contains("url") ||
         object.contains("body");
}

Json parse_custom_id(const Json& object, std::string_view what) {
  return get_string(object, "custom_id", what);
}

Form parse_url(const Json& object, std::string_view what) {
  const std::string method = get_string(object, "method", what);
  if (method != "POST") fail("{}: field 'method': expected \"POST\", found \"{}\"", what, method);
  const std::string url = get_string(object, "url", what);
  const bool chat = url == "/v1/chat/completions";
  if (!chat && url != "/v1/completions") {
    fail("{}: field 'url': expected \"/v1/completions\" or \"/v1/chat/completions\", found \"{}\"",
         what, url);
  }
  const Json* body = find_field(object, "body");
  if (!body) fail("{}: field 'body': expected an object, found nothing", what);
  if (!body->is_object()) refuse_field("body", "an object", *body, what);
  return chat ? Form::chat : Form::completion;
}

Request parse_request(const Json& body, Form form, const ReaderOptions& options,
                      std::string_view what) {
  check_unserved(body, form, options.defaults.add_bos, what);
  Request request;
  request.prompt = parse_prompt(body, form, options, what);
  const bool chat = std::holds_alternative<std::vector<ChatMessage>>(request.prompt);
  request.sampling = parse_sampling(body, form, chat, options, what);
  request.answer = find_string(body, "answer", what);
  if (!options.has_tokenizer) check_tokens_only(request, what);
  return request;
}

}  // namespace mla
