// Two finished runs side by side: tokens, logprob bits, accuracy, timing.
//
// Requests are compared, not choices: one with several is identical where both runs have as many
// and each is identical to the one at its place. Its answer is that of its first choice.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/eval/repeats.h"

namespace mla {

struct RunSide {
  std::string path;      // of outputs.jsonl
  int64_t requests = 0;  // records
  int64_t failed = 0;
  int64_t prompts_split = 0;  // of timing.prefill_chunks > 1, of every choice
  int64_t answered = 0;       // requests with a known answer; one that failed is wrong
  int64_t correct = 0;        // of those, by flexible-extract
  int64_t prompt_tokens = 0, completion_tokens = 0;  // those of all choices
  Json run;                                          // run.json, or null where there is none

  std::optional<double> accuracy() const;  // correct / answered
};

// Where two outputs of one request part: in the first choice that differs.
struct Divergence {
  Json id;
  int64_t choice = 0;              // from 0
  int64_t position = 0;            // of the generated token, from 0
  std::optional<int32_t> token_a;  // absent: A ended before it, or has no such choice
  std::optional<int32_t> token_b;
  // Logprob of the best token minus that of the second; absent without logprobs >= 2.
  std::optional<double> margin_a, margin_b;
  // Where the texts part: the last characters they share and the first of each after that, with an
  // ellipsis where there are more. Absent where a text is, or where they are the same.
  std::optional<std::string> text_before, text_a, text_b;
};

struct CompareReport {
  RunSide a, b;
  int64_t in_both = 0, only_a = 0, only_b = 0;
  std::vector<Json> only_a_ids, only_b_ids;  // the first 10
  int64_t failed_both = 0;                   // in both runs with the same error code: not compared
  int64_t failed_one = 0;       // in one run only, or for different reasons: compared, and differs
  int64_t compared = 0;         // in_both - failed_both
  int64_t token_identical = 0;  // the same token_ids, of every choice
  int64_t logprob_identical = 0;                 // and the same logprob_hash and prompt's logprobs
  std::optional<double> max_logprob_difference;  // over common prefixes, where both have logprobs
  Json max_logprob_difference_id;
  int64_t logprob_positions = 0;        // tokens that were compared so
  std::vector<Divergence> divergences;  // the first 10 in B's order
  int64_t both_right = 0, only_a_right = 0, only_b_right = 0, both_wrong = 0;  // answers known
  std::vector<std::string> notes;  // inputs or options that differ, and weights that are random
  std::optional<RepeatReport> repeats;

  double token_identical_share() const;  // 0 where nothing was compared
  double logprob_identical_share() const;
  std::optional<double> mcnemar_p() const;  // exact, two-sided; absent without known answers
};

// `a` and `b`: a run's folder or its outputs.jsonl. Keeps A's ids and offsets in memory, no more.
// Throws Error: a run that is not finished, a torn or foreign line (path and line named).
CompareReport compare_runs(const std::string& a, const std::string& b);

// How far two runs may differ, and the accuracy that they have to reach.
struct Thresholds {
  double min_match = 1.0;  // share of requests with the same tokens, and with the same bits; [0, 1]
  std::optional<double> max_logprob_diff;   // at least 0; a run without logprobs is beyond it
  std::optional<double> max_accuracy_drop;  // of A's accuracy minus B's; [0, 1]
  std::optional<double> min_accuracy;       // of each run; [0, 1]
};

// Throws UsageError that names the option: NaN, a value out of range.
void check(const Thresholds& thresholds);

// What is beyond the thresholds, each in words; empty: it passes. The requests of both have to be
// the same, and at least one compared.
std::vector<std::string> failures(const CompareReport& report, const Thresholds& thresholds);

// The first line of the text: what holds, in words.
std::string verdict(const CompareReport& report);

OrderedJson to_json(const CompareReport& report, const Thresholds& thresholds);
std::string to_text(const CompareReport& report, const Thresholds& thresholds);

}  // namespace mla
