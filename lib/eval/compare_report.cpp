#include <algorithm>
#include <cmath>
#include <limits>

#include "lib/base/error.h"
#include "lib/eval/compare.h"

namespace mla {
namespace {

double share(int64_t part, int64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

template <class T>
OrderedJson or_null(const std::optional<T>& value) {
  return value ? OrderedJson(*value) : OrderedJson(nullptr);
}

// Two runs of an empty file, which have answered alike.
bool is_empty(const CompareReport& r) {
  return r.compared == 0 && r.a.requests == 0 && r.b.requests == 0;
}

bool same_requests(const CompareReport& r) { return r.only_a == 0 && r.only_b == 0; }

constexpr const char* kTimings[] = {"elapsed_time",      "requests_per_second", "tokens_per_second",
                                    "output_throughput", "mean_ttft_ms",        "median_ttft_ms",
                                    "p99_ttft_ms",       "mean_tpot_ms",        "median_tpot_ms",
                                    "p99_tpot_ms",       "mean_itl_ms",         "p99_itl_ms",
                                    "mean_e2el_ms",      "p99_e2el_ms"};

Json summary_of(const RunSide& side) {
  if (!side.run.is_object()) return nullptr;
  return side.run.value("summary", Json());
}

OrderedJson side_json(const RunSide& side) {
  OrderedJson j;
  j["path"] = side.path;
  j["requests"] = side.requests;
  j["failed"] = side.failed;
  j["prompts_split"] = side.prompts_split;
  j["prompt_tokens"] = side.prompt_tokens;
  j["completion_tokens"] = side.completion_tokens;
  j["answered"] = side.answered;
  j["correct"] = side.correct;
  j["accuracy"] = or_null(side.accuracy());
  j["summary"] = summary_of(side);
  return j;
}

OrderedJson divergence_json(const Divergence& d) {
  OrderedJson j;
  j["id"] = d.id;
  j["choice"] = d.choice;
  j["position"] = d.position;
  j["token_a"] = or_null(d.token_a);
  j["token_b"] = or_null(d.token_b);
  j["margin_a"] = or_null(d.margin_a);
  j["margin_b"] = or_null(d.margin_b);
  j["text_before"] = or_null(d.text_before);
  j["text_a"] = or_null(d.text_a);
  j["text_b"] = or_null(d.text_b);
  return j;
}

// Three columns: what, A, B.
std::string row(std::string_view name, std::string_view a, std::string_view b) {
  return fmt::format("  {:<24} {:>16} {:>16}\n", name, a, b);
}

std::string ids_text(const std::vector<Json>& ids, int64_t count) {
  std::string text;
  for (const Json& id : ids) text += (text.empty() ? "" : ", ") + id.dump();
  return text + (count > static_cast<int64_t>(ids.size()) ? ", …" : "");
}

std::string timing_text(const CompareReport& report) {
  const Json a = summary_of(report.a), b = summary_of(report.b);
  const auto cell = [](const Json& summary, const char* name) -> std::string {
    if (!summary.is_object() || !summary.contains(name) || !summary[name].is_number()) return "-";
    return fmt::format("{:.3f}", summary[name].get<double>());
  };
  std::string text;
  for (const char* name : kTimings) {
    const std::string in_a = cell(a, name), in_b = cell(b, name);
    if (in_a != "-" || in_b != "-") text += row(name, in_a, in_b);
  }
  return text;
}

// On one line.
std::string quoted(const std::string& text) { return Json(text).dump(); }

std::string divergences_text(const CompareReport& report) {
  std::string text;
  const auto token = [](const std::optional<int32_t>& t) {
    return t ? fmt::format("{}", *t) : std::string("the end");
  };
  const auto margin = [](const std::optional<double>& m) {
    return m ? fmt::format("{:.6g}", *m) : std::string("not known");
  };
  for (const Divergence& d : report.divergences) {
    text += fmt::format("  {}{} at token {}: A {}, B {}; top-2 margin A {}, B {}\n", d.id.dump(),
                        d.choice > 0 ? fmt::format(" choice {}", d.choice) : "", d.position,
                        token(d.token_a), token(d.token_b), margin(d.margin_a), margin(d.margin_b));
    if (d.text_before)
      text += fmt::format("    after {}: A {}, B {}\n", quoted(*d.text_before), quoted(*d.text_a),
                          quoted(*d.text_b));
  }
  return text.empty() ? text : "first divergences:\n" + text;
}

std::string table_text(const CompareReport& r) {
  const auto count = [](int64_t n) { return fmt::format("{}", n); };
  const auto accuracy = [](const RunSide& side) {
    const auto value = side.accuracy();
    return value ? fmt::format("{:.4f} of {}", *value, side.answered) : std::string("-");
  };
  std::string text = row("", "A", "B");
  text += row("requests", count(r.a.requests), count(r.b.requests));
  text += row("failed", count(r.a.failed), count(r.b.failed));
  text += row("prompts split", count(r.a.prompts_split), count(r.b.prompts_split));
  text += row("prompt tokens", count(r.a.prompt_tokens), count(r.b.prompt_tokens));
  text += row("completion tokens", count(r.a.completion_tokens), count(r.b.completion_tokens));
  if (r.a.accuracy() || r.b.accuracy()) text += row("accuracy", accuracy(r.a), accuracy(r.b));
  return text + timing_text(r);
}

}  // namespace

std::optional<double> RunSide::accuracy() const {
  return answered == 0 ? std::nullopt : std::optional(share(correct, answered));
}

double CompareReport::token_identical_share() const { return share(token_identical, compared); }
double CompareReport::logprob_identical_share() const { return share(logprob_identical, compared); }

// Twice the binomial tail of the rarer kind of discordant pair, at one half.
std::optional<double> CompareReport::mcnemar_p() const {
  const int64_t discordant = only_a_right + only_b_right;
  if (discordant + both_right + both_wrong == 0) return std::nullopt;
  const auto n = static_cast<double>(discordant);
  double tail = 0;
  for (int64_t i = 0; i <= std::min(only_a_right, only_b_right); ++i) {
    const auto k = static_cast<double>(i);
    tail += std::exp(std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1) -
                     n * std::log(2.0));
  }
  return std::min(1.0, 2 * tail);
}

void check(const Thresholds& t) {
  const auto in_range = [](const char* option, const std::optional<double>& value, double most) {
    if (value && !(*value >= 0 && *value <= most))
      usage_fail("{}: expected a number {}, found {}", option,
                 most == 1 ? "from 0 to 1" : "of at least 0", *value);
  };
  in_range("--min-match", t.min_match, 1);
  in_range("--max-logprob-diff", t.max_logprob_diff, std::numeric_limits<double>::max());
  in_range("--max-accuracy-drop", t.max_accuracy_drop, 1);
  in_range("--min-accuracy", t.min_accuracy, 1);
}

namespace {

constexpr double kRounding = 1e-12;  // of a difference of shares

void judge_accuracy(const CompareReport& r, const Thresholds& t, std::vector<std::string>& beyond) {
  const auto a = r.a.accuracy(), b = r.b.accuracy();
  if (t.max_accuracy_drop && !(a && b))
    beyond.push_back("no answers are known, of which accuracy could drop");
  if (t.max_accuracy_drop && a && b && !(*a - *b <= *t.max_accuracy_drop + kRounding))
    beyond.push_back(fmt::format("accuracy drops from {:.4f} to {:.4f}, by more than {}", *a, *b,
                                 *t.max_accuracy_drop));
  if (!t.min_accuracy) return;
  for (const auto& [name, accuracy] : {std::pair("A", a), std::pair("B", b)}) {
    if (!accuracy) {
      beyond.push_back(fmt::format("{} has no known answers, its accuracy is to be at least {}",
                                   name, *t.min_accuracy));
    } else if (!(*accuracy >= *t.min_accuracy)) {
      beyond.push_back(
          fmt::format("accuracy of {} is {:.4f}, less than {}", name, *accuracy, *t.min_accuracy));
    }
  }
}

}  // namespace

std::vector<std::string> failures(const CompareReport& r, const Thresholds& t) {
  check(t);
  std::vector<std::string> beyond;
  if (!same_requests(r)) beyond.push_back("the two runs do not contain the same requests");
  if (r.compared == 0 && !is_empty(r)) beyond.push_back("no request could be compared");
  const auto match = [&](const char* what, double found) {
    if (r.compared > 0 && !(found >= t.min_match))
      beyond.push_back(fmt::format("the share of requests with {} is {}, less than {}", what, found,
                                   t.min_match));
  };
  match("the same tokens", r.token_identical_share());
  match("the same logprob bits", r.logprob_identical_share());
  if (r.repeats) match("the same bits in each repeat", r.repeats->least_match);
  if (t.max_logprob_diff && !r.max_logprob_difference && !is_empty(r))
    beyond.push_back("no logprobs are there to compare (--logprobs)");
  if (t.max_logprob_diff && r.max_logprob_difference &&
      !(*r.max_logprob_difference <= *t.max_logprob_diff))
    beyond.push_back(fmt::format("the largest logprob difference is {:.6g}, more than {}",
                                 *r.max_logprob_difference, *t.max_logprob_diff));
  judge_accuracy(r, t, beyond);
  return beyond;
}

std::string verdict(const CompareReport& r) {
  std::string text;
  const bool all = r.compared > 0 && r.logprob_identical == r.compared;
  if (r.compared == 0) {
    text = is_empty(r) ? "nothing compared: the runs have no requests"
                       : "nothing compared: no request was answered in both";
  } else if (all && same_requests(r)) {
    text =
        fmt::format("identical: {} of {} requests have the same tokens and the same logprob bits",
                    r.logprob_identical, r.compared);
  } else {
    text =
        fmt::format("different: {} of {} requests have the same tokens, {} the same logprob bits",
                    r.token_identical, r.compared, r.logprob_identical);
  }
  if (r.only_a > 0) text += fmt::format("; only in A: {}", r.only_a);
  if (r.only_b > 0) text += fmt::format("; only in B: {}", r.only_b);
  if (r.failed_one > 0) text += fmt::format("; failed in one run or differently: {}", r.failed_one);
  if (r.failed_both > 0) text += fmt::format("; failed alike in both: {}", r.failed_both);
  return text;
}

OrderedJson to_json(const CompareReport& r, const Thresholds& t) {
  OrderedJson j;
  j["verdict"] = verdict(r);
  const std::vector<std::string> beyond = failures(r, t);
  j["passes"] = beyond.empty();
  j["failures"] = beyond;
  j["min_match"] = t.min_match;
  j["max_logprob_diff"] = or_null(t.max_logprob_diff);
  j["max_accuracy_drop"] = or_null(t.max_accuracy_drop);
  j["min_accuracy"] = or_null(t.min_accuracy);
  j["requests_in_both"] = r.in_both;
  j["only_in_a"] = r.only_a;
  j["only_in_b"] = r.only_b;
  j["only_in_a_ids"] = r.only_a_ids;
  j["only_in_b_ids"] = r.only_b_ids;
  j["failed_in_both"] = r.failed_both;
  j["failed_in_one"] = r.failed_one;
  j["compared"] = r.compared;
  j["token_identical"] = r.token_identical_share();
  j["token_identical_count"] = r.token_identical;
  j["logprob_identical"] = r.logprob_identical_share();
  j["logprob_identical_count"] = r.logprob_identical;
  j["max_logprob_difference"] = or_null(r.max_logprob_difference);
  j["max_logprob_difference_id"] = r.max_logprob_difference_id;
  j["logprob_positions"] = r.logprob_positions;
  j["divergences"] = OrderedJson::array();
  for (const Divergence& d : r.divergences) j["divergences"].push_back(divergence_json(d));
  j["answers"] = {{"both_right", r.both_right},
                  {"only_a_right", r.only_a_right},
                  {"only_b_right", r.only_b_right},
                  {"both_wrong", r.both_wrong},
                  {"mcnemar_p", or_null(r.mcnemar_p())}};
  j["repeats"] = r.repeats ? to_json(*r.repeats) : OrderedJson(nullptr);
  j["a"] = side_json(r.a);
  j["b"] = side_json(r.b);
  j["notes"] = r.notes;
  return j;
}

std::string to_text(const CompareReport& r, const Thresholds& t) {
  std::string text = verdict(r) + "\n";
  const std::vector<std::string> beyond = failures(r, t);
  if (beyond.empty())
    text += fmt::format(
        "PASS: at least {:.6g} % of the compared requests have the same tokens and logprob bits\n",
        100 * t.min_match);
  for (const std::string& what : beyond) text += "FAIL: " + what + "\n";
  text += fmt::format("A: {}\nB: {}\n\n", r.a.path, r.b.path) + table_text(r);
  if (const auto p = r.mcnemar_p()) {
    text += fmt::format("right in A only {}, in B only {}, McNemar's exact p {:.4g}\n",
                        r.only_a_right, r.only_b_right, *p);
  }
  if (r.max_logprob_difference) {
    text += fmt::format("largest logprob difference: {:.6g} (request {}), of {} tokens\n",
                        *r.max_logprob_difference, r.max_logprob_difference_id.dump(),
                        r.logprob_positions);
  }
  if (r.only_a > 0) text += "only in A: " + ids_text(r.only_a_ids, r.only_a) + "\n";
  if (r.only_b > 0) text += "only in B: " + ids_text(r.only_b_ids, r.only_b) + "\n";
  text += divergences_text(r);
  if (r.repeats) text += to_text(*r.repeats);
  for (const std::string& note : r.notes) text += "note: " + note + "\n";
  return text;
}

}  // namespace mla
