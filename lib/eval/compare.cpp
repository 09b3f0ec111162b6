#include "lib/eval/compare.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <unordered_map>

#include "lib/base/error.h"
#include "lib/eval/answer.h"
#include "lib/eval/run_reader.h"

namespace mla {
namespace {

constexpr const char* kRandomWeights =
    "its weights are random (--load-format dummy): what its answers score means nothing";
constexpr size_t kListed = 10;  // ids and divergences that a report lists
constexpr size_t kShown = 32;   // characters of a text on either side of a divergence

// A request that failed is wrong.
std::optional<bool> is_right(const OutputRecord& record) {
  if (!record.answer) return std::nullopt;
  if (!record.ok) return false;
  if (!record.choices[0].text) return std::nullopt;
  return exact_match(extract_flexible(*record.choices[0].text), *record.answer);
}

void count_record(const OutputRecord& record, RunSide& side) {
  ++side.requests;
  side.failed += record.ok ? 0 : 1;
  side.prompt_tokens += record.prompt_tokens;
  for (const OutputChoice& choice : record.choices) {
    side.prompts_split += choice.prefill_chunks > 1 ? 1 : 0;
    side.completion_tokens += static_cast<int64_t>(choice.token_ids.size());
  }
  if (const auto right = is_right(record)) {
    ++side.answered;
    side.correct += *right ? 1 : 0;
  }
}

// The run's own count knows recomputation after preemption from a split prompt. That of a resumed
// run is of its last part.
void take_run_record(const Json& run, RunSide& side) {
  side.run = run;
  if (!run.is_object() || !run.contains("counts")) return;
  if (find_int(run["counts"], "kept", side.path + ": run.json").value_or(0) > 0) return;
  if (const auto split = find_int(run["counts"], "prompts_split", side.path + ": run.json"))
    side.prompts_split = *split;
}

// Of the first `common` tokens, as far as both have them.
void compare_logprobs(const std::vector<float>& a, const std::vector<float>& b, size_t common,
                      const Json& id, CompareReport& report) {
  const size_t n = std::min({common, a.size(), b.size()});
  for (size_t i = 0; i < n; ++i) {
    const double difference = std::fabs(double{a[i]} - double{b[i]});
    ++report.logprob_positions;
    if (!report.max_logprob_difference || !(difference <= *report.max_logprob_difference)) {
      report.max_logprob_difference = difference;
      report.max_logprob_difference_id = id;
    }
  }
}

bool begins_character(const std::string& text, size_t at) {
  return at >= text.size() || (static_cast<unsigned char>(text[at]) & 0xc0) != 0x80;
}

// At most kShown characters from `begin` on.
std::string first_characters(const std::string& text, size_t begin) {
  size_t end = begin;
  for (size_t count = 0; end < text.size() && count < kShown; ++count)
    for (++end; !begins_character(text, end);) ++end;
  return text.substr(begin, end - begin) + (end < text.size() ? "…" : "");
}

// At most kShown characters before `end`.
std::string last_characters(const std::string& text, size_t end) {
  size_t begin = end;
  for (size_t count = 0; begin > 0 && count < kShown; ++count)
    for (--begin; begin > 0 && !begins_character(text, begin);) --begin;
  return (begin > 0 ? "…" : "") + text.substr(begin, end - begin);
}

void show_texts(const OutputChoice& a, const OutputChoice& b, Divergence& divergence) {
  if (!a.text || !b.text || *a.text == *b.text) return;
  auto at = static_cast<size_t>(
      std::mismatch(a.text->begin(), a.text->end(), b.text->begin(), b.text->end()).first -
      a.text->begin());
  while (at > 0 && !(begins_character(*a.text, at) && begins_character(*b.text, at))) --at;
  divergence.text_before = last_characters(*a.text, at);
  divergence.text_a = first_characters(*a.text, at);
  divergence.text_b = first_characters(*b.text, at);
}

// How many tokens the two begin with alike.
size_t common_tokens(const OutputChoice& a, const OutputChoice& b) {
  return static_cast<size_t>(
      std::mismatch(a.token_ids.begin(), a.token_ids.end(), b.token_ids.begin(), b.token_ids.end())
          .first -
      a.token_ids.begin());
}

// Of choices that part after `common` tokens.
Divergence divergence(const OutputChoice& a, const OutputChoice& b, size_t common) {
  const auto token = [&](const OutputChoice& choice) {
    return common < choice.token_ids.size() ? std::optional(choice.token_ids[common])
                                            : std::nullopt;
  };
  const auto margin = [&](const OutputChoice& choice) {
    return common < choice.margins.size() ? choice.margins[common] : std::nullopt;
  };
  return {.position = static_cast<int64_t>(common),
          .token_a = token(a),
          .token_b = token(b),
          .margin_a = margin(a),
          .margin_b = margin(b)};
}

void compare_choices(const OutputRecord& a, const OutputRecord& b, CompareReport& report) {
  const OutputChoice none;
  std::optional<Divergence> first;
  // Where one of the runs did not say the prompt's, there is nothing to tell apart.
  const bool prompts = !a.prompt_logprobs.empty() && !b.prompt_logprobs.empty();
  bool same_bits = !prompts || a.prompt_logprobs == b.prompt_logprobs;
  compare_logprobs(a.prompt_logprobs, b.prompt_logprobs, a.prompt_logprobs.size(), b.id, report);
  for (size_t i = 0; i < std::max(a.choices.size(), b.choices.size()); ++i) {
    const OutputChoice& of_a = i < a.choices.size() ? a.choices[i] : none;
    const OutputChoice& of_b = i < b.choices.size() ? b.choices[i] : none;
    const size_t common = common_tokens(of_a, of_b);
    compare_logprobs(of_a.logprobs, of_b.logprobs, common, b.id, report);
    same_bits &= of_a.logprob_hash == of_b.logprob_hash;
    const bool both = i < a.choices.size() && i < b.choices.size();
    if (first || (both && of_a.token_ids == of_b.token_ids)) continue;
    first = divergence(of_a, of_b, common);
    first->id = b.id;
    first->choice = static_cast<int64_t>(i);
    show_texts(of_a, of_b, *first);
  }
  report.token_identical += first ? 0 : 1;
  report.logprob_identical += !first && same_bits ? 1 : 0;
  if (first && report.divergences.size() < kListed) report.divergences.push_back(std::move(*first));
}

void compare_answers(const OutputRecord& a, const OutputRecord& b, CompareReport& report) {
  const auto right_a = is_right(a), right_b = is_right(b);
  if (!right_a || !right_b) return;
  int64_t& cell = *right_a ? (*right_b ? report.both_right : report.only_a_right)
                           : (*right_b ? report.only_b_right : report.both_wrong);
  ++cell;
}

void compare_pair(const OutputRecord& a, const OutputRecord& b, CompareReport& report) {
  ++report.in_both;
  compare_answers(a, b, report);
  if (!a.ok && !b.ok && a.error_code == b.error_code) {
    ++report.failed_both;
    return;
  }
  ++report.compared;
  if (!a.ok || !b.ok) {
    ++report.failed_one;
    return;
  }
  compare_choices(a, b, report);
}

std::string text_of(const Json& object, const char* key) {
  return object.contains(key) ? object[key].dump() : "nothing";
}

void note_differences(CompareReport& report) {
  const Json &a = report.a.run, &b = report.b.run;
  for (const RunSide* side : {&report.a, &report.b}) {
    if (side->run.is_null())
      report.notes.push_back(side->path + ": no run.json beside it, so no timing");
  }
  for (const RunSide* side : {&report.a, &report.b}) {
    if (side->run.is_object() &&
        side->run.value(Json::json_pointer("/options/load_format"), Json()) == "dummy")
      report.notes.push_back(side->path + ": " + kRandomWeights);
  }
  if (!a.is_object() || !b.is_object()) return;
  const auto differ = [&](const char* pointer) {
    const Json::json_pointer at(pointer);
    const Json in_a = a.value(at, Json()), in_b = b.value(at, Json());
    return !in_a.is_null() && !in_b.is_null() && in_a != in_b;
  };
  if (differ("/input/sha256")) report.notes.push_back("the input files of the runs differ");
  if (differ("/model/fingerprint"))
    report.notes.push_back("the weights of the runs' checkpoints differ");
  if (differ("/model/files"))
    report.notes.push_back("the files beside the weights of the runs' checkpoints differ");
  const Json options_a = a.value("options", Json()), options_b = b.value("options", Json());
  if (!options_a.is_object() || !options_b.is_object()) return;
  std::set<std::string> names;
  for (const Json* options : {&options_a, &options_b})
    for (const auto& item : options->items()) names.insert(item.key());
  names.erase("output");
  for (const std::string& name : names) {
    const std::string in_a = text_of(options_a, name.c_str());
    const std::string in_b = text_of(options_b, name.c_str());
    if (in_a != in_b) report.notes.push_back(fmt::format("option {}: {} | {}", name, in_a, in_b));
  }
}

void check_unique(bool fresh, const RunReader& reader, const OutputRecord& record) {
  if (!fresh)
    fail("{}:{}: the id {} appears twice", reader.path(), reader.place().line, record.key);
}

}  // namespace

CompareReport compare_runs(const std::string& a, const std::string& b) {
  RunReader reader_a(a), reader_b(b);
  CompareReport report;
  report.a.path = reader_a.path();
  report.b.path = reader_b.path();

  struct Entry {
    RunReader::Place place;
    bool met = false;
  };
  std::unordered_map<std::string, Entry> entries;
  while (const auto record = reader_a.next()) {
    count_record(*record, report.a);
    check_unique(entries.insert({record->key, {.place = reader_a.place()}}).second, reader_a,
                 *record);
  }
  std::set<std::string> only_b;
  while (const auto record = reader_b.next()) {
    count_record(*record, report.b);
    const auto it = entries.find(record->key);
    if (it == entries.end()) {
      check_unique(only_b.insert(record->key).second, reader_b, *record);
      if (report.only_b_ids.size() < kListed) report.only_b_ids.push_back(record->id);
      continue;
    }
    check_unique(!it->second.met, reader_b, *record);
    it->second.met = true;
    compare_pair(reader_a.at(it->second.place), *record, report);
  }
  report.only_b = static_cast<int64_t>(only_b.size());

  std::vector<RunReader::Place> unmet;
  for (const auto& [key, entry] : entries)
    if (!entry.met) unmet.push_back(entry.place);
  report.only_a = static_cast<int64_t>(unmet.size());
  std::sort(unmet.begin(), unmet.end(),
            [](const auto& x, const auto& y) { return x.line < y.line; });
  unmet.resize(std::min(unmet.size(), kListed));
  for (const auto& place : unmet) report.only_a_ids.push_back(reader_a.at(place).id);

  take_run_record(reader_a.run(), report.a);
  take_run_record(reader_b.run(), report.b);
  note_differences(report);
  return report;
}

}  // namespace mla
