// A scored task as lm-evaluation-harness prints and writes it, under its key names.
#pragma once

#include <optional>
#include <string>

#include "lib/eval/score.h"

namespace mla {

// What ran, as the reports say it.
struct EvalRun {
  std::string model;       // its folder
  OrderedJson model_args;  // name → value, in the order they are shown, "pretrained" first
  std::string fingerprint, dtype, device;
  std::string version;                       // of this program
  std::optional<int64_t> limit;              // --limit
  OrderedJson gen_kwargs;                    // what options changed of the task's, or null
  std::optional<std::string> chat_template;  // its text, where it was applied
  OrderedJson tokenizer;   // tokenizer_bos_token … as that tool has them, or null
  int64_t max_length = 0;  // tokens of prompt and answer
  double date = 0;         // when it began, seconds since 1970
  double seconds = 0;      // that it took
};

// MODEL (ARGS), gen_kwargs: …, limit: …, num_fewshot: …, batch_size: auto
std::string results_header(const EvalTask& task, const EvalRun& run);

// The table of both filters, in Markdown. A name is taken for text: one that reads as a
// number is not set to the right.
std::string results_table(const EvalTask& task, const EvalScores& scores);

struct Samples {
  std::string
      lines;         // of samples.jsonl: every question for strict-match, then for flexible-extract
  std::string hash;  // of all documents, prompts and targets, as task_hashes has it
};
// `render`: of chats, whose text is what is hashed and shown; null: the messages as JSON are.
Samples samples(const EvalTask& task, const EvalScores& scores, const ChatTemplate* render);

OrderedJson results_json(const EvalTask& task, const EvalScores& scores, const EvalRun& run,
                         const std::string& hash);

}  // namespace mla
