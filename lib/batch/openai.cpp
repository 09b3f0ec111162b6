#include "lib/batch/openai.h"

#include <utility>

#include "lib/base/error.h"
#include "lib/text/utf8.h"

namespace mla {
namespace {

// Of a token without a text: there is no tokenizer. vLLM's name.
std::string bytes_of(const Result& result, int32_t token) {
  const auto it = result.token_bytes.find(token);
  return it == result.token_bytes.end() ? fmt::format("token_id:{}", token) : it->second;
}

// The k best by token text. The chosen one always has its place, so there may be k + 1.
OrderedJson best_by_text(const Result& result, const TokenLogprob& entry) {
  OrderedJson best = OrderedJson::object();
  const auto add = [&](int32_t token, float logprob) {
    const std::string text = token_text(bytes_of(result, token));
    if (!best.contains(text)) best[text] = exact_logprob(logprob, result);
  };
  for (const auto& [token, logprob] : entry.top) add(token, logprob);
  add(entry.token, entry.logprob);
  return best;
}

// The lists of a completion's logprobs, token by token.
struct CompletionLogprobs {
  OrderedJson tokens = OrderedJson::array(), logprobs = OrderedJson::array(),
              top = OrderedJson::array(), offsets = OrderedJson::array();

  // `offset`: where the token begins in the choice's text, in characters.
  void add(const Result& result, int32_t token, const TokenLogprob* entry, int64_t offset) {
    tokens.push_back(token_text(bytes_of(result, token)));
    logprobs.push_back(entry ? OrderedJson(exact_logprob(entry->logprob, result))
                             : OrderedJson(nullptr));
    top.push_back(entry ? best_by_text(result, *entry) : OrderedJson(nullptr));
    offsets.push_back(offset);
  }
};

// With an echo the prompt's tokens come first; nothing is before the first one, which has null.
OrderedJson completion_logprobs(const Choice& choice, const Result& result) {
  CompletionLogprobs lists;
  int64_t prompt_end = 0;
  if (result.echoed) {
    const EchoedPrompt& prompt = *result.echoed;
    const std::vector<int64_t> offsets = character_offsets(prompt.pieces);
    for (size_t i = 0; i < prompt.token_ids.size(); ++i)
      lists.add(result, prompt.token_ids[i], i == 0 ? nullptr : &prompt.logprobs[i - 1],
                offsets[i]);
    prompt_end = offsets.back();
  }
  std::vector<std::string> pieces;
  for (const TokenLogprob& entry : *choice.logprobs)
    pieces.push_back(result.without_text.count(entry.token) ? "" : bytes_of(result, entry.token));
  const std::vector<int64_t> offsets = character_offsets(pieces);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const TokenLogprob& entry = (*choice.logprobs)[i];
    lists.add(result, entry.token, &entry, prompt_end + offsets[i]);
  }
  return {{"text_offset", std::move(lists.offsets)},
          {"token_logprobs", std::move(lists.logprobs)},
          {"tokens", std::move(lists.tokens)},
          {"top_logprobs", std::move(lists.top)}};
}

OrderedJson chat_token(const Result& result, int32_t token, float logprob) {
  const std::string bytes = bytes_of(result, token);
  OrderedJson numbers = OrderedJson::array();
  for (const char c : bytes) numbers.push_back(static_cast<uint8_t>(c));
  return {{"token", token_text(bytes)},
          {"logprob", exact_logprob(logprob, result)},
          {"bytes", std::move(numbers)}};
}

OrderedJson chat_logprobs(const Choice& choice, const Result& result) {
  OrderedJson content = OrderedJson::array();
  for (const TokenLogprob& entry : *choice.logprobs) {
    OrderedJson top = OrderedJson::array();
    for (const auto& [token, logprob] : entry.top)
      top.push_back(chat_token(result, token, logprob));
    content.push_back(chat_token(result, entry.token, entry.logprob));
    content.back()["top_logprobs"] = std::move(top);
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

OrderedJson openai_choice(const Choice& choice, size_t index, const Result& result) {
  const bool chat = result.form == Form::chat;
  OrderedJson text = choice.text ? OrderedJson(*choice.text) : OrderedJson(nullptr);
  OrderedJson j;
  j["index"] = index;
  if (chat) {
    j["message"] = {{"role", "assistant"}, {"content", std::move(text)}, {"refusal", nullptr}};
  } else {
    j["text"] = std::move(text);
  }
  j["logprobs"] = !choice.logprobs ? OrderedJson(nullptr)
                  : chat           ? chat_logprobs(choice, result)
                                   : completion_logprobs(choice, result);
  j["finish_reason"] = choice.finish_reason;
  j["stop_reason"] = choice.stop_reason;
  j["token_ids"] = choice.token_ids;
  j["logprob_hash"] = choice.logprob_hash.hex();
  if (result.choices.size() > 1) j["timing"] = timing_json(choice, result);
  return j;
}

OrderedJson usage_json(const Result& result) {
  const int64_t completion = result.completion_tokens();
  return {{"prompt_tokens", result.prompt_tokens},
          {"completion_tokens", completion},
          {"total_tokens", result.prompt_tokens + completion},
          {"prompt_tokens_details", {{"cached_tokens", result.cached_tokens}}}};
}

OrderedJson body_json(const Result& result) {
  const bool chat = result.form == Form::chat;
  OrderedJson body;
  body["id"] = fmt::format("{}-{}", chat ? "chatcmpl" : "cmpl", result.index);
  body["object"] = chat ? "chat.completion" : "text_completion";
  body["created"] = result.created;
  body["model"] = result.model;
  body["choices"] = OrderedJson::array();
  for (size_t i = 0; i < result.choices.size(); ++i)
    body["choices"].push_back(openai_choice(result.choices[i], i, result));
  body["usage"] = usage_json(result);
  if (result.prompt_token_ids) body["prompt_token_ids"] = *result.prompt_token_ids;
  if (result.prompt_logprobs) body["prompt_logprobs"] = prompt_logprobs_json(result);
  if (result.answer) body["answer"] = *result.answer;
  body["index"] = result.index;
  if (result.choices.size() == 1) body["timing"] = timing_json(result.choices.front(), result);
  return body;
}

OrderedJson envelope(int64_t index, const Json& id, int status, OrderedJson body) {
  OrderedJson record;
  record["id"] = fmt::format("batch_req_{}", index);
  record["custom_id"] = id;
  record["response"] = {{"status_code", status}, {"request_id", fmt::format("req_{}", index)}};
  record["response"]["body"] = std::move(body);
  record["error"] = nullptr;
  return record;
}

// The field that a message of this program names: "line 7: body: field 'top_p': expected …".
OrderedJson field_named_in(std::string_view message) {
  constexpr std::string_view kField = "field '";
  const size_t at = message.find(kField);
  if (at == std::string_view::npos) return nullptr;
  const std::string_view rest = message.substr(at + kField.size());
  const size_t end = rest.find('\'');
  if (end == std::string_view::npos) return nullptr;
  return std::string(rest.substr(0, end));
}

}  // namespace

std::string token_text(std::string_view bytes) {
  if (find_invalid_utf8(bytes) == std::string_view::npos) return std::string(bytes);
  std::string text = "bytes:";
  for (const char c : bytes) text += fmt::format("\\x{:02x}", static_cast<uint8_t>(c));
  return text;
}

OrderedJson openai_record(const Result& result) {
  return envelope(result.index, result.id, 200, body_json(result));
}

OrderedJson openai_record(const BadLine& bad) {
  OrderedJson error = {{"message", bad.message}, {"type", "invalid_request_error"}};
  error["param"] = field_named_in(bad.message);
  error["code"] = bad.code;
  OrderedJson body;
  body["error"] = std::move(error);
  body["index"] = bad.index;
  body["line"] = bad.line;
  if (bad.answer) body["answer"] = *bad.answer;
  return envelope(bad.index, bad.id, 400, std::move(body));
}

bool is_openai_record(const Json& record) {
  return record.is_object() && record.contains("custom_id");
}

const Json& openai_body(const Json& record, std::string_view what) {
  const auto response = record.find("response");
  if (response == record.end() || !response->is_object())
    fail("{}: field 'response': expected an object", what);
  const auto body = response->find("body");
  if (body == response->end() || !body->is_object())
    fail("{}: field 'response': expected an object with a body", what);
  return *body;
}

int64_t record_index(const Json& record, std::string_view what) {
  return get_int(is_openai_record(record) ? openai_body(record, what) : record, "index", what);
}

bool record_ok(const Json& record, std::string_view what) {
  if (is_openai_record(record)) return !openai_body(record, what).contains("error");
  const std::string status = get_string(record, "status", what);
  if (status != "ok" && status != "error")
    fail("{}: field 'status': expected \"ok\" or \"error\", found \"{}\"", what, status);
  return status == "ok";
}

}  // namespace mla
