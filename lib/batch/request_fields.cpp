#include "lib/batch/request_fields.h"

#include <algorithm>
#include <set>

namespace mla {
namespace {

using Names = std::set<std::string, std::less<>>;

// Fields of other programs that would change the answer. They are served by saying nothing, or the
// value that has no effect; anything else is refused rather than passed over.
enum class Kind { number, boolean, empty, nothing, choice, special_tokens, text_format, text_only };
struct Unserved {
  const char* name;
  Kind kind;
  double neutral;  // of a number; 0 or 1 of a boolean
};
constexpr Unserved kUnserved[] = {
    {"length_penalty", Kind::number, 1},
    {"stream", Kind::boolean, 0},
    {"echo", Kind::boolean, 0},
    {"use_beam_search", Kind::boolean, 0},
    {"include_stop_str_in_output", Kind::boolean, 0},
    {"continue_final_message", Kind::boolean, 0},
    {"skip_special_tokens", Kind::boolean, 1},
    {"add_generation_prompt", Kind::boolean, 1},
    {"suffix", Kind::empty, 0},
    {"tools", Kind::empty, 0},
    {"functions", Kind::empty, 0},
    {"bad_words", Kind::empty, 0},
    {"tool_choice", Kind::choice, 0},
    {"function_call", Kind::choice, 0},
    {"audio", Kind::nothing, 0},
    {"modalities", Kind::text_only, 0},
    {"response_format", Kind::text_format, 0},
    {"structured_outputs", Kind::nothing, 0},
    {"guided_json", Kind::nothing, 0},
    {"guided_regex", Kind::nothing, 0},
    {"guided_choice", Kind::nothing, 0},
    {"guided_grammar", Kind::nothing, 0},
    {"allowed_token_ids", Kind::nothing, 0},
    {"truncate_prompt_tokens", Kind::nothing, 0},
    {"top_logprobs", Kind::number, 0},
    {"return_tokens_as_token_ids", Kind::boolean, 0},
    {"logprob_token_ids", Kind::nothing, 0},
    {"thinking_token_budget", Kind::nothing, 0},
    {"repetition_detection", Kind::nothing, 0},
    {"chat_template", Kind::nothing, 0},
    {"add_special_tokens", Kind::special_tokens, 0},
};

// Fields of an OpenAI body that say nothing about the answer.
const Names& ignored_fields() {
  static const Names names = {
      "model",        "user",           "metadata",          "store",
      "service_tier", "stream_options", "safety_identifier", "parallel_tool_calls",
      "request_id",   "priority",       "prompt_cache_key"};
  return names;
}

bool is_served(std::string_view name, Form form) {
  static const Names all = {"answer",
                            "max_tokens",
                            "max_completion_tokens",
                            "min_tokens",
                            "top_k",
                            "temperature",
                            "top_p",
                            "min_p",
                            "presence_penalty",
                            "frequency_penalty",
                            "repetition_penalty",
                            "logit_bias",
                            "n",
                            "best_of",
                            "seed",
                            "stop",
                            "stop_token_ids",
                            "ignore_eos",
                            "logprobs",
                            "return_token_ids",
                            "prompt_logprobs"};
  if (all.contains(name)) return true;
  if (name == "prompt") return form != Form::chat;
  if (name == "messages") return form != Form::completion;
  if (name == "top_logprobs") return form == Form::chat;
  if (name == "echo") return form == Form::completion;
  if (name == "id") return form == Form::simple;
  return form != Form::simple && ignored_fields().contains(name);
}

bool is_neutral(const Unserved& known, const Json& value, bool special_tokens) {
  switch (known.kind) {
    case Kind::number:
      return value.get<double>() == known.neutral;
    case Kind::boolean:
      return value.get<bool>() == (known.neutral != 0);
    case Kind::empty:
      return value.is_string() ? value.get_ref<const std::string&>().empty()
                               : value.is_structured() && value.empty();
    case Kind::choice:  // there are no tools to choose from
      return value == "none" || value == "auto";
    case Kind::special_tokens:
      return value == special_tokens;
    case Kind::text_format:
      return value == Json{{"type", "text"}};
    case Kind::text_only:
      return value == Json::array({"text"});
    case Kind::nothing:
      return false;
  }
  return false;
}

std::string neutral_text(const Unserved& known, bool special_tokens) {
  if (known.kind == Kind::number) return fmt::format("{}", known.neutral);
  if (known.kind == Kind::boolean) return known.neutral != 0 ? "true" : "false";
  if (known.kind == Kind::choice) return R"("none" or "auto")";
  if (known.kind == Kind::special_tokens) return special_tokens ? "true" : "false";
  if (known.kind == Kind::text_format) return R"({"type":"text"})";
  if (known.kind == Kind::text_only) return R"(["text"])";
  return "no such field";
}

void add_unknown(const Json& object, Form form, const std::string& prefix, Names& names) {
  for (const auto& [name, value] : object.items()) {
    const bool unserved = std::any_of(std::begin(kUnserved), std::end(kUnserved),
                                      [&](const Unserved& known) { return name == known.name; });
    if (!is_served(name, form) && !unserved) names.insert(prefix + name);
    if (name != "messages" || !value.is_array()) continue;
    for (const Json& message : value) {
      if (!message.is_object()) continue;
      for (const auto& [inner, ignored] : message.items())
        if (inner != "role" && inner != "content") names.insert(prefix + "messages[]." + inner);
    }
  }
}

}  // namespace

const Json* find_field(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

void refuse_field(const char* key, const std::string& expected, const Json& found,
                  std::string_view what) {
  fail("{}: field '{}': expected {}, found {}", what, key, expected, describe(found));
}

void refuse_unsupported(std::string_view what, const std::string& message) {
  throw RequestError(error_code::kUnsupported, fmt::format("{}: {}", what, message));
}

void check_unserved(const Json& body, Form form, AddBos add_bos, std::string_view what) {
  // What is done anyway: a chat's template has its own.
  const bool special_tokens = form != Form::chat && add_bos != AddBos::never;
  for (const Unserved& known : kUnserved) {
    const Json* value = find_field(body, known.name);
    if (!value || is_served(known.name, form)) continue;
    if (known.kind == Kind::number && !value->is_number())
      refuse_field(known.name, "a number", *value, what);
    if (known.kind == Kind::boolean && !value->is_boolean())
      refuse_field(known.name, "true or false", *value, what);
    if (is_neutral(known, *value, special_tokens)) continue;
    refuse_unsupported(what, fmt::format("field '{}': {} is not supported, expected {}", known.name,
                                         describe(*value), neutral_text(known, special_tokens)));
  }
}

std::vector<std::string> unknown_field_names(const Json& line, Form form) {
  Names names;
  if (form == Form::simple) {
    add_unknown(line, form, "", names);
  } else {
    for (const auto& [name, value] : line.items())
      if (name != "custom_id" && name != "method" && name != "url" && name != "body")
        names.insert(name);
    add_unknown(line.at("body"), form, "body.", names);
  }
  return {names.begin(), names.end()};
}

}  // namespace mla
