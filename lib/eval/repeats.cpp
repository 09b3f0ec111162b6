#include "lib/eval/repeats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "lib/eval/compare.h"

namespace mla {
namespace {

constexpr const char* kMetrics[] = {"elapsed_time", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"};

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Its summary, or null for a run whose time is not that of all its requests.
Json timed_summary(const Json& run) {
  if (!run.is_object() || !run.contains("summary")) return nullptr;
  const Json kept = run.value(Json::json_pointer("/counts/kept"), Json(0));
  return kept == 0 ? run.at("summary") : Json();
}

std::optional<double> positive(const Json& summary, const char* name) {
  const auto it = summary.find(name);
  if (it == summary.end() || !it->is_number()) return std::nullopt;
  const double value = it->get<double>();
  return value > 0 ? std::optional(value) : std::nullopt;
}

// What a repeat has that the first run of its mode has not.
void compare_with_first(const std::string& first, const std::string& dir, RepeatReport& report) {
  const CompareReport found = compare_runs(first, dir);
  const double match = found.only_a + found.only_b > 0 ? 0 : found.logprob_identical_share();
  if (found.compared > 0 && match < 1)
    report.notes.push_back(fmt::format("{} against {}: {}", dir, first, verdict(found)));
  if (found.compared > 0) report.least_match = std::min(report.least_match, match);
}

Json read_run(const std::string& dir) {
  const std::string path = dir + "/" + kRunRecordName;
  return parse_json(read_file(path), path);
}

}  // namespace

double student_t_975(int64_t degrees) {
  constexpr std::array<double, 30> table = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
                                            2.262,  2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
                                            2.110,  2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
                                            2.060,  2.056, 2.052, 2.048, 2.045, 2.042};
  if (degrees < 1) fail("Student's t: expected at least 1 degree of freedom, found {}", degrees);
  if (degrees <= 30) return table[static_cast<size_t>(degrees) - 1];
  // Fisher's expansion around the normal quantile.
  const double z = 1.959964, n = static_cast<double>(degrees);
  return z + (z * z * z + z) / (4 * n) +
         (5 * std::pow(z, 5) + 16 * std::pow(z, 3) + 3 * z) / (96 * n * n);
}

PairedRatio paired_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.empty() || a.size() != b.size())
    fail(
        "paired ratio: expected as many values of one as of the other, at least one, found {} and "
        "{}",
        a.size(), b.size());
  std::vector<double> logs;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(a[i] > 0 && b[i] > 0))
      fail("paired ratio: expected values above 0, found {} and {}", a[i], b[i]);
    logs.push_back(std::log(b[i] / a[i]));
  }
  const double middle = mean(logs);
  PairedRatio result{.ratio = std::exp(middle), .interval = std::nullopt};
  if (logs.size() == 1) return result;
  double squares = 0;
  for (const double x : logs) squares += (x - middle) * (x - middle);
  const auto n = static_cast<double>(logs.size());
  const double half =
      student_t_975(static_cast<int64_t>(logs.size()) - 1) * std::sqrt(squares / (n - 1) / n);
  result.interval = {std::exp(middle - half), std::exp(middle + half)};
  return result;
}

RepeatReport compare_repeats(const std::vector<std::pair<std::string, std::string>>& folders) {
  if (folders.empty()) fail("repeats: expected at least one pair of runs, found none");
  RepeatReport report;
  report.runs = static_cast<int64_t>(folders.size());
  std::vector<std::pair<Json, Json>> timed;
  for (size_t i = 0; i < folders.size(); ++i) {
    const auto& [a, b] = folders[i];
    if (i > 0) {
      compare_with_first(folders[0].first, a, report);
      compare_with_first(folders[0].second, b, report);
    }
    Json in_a = timed_summary(read_run(a)), in_b = timed_summary(read_run(b));
    if (in_a.is_object() && in_b.is_object()) {
      timed.emplace_back(std::move(in_a), std::move(in_b));
    } else {
      report.notes.push_back(
          fmt::format("{} and {}: no times: a run went on with records of an earlier one", a, b));
    }
  }
  report.pairs = static_cast<int64_t>(timed.size());
  for (const char* name : kMetrics) {
    RepeatReport::Metric metric{.name = name, .a = {}, .b = {}, .ratio = {}};
    for (const auto& [a, b] : timed) {
      const auto in_a = positive(a, name), in_b = positive(b, name);
      if (!in_a || !in_b) continue;
      metric.a.push_back(*in_a);
      metric.b.push_back(*in_b);
    }
    if (metric.a.empty()) continue;
    metric.ratio = paired_ratio(metric.a, metric.b);
    report.metrics.push_back(std::move(metric));
  }
  return report;
}

OrderedJson to_json(const RepeatReport& r) {
  OrderedJson j;
  j["runs"] = r.runs;
  j["pairs"] = r.pairs;
  j["least_match"] = r.least_match;
  j["metrics"] = OrderedJson::object();
  for (const RepeatReport::Metric& metric : r.metrics) {
    OrderedJson& m = j["metrics"][metric.name];
    m["a"] = metric.a;
    m["b"] = metric.b;
    m["ratio"] = metric.ratio.ratio;
    m["interval_95"] =
        metric.ratio.interval
            ? OrderedJson::array({metric.ratio.interval->first, metric.ratio.interval->second})
            : OrderedJson(nullptr);
  }
  j["notes"] = r.notes;
  return j;
}

std::string to_text(const RepeatReport& r) {
  std::string text =
      fmt::format("{} runs of each mode in alternation, {} pairs with times\n", r.runs, r.pairs);
  if (!r.metrics.empty())
    text += fmt::format("  {:<24} {:>16} {:>16} {:>8}  {}\n", "", "A, mean", "B, mean", "B/A",
                        "95% interval");
  for (const RepeatReport::Metric& m : r.metrics) {
    const auto& interval = m.ratio.interval;
    text += fmt::format(
        "  {:<24} {:>16.3f} {:>16.3f} {:>8.4f}  {}\n", m.name, mean(m.a), mean(m.b), m.ratio.ratio,
        interval ? fmt::format("{:.4f} to {:.4f}", interval->first, interval->second)
                 : std::string("not known of one pair"));
  }
  for (const std::string& note : r.notes) text += "  note: " + note + "\n";
  return text;
}

}  // namespace mla
