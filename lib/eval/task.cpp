#include "lib/eval/task.h"

#include "lib/base/error.h"
#include "lib/batch/output.h"

namespace mla {
namespace {

std::string request_line(const EvalQuestion& question, const Prompt& context) {
  const bool chat = std::holds_alternative<std::vector<ChatMessage>>(context);
  OrderedJson line;
  line["id"] = question.id;
  line[chat ? "messages" : "prompt"] = context_json(context);
  if (question.max_tokens) line["max_tokens"] = *question.max_tokens;
  if (!question.stop.empty()) line["stop"] = question.stop;
  line["answer"] = question.target;
  return dump_line(line) + "\n";
}

// 0.7 for 0.7f, and not the double that is nearest to it.
double decimal(float value) { return std::stod(fmt::format("{}", value)); }

// No token stands for less than a byte.
bool surely_fits(const Prompt& context, int32_t room) {
  const auto* text = std::get_if<std::string>(&context);
  return text && std::ssize(*text) + 1 <= room;
}

}  // namespace

OrderedJson context_json(const Prompt& context) {
  if (const auto* text = std::get_if<std::string>(&context)) return *text;
  if (const auto* ids = std::get_if<std::vector<int32_t>>(&context)) return *ids;
  OrderedJson list = OrderedJson::array();
  for (const ChatMessage& message : std::get<std::vector<ChatMessage>>(context))
    list.push_back({{"role", message.role}, {"content", message.content}});
  return list;
}

OrderedJson generation_arguments(const EvalQuestion& question) {
  OrderedJson arguments = {{"until", question.stop},
                           {"do_sample", question.temperature > 0},
                           {"temperature", decimal(question.temperature)}};
  if (question.max_tokens && *question.max_tokens != kAnswerTokens)
    arguments["max_gen_toks"] = *question.max_tokens;
  return arguments;
}

void describe_scoring(OrderedJson& config) {
  const OrderedJson metric = {
      {"metric", "exact_match"},     {"aggregation", "mean"},
      {"higher_is_better", true},    {"ignore_case", true},
      {"ignore_punctuation", false}, {"regexes_to_ignore", {",", "\\$", "(?s).*#### ", "\\.$"}}};
  config["metric_list"] = OrderedJson::array({metric});
  const OrderedJson first = {{"function", "take_first"}};
  const OrderedJson strict = {{"function", "regex"}, {"regex_pattern", "#### (\\-?[0-9\\.\\,]+)"}};
  const OrderedJson flexible = {{"function", "regex"},
                                {"group_select", -1},
                                {"regex_pattern", "(-?[$0-9.,]{2,})|(-?[0-9]+)"}};
  config["filter_list"] = OrderedJson::array(
      {{{"name", "strict-match"}, {"filter", OrderedJson::array({strict, first})}},
       {{"name", "flexible-extract"}, {"filter", OrderedJson::array({flexible, first})}}});
}

std::string whole_requests(const EvalTask& task) {
  std::string lines;
  for (const EvalQuestion& question : task.questions)
    lines += request_line(question, question.context);
  return lines;
}

CutRequests cut_requests(const EvalTask& task, const ContextRoom& room) {
  CutRequests requests;
  for (const EvalQuestion& question : task.questions) {
    const int32_t answer = question.max_tokens.value_or(1);
    const int32_t most = room.max_model_len - answer;
    if (most < 1)
      usage_fail("--max-model-len: expected more than the {} tokens of an answer, found {}", answer,
                 room.max_model_len);
    if (surely_fits(question.context, most)) {
      requests.lines += request_line(question, question.context);
      continue;
    }
    std::vector<int32_t> ids =
        prompt_tokens(question.context, room.add_bos, room.tokenizer, room.chat_template);
    const bool fits = std::ssize(ids) <= most;
    requests.cut += fits ? 0 : 1;
    if (!fits) ids.erase(ids.begin(), ids.end() - most);
    requests.lines += request_line(question, fits ? question.context : Prompt(std::move(ids)));
  }
  return requests;
}

}  // namespace mla
