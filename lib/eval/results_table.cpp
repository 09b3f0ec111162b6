#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "lib/eval/results.h"

namespace mla {
namespace {

size_t characters(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// A `|` would end the cell. The tool sets the cell first and escapes then.
std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) result += c == '|' ? std::string("\\|") : std::string(1, c);
  return result;
}

// A column of Markdown, as wide as its widest cell and at least 3.
struct Column {
  std::string title;
  bool number;  // set to the right, which the rule says by a colon
  std::array<std::string, 2> cells;

  size_t width() const {
    return std::max({size_t{3}, characters(title), characters(cells[0]), characters(cells[1])});
  }
  std::string head() const { return fmt::format("{:^{}}|", title, width()); }
  std::string rule() const { return std::string(width() - 1, '-') + (number ? ":|" : "-|"); }
  std::string row(size_t i) const {
    return escaped(number ? fmt::format("{:>{}}", cells[i], width())
                          : fmt::format("{:<{}}", cells[i], width())) +
           "|";
  }
};

// Four decimals, without the zeros that both cells end in.
Column numbers(const char* title, double first, double second) {
  Column column{title, true, {fmt::format("{:.4f}", first), fmt::format("{:.4f}", second)}};
  const auto drop_common = [&](char c) {
    if (!column.cells[0].ends_with(c) || !column.cells[1].ends_with(c)) return false;
    for (std::string& cell : column.cells) cell.pop_back();
    return true;
  };
  while (drop_common('0')) continue;
  drop_common('.');
  return column;
}

}  // namespace

std::string results_table(const EvalTask& task, const EvalScores& scores) {
  const FilterScore &first = scores.flexible, &second = scores.strict;  // in order of their names
  const auto first_error = first.std_error(), second_error = second.std_error();
  const std::string shots = fmt::format("{}", task.num_fewshot);
  const Column columns[] = {
      {"Tasks", false, {task.name, ""}},
      task.version ? Column{"Version", true, {fmt::format("{}", *task.version), ""}}
                   : Column{"Version", false, {"    N/A", ""}},
      {"Filter", false, {first.filter, second.filter}},
      {"n-shot", true, {shots, shots}},
      {"Metric", false, {"exact_match", "exact_match"}},
      {"", false, {"↑", "↑"}},
      numbers("Value", first.mean(), second.mean()),
      {"", false, {"±", "±"}},
      first_error && second_error ? numbers("Stderr", *first_error, *second_error)
                                  : Column{"Stderr", false, {"   N/A", "   N/A"}}};
  std::string head = "|", rule = "|", rows[2] = {"|", "|"};
  for (const Column& column : columns) {
    head += column.head();
    rule += column.rule();
    for (size_t i = 0; i < 2; ++i) rows[i] += column.row(i);
  }
  return head + "\n" + rule + "\n" + rows[0] + "\n" + rows[1] + "\n";
}

}  // namespace mla
