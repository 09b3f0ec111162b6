// The answers of a finished run, scored by both filters of lm-evaluation-harness's gsm8k.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lib/eval/task.h"

namespace mla {

struct FilteredAnswer {
  std::string extracted;  // kInvalidAnswer where nothing was found
  bool right = false;     // exact_match of it and the target
};

struct ScoredAnswer {
  std::optional<std::string> text;  // cut at the stops; absent: the request failed, and is wrong
  std::string error_code;           // of a request that failed
  FilteredAnswer strict, flexible;
};

struct FilterScore {
  const char* filter;  // "strict-match" or "flexible-extract"
  int64_t questions = 0;
  int64_t right = 0;

  double mean() const;  // 0 without questions
  // Of the mean, from the sample's deviation: sqrt(Σ(x−mean)²/(n−1))/sqrt(n). Absent for n <= 1.
  std::optional<double> std_error() const;
};

struct EvalScores {
  std::vector<ScoredAnswer> answers;  // [task.questions]
  int64_t failed = 0;                 // requests
  FilterScore strict{"strict-match"}, flexible{"flexible-extract"};
};

// `run`: a folder or its outputs.jsonl, of a run of the task's requests. Throws Error: another
// number of records or other ids than the task has, a record without text, and what RunReader
// throws.
EvalScores score_run(const EvalTask& task, const std::string& run);

}  // namespace mla
