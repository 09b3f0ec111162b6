// Charts as inline SVG whose colours are those of the page's style: classes a and b are the two
// runs, prefill and decode the kinds of tokens.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mla {

// Text for HTML, in an element or in a quoted attribute.
std::string escape_html(std::string_view text);

// A number as a person reads it: three or four digits, thousands apart.
std::string short_number(double value);

// Ticks at 1, 2 or 5 times a power of ten from 0 to at least `max`, about `wanted` of them; {0, 1}
// where max is not above 0.
std::vector<double> axis_ticks(double max, int wanted);

struct Line {
  std::string style;         // class of the line
  std::vector<double> x, y;  // as many of each, x ascending
};

// Lines over a linear axis each from 0. `steps`: a value holds up to the next x.
struct LineChart {
  std::string x_label, y_label;
  std::vector<Line> lines;
  bool steps = false;
  double y_max = 0;  // 0: of the data
};
std::string to_svg(const LineChart& chart);

// Share of values that are at most x, a line for each set; up to the largest 99.5th percentile.
std::string distribution_svg(const std::vector<double>& a, const std::vector<double>& b,
                             const std::string& x_label);

// Stacked bars, one of each place, and a line at `limit` (0: none).
struct StackChart {
  std::string x_label, y_label;
  std::vector<double> lower, upper;  // classes prefill and decode
  double limit = 0;
  std::string limit_label;
};
std::string to_svg(const StackChart& chart);

// One bar of named parts, those below a hundredth together as "other"; labels under it.
struct Part {
  std::string name;
  double bytes;
};
std::string memory_bar(const std::vector<Part>& parts, double total);

}  // namespace mla
