#include "lib/report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "lib/base/error.h"
#include "lib/batch/openai.h"
#include "lib/report/chart.h"

namespace mla {
namespace {

constexpr const char* kStyle = R"(
:root{--bg:#fff;--fg:#1b1f24;--soft:#667;--rule:#d8dee4;--card:#f6f8fa;--a:#0a66c2;--b:#c2410c;
--good:#116329;--good-bg:#dafbe1;--bad:#82071e;--bad-bg:#ffebe9;--pre:#4c8dd6;--dec:#e08b4a}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--soft:#9aa5b1;--rule:#30363d;
--card:#161b22;--a:#58a6ff;--b:#ff9b5e;--good:#7ee787;--good-bg:#12261e;--bad:#ff9da4;
--bad-bg:#2d1316;--pre:#3f7fc9;--dec:#d17c3a}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1240px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:20px;margin:0 0 12px}h2{font-size:16px;margin:28px 0 8px}
p{margin:4px 0}small,.soft{color:var(--soft)}
.verdict{padding:14px 16px;border-radius:8px;font-size:18px;font-weight:600}
.verdict p{font-size:14px;font-weight:400}
.good{color:var(--good);background:var(--good-bg)}.bad{color:var(--bad);background:var(--bad-bg)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--rule);vertical-align:top}
th:first-child,td:first-child{text-align:left}thead th{color:var(--soft);font-weight:500}
tr.differs td{font-weight:600}
td.text{text-align:left;font-family:ui-monospace,monospace;font-size:13px;white-space:pre-wrap;
overflow-wrap:anywhere}
.grid2{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.card{max-width:640px;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
.card h3{font-size:14px;margin:0 0 6px}
svg{width:100%;height:auto;display:block}
svg .grid{stroke:var(--rule);stroke-width:1}svg .tick{fill:var(--soft);font-size:12px}
svg .line{fill:none;stroke-width:2}svg .line.a{stroke:var(--a)}svg .line.b{stroke:var(--b)}
svg .line.b{stroke-dasharray:6 3}
svg .prefill{fill:var(--pre)}svg .decode{fill:var(--dec)}
svg .limit{stroke:var(--fg);stroke-width:1.5;stroke-dasharray:2 3}
.key{display:inline-block;width:14px;height:4px;margin:0 6px 3px 12px;vertical-align:middle}
.key.a{background:var(--a)}.key.b{background:var(--b)}
.key.prefill{background:var(--pre);height:10px}.key.decode{background:var(--dec);height:10px}
.bar{display:flex;height:22px;border-radius:5px;overflow:hidden;background:var(--rule)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 18px;padding:0;margin:8px 0 0;
font-size:13px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.m0{background:#4c8dd6}.m1{background:#e08b4a}.m2{background:#5bab6b}.m3{background:#b07cc6}
.m4{background:#c9a227}.m5{background:#d0617a}.m6{background:#7d8590}
)";

std::string cell(const std::string& text) { return "<td>" + text + "</td>"; }

// A value of run.json as a cell shows it.
std::string value_text(const Json& value) {
  if (value.is_string()) return escape_html(value.get<std::string>());
  if (value.is_number_float()) return short_number(value.get<double>());
  if (value.is_null()) return "–";
  return escape_html(value.dump());
}

Json at_or_null(const Json& object, const char* key) {
  return object.is_object() && object.contains(key) ? object.at(key) : Json();
}

std::string name_of_side(const RunSide& side, const char* fallback) {
  const Json mode = at_or_null(at_or_null(side.run, "options"), "chunked_prefill");
  return mode.is_string() ? "chunked prefill " + mode.get<std::string>() : fallback;
}

class Page {
 public:
  Page(const CompareReport& report, const Thresholds& thresholds, const RequestTimes& a,
       const RequestTimes& b)
      : r_(report), thresholds_(thresholds), a_(a), b_(b) {
    names_[0] = name_of_side(r_.a, "A");
    names_[1] = name_of_side(r_.b, "B");
    if (names_[0] == names_[1]) names_[0] = "A", names_[1] = "B";
  }

  std::string html() {
    out_ = R"(<!doctype html><html lang="en"><head><meta charset="utf-8">)"
           R"(<meta name="viewport" content="width=device-width,initial-scale=1">)";
    out_ += fmt::format("<title>mla-run: {} and {}</title><style>{}</style></head><body>",
                        escape_html(names_[0]), escape_html(names_[1]), kStyle);
    out_ +=
        fmt::format("<h1>mla-run: {} and {}</h1>", escape_html(names_[0]), escape_html(names_[1]));
    verdict_section();
    accuracy_section();
    timing_section();
    repeats_section();
    distribution_section();
    steps_section();
    memory_section();
    divergence_section();
    settings_section();
    return out_ + "</body></html>\n";
  }

 private:
  const Json& run(int side) const { return side == 0 ? r_.a.run : r_.b.run; }

  std::string keys() const {
    return fmt::format(R"(<p><span class="key a"></span>{}<span class="key b"></span>{}</p>)",
                       escape_html(names_[0]), escape_html(names_[1]));
  }

  std::string head(const std::string& first, const std::string& last = "") const {
    std::string row = "<thead><tr><th>" + first + "</th>";
    for (const std::string& name : names_) row += "<th>" + escape_html(name) + "</th>";
    if (!last.empty()) row += "<th>" + last + "</th>";
    return row + "</tr></thead>";
  }

  void verdict_section() {
    const std::vector<std::string> beyond = failures(r_, thresholds_);
    const bool good = beyond.empty();
    const bool all = r_.compared > 0 && r_.logprob_identical == r_.compared && r_.only_a == 0 &&
                     r_.only_b == 0 && (!r_.repeats || r_.repeats->least_match == 1);
    const char* words = all ? "Identical in every bit" : "Different";
    out_ += fmt::format(R"(<div class="verdict {}">{}<p>{}</p>)", good ? "good" : "bad",
                        good && !all ? "Different, within the thresholds" : words,
                        escape_html(verdict(r_)));
    for (const std::string& what : beyond) out_ += "<p>" + escape_html(what) + "</p>";
    out_ += "</div>";
  }

  void accuracy_section() {
    if (r_.a.answered == 0 && r_.b.answered == 0) return;
    out_ += "<h2>Accuracy</h2><div class=wide><table>" + head("") + "<tbody><tr><td>right</td>";
    for (const RunSide* side : {&r_.a, &r_.b})
      out_ += cell(fmt::format("{} of {} ({:.2f}%)", side->correct, side->answered,
                               100 * side->accuracy().value_or(0)));
    out_ += "</tr></tbody></table></div>";
    out_ += fmt::format(
        "<p class=soft>both right {}, only the first {}, only the second {}, both wrong {}",
        r_.both_right, r_.only_a_right, r_.only_b_right, r_.both_wrong);
    if (const auto p = r_.mcnemar_p()) out_ += fmt::format("; McNemar's exact p {:.4g}", *p);
    out_ += "</p>";
    for (const int side : {0, 1}) {
      if (at_or_null(at_or_null(run(side), "options"), "load_format") != "dummy") continue;
      out_ +=
          "<p><strong>The weights are random (--load-format dummy): the score means nothing."
          "</strong></p>";
      break;
    }
  }

  // Of both modes run several times.
  void repeats_section() {
    if (!r_.repeats) return;
    const RepeatReport& repeats = *r_.repeats;
    out_ += fmt::format(
        "<h2>Repeats</h2><p>{} runs of each mode in alternation, {} pairs with "
        "times; the ratio is the second over the first, pair by pair</p>",
        repeats.runs, repeats.pairs);
    out_ += "<div class=wide><table>" + head("", "ratio, 95% interval") + "<tbody>";
    for (const RepeatReport::Metric& metric : repeats.metrics) {
      const auto values = [](const std::vector<double>& list) {
        std::string text;
        for (const double x : list) text += (text.empty() ? "" : ", ") + short_number(x);
        return text;
      };
      const auto& interval = metric.ratio.interval;
      out_ += "<tr>" + cell(metric.name) + cell(values(metric.a)) + cell(values(metric.b)) +
              cell(fmt::format("{:.4f}", metric.ratio.ratio) +
                   (interval ? fmt::format(" ({:.4f} to {:.4f})", interval->first, interval->second)
                             : ""));
      out_ += "</tr>";
    }
    out_ += "</tbody></table></div>";
    for (const std::string& note : repeats.notes)
      out_ += "<p class=soft>" + escape_html(note) + "</p>";
  }

  void timing_row(const char* label, const char* key) {
    const Json a = at_or_null(at_or_null(run(0), "summary"), key);
    const Json b = at_or_null(at_or_null(run(1), "summary"), key);
    if (!a.is_number() && !b.is_number()) return;
    const bool ratio = a.is_number() && b.is_number() && a.get<double>() > 0;
    out_ += "<tr>" + cell(label) + cell(value_text(a)) + cell(value_text(b)) +
            cell(ratio ? fmt::format("{:.3f}", b.get<double>() / a.get<double>()) : "–") + "</tr>";
  }

  void timing_section() {
    out_ += "<h2>Time</h2><div class=wide><table>" + head("", "ratio") + "<tbody>";
    timing_row("elapsed, s", "elapsed_time");
    timing_row("requests/s", "requests_per_second");
    timing_row("tokens/s", "tokens_per_second");
    timing_row("output tokens/s", "output_throughput");
    timing_row("TTFT mean, ms", "mean_ttft_ms");
    timing_row("TTFT median, ms", "median_ttft_ms");
    timing_row("TTFT p99, ms", "p99_ttft_ms");
    timing_row("TPOT mean, ms", "mean_tpot_ms");
    timing_row("TPOT p99, ms", "p99_tpot_ms");
    timing_row("ITL mean, ms", "mean_itl_ms");
    timing_row("ITL p99, ms", "p99_itl_ms");
    timing_row("E2E mean, ms", "mean_e2el_ms");
    timing_row("E2E p99, ms", "p99_e2el_ms");
    out_ += "</tbody></table></div>";
  }

  void card(const std::string& title, const std::string& body) {
    out_ += fmt::format(R"(<div class="card"><h3>{}</h3>{}</div>)", escape_html(title), body);
  }

  void distribution_section() {
    if (a_.ttft.empty() && b_.ttft.empty()) return;
    out_ += "<h2>Distributions</h2>" + keys() + "<div class=grid2>";
    card("Time to the first token", distribution_svg(a_.ttft, b_.ttft, "ms"));
    card("Time between tokens, median of each request", distribution_svg(a_.itl, b_.itl, "ms"));
    card("Time to the last token", distribution_svg(a_.e2e, b_.e2e, "ms"));
    out_ += "</div>";
  }

  static std::vector<double> numbers(const Json& timeline, const char* key) {
    const Json list = at_or_null(timeline, key);
    return list.is_array() ? list.get<std::vector<double>>() : std::vector<double>{};
  }

  void steps_section() {
    std::string cards;
    LineChart rates{.x_label = "s", .y_label = "tokens/s", .lines = {}, .steps = true};
    std::string swapped;
    std::swap(out_, swapped);
    for (int side = 0; side < 2; ++side) {
      const Json timeline = at_or_null(run(side), "timeline");
      const std::vector<double> seconds = numbers(timeline, "seconds");
      StackChart chart{.x_label = "steps",
                       .y_label = "tokens of a step",
                       .lower = numbers(timeline, "prefill_tokens"),
                       .upper = numbers(timeline, "decode_tokens")};
      if (seconds.empty() || chart.lower.size() != seconds.size() ||
          chart.upper.size() != seconds.size())
        continue;
      rates.lines.push_back(rate_line(side == 0 ? "a" : "b", seconds, chart));
      const Json entry = at_or_null(timeline, "steps_per_entry");
      const double per = entry.is_null() ? 1 : entry.get<double>();
      for (double& x : chart.lower) x /= per;
      for (double& x : chart.upper) x /= per;
      if (per > 1) chart.x_label = fmt::format("{} steps a bar", per);
      const Json budget = at_or_null(at_or_null(run(side), "options"), "max_num_batched_tokens");
      if (budget.is_number()) {
        chart.limit = budget.get<double>();
        chart.limit_label = "budget " + short_number(chart.limit);
      }
      card(names_[side], to_svg(chart));
    }
    std::swap(out_, swapped);
    if (rates.lines.empty()) return;
    out_ += R"(<h2>Steps</h2><p><span class="key prefill"></span>prefill tokens)"
            R"(<span class="key decode"></span>decode tokens</p><div class=grid2>)";
    out_ += swapped + "</div><h2>Tokens a second over time</h2>" + keys() + "<div class=grid2>";
    card("Prefill and decode tokens together", to_svg(rates));
    out_ += "</div>";
  }

  // Rates over at most 120 equal stretches of the run.
  static Line rate_line(const char* style, const std::vector<double>& seconds,
                        const StackChart& tokens) {
    const double end = seconds.back(), stretch = end / 120;
    Line line{style, {}, {}};
    double begin = 0, sum = 0;
    for (size_t i = 0; i < seconds.size(); ++i) {
      sum += tokens.lower[i] + tokens.upper[i];
      if (seconds[i] - begin < stretch && i + 1 < seconds.size()) continue;
      if (!(seconds[i] > begin)) continue;
      line.x.push_back(begin);
      line.y.push_back(sum / (seconds[i] - begin));
      begin = seconds[i];
      sum = 0;
    }
    if (line.x.empty()) return line;
    line.x.push_back(end);
    line.y.push_back(line.y.back());
    return line;
  }

  void memory_section() {
    std::string bars;
    for (int side = 0; side < 2; ++side) {
      const Json plan = at_or_null(run(side), "memory_plan");
      const Json bytes = at_or_null(plan, "bytes");
      if (!bytes.is_object()) continue;
      std::vector<Part> parts;
      double total = 0;
      for (const auto& [name, size] : bytes.items()) {
        parts.push_back({name, size.get<double>()});
        total += parts.back().bytes;
      }
      std::stable_sort(parts.begin(), parts.end(),
                       [](const Part& x, const Part& y) { return x.bytes > y.bytes; });
      if (total > 0)
        bars += fmt::format(R"(<div class="card"><h3>{}, {:.3f} GiB</h3>{}</div>)",
                            escape_html(names_[side]), total / (1024.0 * 1024 * 1024),
                            memory_bar(parts, total));
    }
    if (!bars.empty()) out_ += "<h2>Memory plan</h2><div class=grid2>" + bars + "</div>";
  }

  void divergence_section() {
    if (r_.divergences.empty()) return;
    out_ +=
        "<h2>Where answers part</h2><div class=wide><table>" + head("request, token") + "<tbody>";
    for (const Divergence& d : r_.divergences) {
      out_ += "<tr>" + cell(escape_html(d.id.dump()) +
                            (d.choice > 0 ? fmt::format(" choice {}", d.choice) : "") +
                            fmt::format(", {}", d.position));
      out_ += token_cell(d.token_a, d.margin_a) + token_cell(d.token_b, d.margin_b) + "</tr>";
      if (!d.text_before) continue;
      const auto text = [&](const std::optional<std::string>& rest) {
        return "<td class=text>" + escape_html(*d.text_before) + "<mark>" +
               escape_html(rest.value_or("")) + "</mark></td>";
      };
      out_ += "<tr><td></td>" + text(d.text_a) + text(d.text_b) + "</tr>";
    }
    out_ += "</tbody></table></div>";
  }

  static std::string token_cell(const std::optional<int32_t>& token,
                                const std::optional<double>& margin) {
    std::string text = token ? fmt::format("token {}", *token) : "ended";
    if (margin) text += fmt::format(", {:.3g} above the second", *margin);
    return cell(text);
  }

  void settings_section() {
    out_ += "<h2>Settings</h2><div class=wide><table>" + head("") + "<tbody>";
    const Json a = at_or_null(run(0), "options"), b = at_or_null(run(1), "options");
    add_settings(a, b, "");
    for (const char* key : {"version", "build", "model", "input"})
      setting_row(key, at_or_null(run(0), key), at_or_null(run(1), key));
    out_ += "</tbody></table></div>";
    for (const std::string& note : r_.notes) out_ += "<p class=soft>" + escape_html(note) + "</p>";
  }

  void add_settings(const Json& a, const Json& b, const std::string& prefix) {
    Json all = a.is_object() ? a : Json::object();
    if (b.is_object()) all.update(b);
    for (const auto& [name, ignored] : all.items()) {
      const Json x = at_or_null(a, name.c_str()), y = at_or_null(b, name.c_str());
      if (x.is_object() && y.is_object())
        add_settings(x, y, prefix + name + ".");
      else
        setting_row(prefix + name, x, y);
    }
  }

  void setting_row(const std::string& name, const Json& a, const Json& b) {
    if (a.is_object() && b.is_object()) return add_settings(a, b, name + ".");
    out_ += fmt::format("<tr{}>", a == b ? "" : " class=differs") + cell(escape_html(name)) +
            cell(value_text(a)) + cell(value_text(b)) + "</tr>";
  }

  const CompareReport& r_;
  const Thresholds& thresholds_;
  const RequestTimes &a_, &b_;
  std::string names_[2];
  std::string out_;
};

void add_times(const Json& timing, RequestTimes& times) {
  const auto add = [](const Json& value, std::vector<double>& list) {
    if (value.is_number()) list.push_back(value.get<double>());
  };
  add(at_or_null(timing, "ttft"), times.ttft);
  add(at_or_null(timing, "e2e"), times.e2e);
  add(at_or_null(at_or_null(timing, "itl"), "p50"), times.itl);
}

}  // namespace

RequestTimes read_request_times(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("{}: cannot be opened", path);
  RequestTimes times;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    const std::string what = fmt::format("{}, line {}", path, number);
    const Json record = parse_json(line, what);
    if (!record_ok(record, what)) continue;
    const Json& body = is_openai_record(record) ? openai_body(record, what) : record;
    if (body.contains("timing")) add_times(body.at("timing"), times);
    const Json choices = at_or_null(body, "choices");
    if (!body.contains("timing") && choices.is_array())
      for (const Json& choice : choices) add_times(at_or_null(choice, "timing"), times);
  }
  return times;
}

std::string report_html(const CompareReport& report, const Thresholds& thresholds) {
  const RequestTimes a = read_request_times(report.a.path), b = read_request_times(report.b.path);
  return Page(report, thresholds, a, b).html();
}

}  // namespace mla
