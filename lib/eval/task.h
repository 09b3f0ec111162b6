// A set of questions with known answers, and the requests that ask them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/batch/prompt_tokens.h"
#include "lib/batch/request.h"

namespace mla {

// Tokens of an answer at most, where nothing else is said: lm-evaluation-harness's max_gen_toks.
inline constexpr int32_t kAnswerTokens = 256;

struct EvalQuestion {
  Json id;             // of its request; null for a line that is no request
  OrderedJson doc;     // as the data set has it
  std::string target;  // the reference answer, whole
  Prompt context;      // whole; text, token ids or a chat
  std::vector<std::string> stop;
  std::optional<int32_t> max_tokens = kAnswerTokens;  // absent: the rest of the model length
  float temperature = 0;
};

struct EvalTask {
  std::string name;
  std::optional<double> version;
  int64_t num_fewshot = 0;
  bool chat = false;      // --apply-chat-template
  int64_t available = 0;  // questions of the data set, of which `questions` are the first
  OrderedJson config;     // how lm-evaluation-harness describes a task
  std::vector<EvalQuestion> questions;
  std::vector<std::string> warnings;
};

// A text, a list of token ids, or a list of messages.
OrderedJson context_json(const Prompt& context);

// What lm-evaluation-harness calls the generation arguments of a request: until, do_sample,
// temperature, and max_gen_toks where it is not its default.
OrderedJson generation_arguments(const EvalQuestion& question);

// Keys of a task's description that all tasks here have alike: the two filters and exact_match.
void describe_scoring(OrderedJson& config);

// The questions as lines of the simple form (README: Input and output), contexts whole.
std::string whole_requests(const EvalTask& task);

// The same with contexts that leave an answer room: of one with more than max_model_len -
// max_tokens tokens, its BOS counted, the last that many tokens, as ids. A BOS that is cut away
// stays away.
struct CutRequests {
  std::string lines;
  int64_t cut = 0;  // contexts that were
};
struct ContextRoom {
  int32_t max_model_len = 0;  // more than every max_tokens
  AddBos add_bos = AddBos::automatic;
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat_template = nullptr;  // null: no chats
};
// Throws Error as prompt_tokens() does, and where there is no room for a context.
CutRequests cut_requests(const EvalTask& task, const ContextRoom& room);

}  // namespace mla
