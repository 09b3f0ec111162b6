#include "lib/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace mla {
namespace {

constexpr double kWidth = 440, kHeight = 220;
constexpr double kLeft = 48, kRight = 22, kTop = 10, kBottom = 40;

std::string axis_number(double value) {
  if (value >= 1e6) return fmt::format("{:g}M", value / 1e6);
  if (value >= 1e4) return fmt::format("{:g}k", value / 1e3);
  return short_number(value);
}

// From values to places of the drawing.
struct Frame {
  std::vector<double> x_ticks, y_ticks;

  Frame(double x_max, double y_max)
      : x_ticks(axis_ticks(x_max, 6)), y_ticks(axis_ticks(y_max, 5)) {}
  double x(double value) const {
    return kLeft + value / x_ticks.back() * (kWidth - kLeft - kRight);
  }
  double y(double value) const {
    return kHeight - kBottom - value / y_ticks.back() * (kHeight - kTop - kBottom);
  }
};

std::string open_svg(const std::string& label) {
  return fmt::format(R"(<svg viewBox="0 0 {} {}" role="img" aria-label="{}">)", kWidth, kHeight,
                     escape_html(label));
}

std::string axes(const Frame& frame, const std::string& x_label, const std::string& y_label,
                 bool x_numbers = true) {
  std::string out;
  for (const double tick : frame.y_ticks) {
    out += fmt::format(R"(<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>)", kLeft,
                       kWidth - kRight, frame.y(tick), frame.y(tick));
    out += fmt::format(R"(<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>)",
                       kLeft - 6, frame.y(tick) + 4, axis_number(tick));
  }
  for (const double tick : frame.x_ticks)
    if (x_numbers)
      out += fmt::format(R"(<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>)",
                         frame.x(tick), kHeight - kBottom + 16, axis_number(tick));
  out += fmt::format(R"(<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>)",
                     kWidth - kRight, kHeight - 6, escape_html(x_label));
  out += fmt::format(R"(<text class="tick" x="4" y="{}">{}</text>)", kHeight - 6,
                     escape_html(y_label));
  return out;
}

double largest(const std::vector<double>& values) {
  return values.empty() ? 0.0 : *std::max_element(values.begin(), values.end());
}

std::string path_of(const Frame& frame, const Line& line, bool steps) {
  std::string path;
  for (size_t i = 0; i < line.x.size(); ++i) {
    if (steps && i > 0) path += fmt::format("H{:.1f}", frame.x(line.x[i]));
    path +=
        fmt::format("{}{:.1f} {:.1f}", i == 0 ? "M" : "L", frame.x(line.x[i]), frame.y(line.y[i]));
  }
  return fmt::format(R"(<path class="line {}" d="{}"/>)", line.style, path);
}

// At most `count` of the sorted values, evenly by rank, with the first and the last.
Line distribution(std::vector<double> values, const char* style, double x_max) {
  std::sort(values.begin(), values.end());
  Line line{style, {0}, {0}};
  const size_t count = std::min<size_t>(values.size(), 400);
  for (size_t i = 0; i < count; ++i) {
    const size_t at = (i + 1) * values.size() / count - 1;
    if (values[at] > x_max) break;
    line.x.push_back(values[at]);
    line.y.push_back(100.0 * static_cast<double>(at + 1) / static_cast<double>(values.size()));
  }
  return line;
}

double high_percentile(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto at = static_cast<size_t>(0.995 * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string short_number(double value) {
  const double size = std::fabs(value);
  if (size < 1e-9) return "0";
  if (size < 10) return fmt::format("{:.3g}", value);
  if (size < 1000) return fmt::format("{:.4g}", value);
  std::string digits = fmt::format("{:.0f}", size), out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return value < 0 ? "-" + out : out;
}

std::vector<double> axis_ticks(double max, int wanted) {
  if (!(max > 0) || !std::isfinite(max)) return {0, 1};
  const double rough = max / wanted, power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double unit : {5.0, 2.0, 1.0})
    if (unit * power >= rough * (1 - 1e-9)) step = unit * power;
  std::vector<double> ticks = {0};
  while (ticks.back() < max * (1 - 1e-9)) ticks.push_back(step * static_cast<double>(ticks.size()));
  return ticks;
}

std::string to_svg(const LineChart& chart) {
  double x_max = 0, y_max = chart.y_max;
  for (const Line& line : chart.lines) {
    x_max = std::max(x_max, largest(line.x));
    if (chart.y_max == 0) y_max = std::max(y_max, largest(line.y));
  }
  const Frame frame(x_max, y_max);
  std::string out = open_svg(chart.y_label + " over " + chart.x_label) +
                    axes(frame, chart.x_label, chart.y_label);
  for (const Line& line : chart.lines)
    if (!line.x.empty()) out += path_of(frame, line, chart.steps);
  return out + "</svg>";
}

std::string distribution_svg(const std::vector<double>& a, const std::vector<double>& b,
                             const std::string& x_label) {
  const double x_max = std::max(high_percentile(a), high_percentile(b));
  return to_svg(LineChart{.x_label = x_label,
                          .y_label = "% of requests at or below",
                          .lines = {distribution(a, "a", x_max), distribution(b, "b", x_max)},
                          .steps = true,
                          .y_max = 100});
}

std::string to_svg(const StackChart& chart) {
  double most = chart.limit;
  for (size_t i = 0; i < chart.lower.size(); ++i)
    most = std::max(most, chart.lower[i] + chart.upper[i]);
  const auto count = static_cast<double>(chart.lower.size());
  const Frame frame(std::max(count, 1.0), most);
  const double width = (kWidth - kLeft - kRight) / frame.x_ticks.back();
  std::string out = open_svg(chart.y_label) + axes(frame, chart.x_label, chart.y_label);
  const auto bar = [&](size_t i, double from, double to, const char* style) {
    if (to <= from) return;
    out += fmt::format(R"(<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>)",
                       style, frame.x(static_cast<double>(i)), frame.y(to),
                       std::max(width * 0.9, 0.4), frame.y(from) - frame.y(to));
  };
  for (size_t i = 0; i < chart.lower.size(); ++i) {
    bar(i, 0, chart.lower[i], "prefill");
    bar(i, chart.lower[i], chart.lower[i] + chart.upper[i], "decode");
  }
  if (chart.limit > 0) {
    const double y = frame.y(chart.limit);
    out += fmt::format(R"(<line class="limit" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>)", kLeft,
                       kWidth - kRight, y, y);
    out += fmt::format(R"(<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>)",
                       kWidth - kRight - 4, y + (y < kTop + 20 ? 14 : -4),
                       escape_html(chart.limit_label));
  }
  return out + "</svg>";
}

std::string memory_bar(const std::vector<Part>& parts, double total) {
  std::string bar = R"(<div class="bar">)", legend = R"(<ul class="legend">)";
  double other = 0;
  int color = 0;
  const auto add = [&](const std::string& name, double bytes) {
    const double share = 100 * bytes / total;
    bar += fmt::format(R"(<span class="m{}" style="width:{:.3f}%" title="{}"></span>)", color % 7,
                       share, escape_html(name));
    legend += fmt::format(R"(<li><i class="m{}"></i>{} <b>{:.3f} GiB</b> {:.1f}%</li>)", color % 7,
                          escape_html(name), bytes / (1024.0 * 1024 * 1024), share);
    ++color;
  };
  for (const Part& part : parts) {
    if (part.bytes < total / 100)
      other += part.bytes;
    else
      add(part.name, part.bytes);
  }
  if (other > 0) add("other", other);
  return bar + "</div>" + legend + "</ul>";
}

}  // namespace mla
