#include "lib/eval/score.h"

#include <cmath>

#include "lib/base/error.h"
#include "lib/eval/answer.h"
#include "lib/eval/run_reader.h"

namespace mla {
namespace {

// What a request that failed would have said is not known: it is wrong.
FilteredAnswer filtered(std::string (*extract)(std::string_view), const ScoredAnswer& answer,
                        const std::string& target, FilterScore& score) {
  std::string extracted = extract(answer.text.value_or(""));
  const bool right = answer.text && exact_match(extracted, target);
  ++score.questions;
  score.right += right ? 1 : 0;
  return {std::move(extracted), right};
}

}  // namespace

double FilterScore::mean() const {
  return questions == 0 ? 0.0 : static_cast<double>(right) / static_cast<double>(questions);
}

std::optional<double> FilterScore::std_error() const {
  if (questions <= 1) return std::nullopt;
  const auto n = static_cast<double>(questions), hits = static_cast<double>(right);
  const double mu = mean();
  const double squares = hits * (1 - mu) * (1 - mu) + (n - hits) * mu * mu;
  return std::sqrt(squares / (n - 1)) / std::sqrt(n);
}

EvalScores score_run(const EvalTask& task, const std::string& run) {
  RunReader reader(run);
  EvalScores scores;
  for (const EvalQuestion& question : task.questions) {
    const std::optional<OutputRecord> record = reader.next();
    const std::string what = fmt::format("{}:{}", reader.path(), scores.answers.size() + 1);
    if (!record)
      fail("{}: expected {} records, one a question, found the end", what, task.questions.size());
    ScoredAnswer answer;
    if (record->ok) {
      if (record->id != question.id)
        fail("{}: expected the answer to question {}, found that to {}", what, question.id.dump(),
             record->id.dump());
      answer.text = record->choices[0].text;
      if (!answer.text)
        fail("{}: field 'text': expected a string, found null: the run had no tokenizer", what);
    } else {
      answer.error_code = record->error_code;
      ++scores.failed;
    }
    answer.strict = filtered(extract_strict, answer, question.target, scores.strict);
    answer.flexible = filtered(extract_flexible, answer, question.target, scores.flexible);
    scores.answers.push_back(std::move(answer));
  }
  if (reader.next())
    fail("{}: expected {} records, one a question, found more", reader.path(),
         task.questions.size());
  return scores;
}

}  // namespace mla
