// GSM8K as lm-evaluation-harness asks it (task gsm8k, version 3).
#pragma once

#include <string>

#include "lib/eval/task.h"

namespace mla {

struct Gsm8kOptions {
  std::string dir;  // with train.jsonl and test.jsonl, fields question and answer
  int64_t num_fewshot =
      5;               // examples in front of a question, drawn anew for each; 0: no train.jsonl
  int64_t limit = -1;  // the first questions, all of them where negative
  bool chat = false;   // examples as turns of user and assistant
  int32_t max_tokens = kAnswerTokens;
};

// The questions of test.jsonl, each after its examples of train.jsonl. Throws Error that names the
// file and the line: nothing there, a line that is no question; and UsageError where more examples
// are asked for than there are. Files of another length than the published ones are a warning.
EvalTask gsm8k_task(const Gsm8kOptions& options);

}  // namespace mla
