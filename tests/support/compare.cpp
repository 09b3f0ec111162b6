#include "tests/support/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace mla::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// 0 finite, 1 NaN, 2 +Inf, 3 -Inf.
int kind_of(float x) {
  if (std::isnan(x)) return 1;
  if (std::isinf(x)) return x > 0 ? 2 : 3;
  return 0;
}

}  // namespace

bool CompareResult::within(double tolerance) const {
  return comparable && mask_mismatches == 0 && max_error <= tolerance;
}

std::string CompareResult::describe() const {
  if (!comparable) return "not comparable: the sizes differ, or there is no row";
  return fmt::format(
      "{} unequal NaN or infinity masks, max ‖Δ‖/‖ref‖ {:.3g}, worst at [{}, {}]: "
      "found {:.9g}, expected {:.9g}",
      mask_mismatches, max_error, worst_row, worst_col, worst_got, worst_want);
}

CompareResult compare_rows(std::span<const float> got, std::span<const float> want, int64_t cols,
                           std::span<const uint8_t> skip) {
  CompareResult result;
  if (cols <= 0 || got.size() != want.size() || want.empty() ||
      want.size() % static_cast<size_t>(cols) != 0) {
    return result;
  }
  const int64_t rows = static_cast<int64_t>(want.size()) / cols;
  if (!skip.empty() && static_cast<int64_t>(skip.size()) != rows) return result;
  result.row_errors.assign(static_cast<size_t>(rows), 0.0);
  for (int64_t row = 0; row < rows; ++row) {
    if (!skip.empty() && skip[static_cast<size_t>(row)]) continue;
    result.comparable = true;
    double difference = 0.0, reference = 0.0, largest = -1.0;
    int64_t largest_col = 0, mismatch_col = -1;
    for (int64_t col = 0; col < cols; ++col) {
      const float g = got[static_cast<size_t>(row * cols + col)];
      const float w = want[static_cast<size_t>(row * cols + col)];
      if (kind_of(g) != kind_of(w)) {
        ++result.mask_mismatches;
        if (mismatch_col < 0) mismatch_col = col;
      }
      if (kind_of(g) != 0 || kind_of(w) != 0) continue;
      const double delta = static_cast<double>(g) - static_cast<double>(w);
      difference += delta * delta;
      reference += static_cast<double>(w) * static_cast<double>(w);
      if (std::fabs(delta) > largest) {
        largest = std::fabs(delta);
        largest_col = col;
      }
    }
    double error = difference == 0.0 ? 0.0 : kInf;
    if (reference > 0.0) error = std::sqrt(difference / reference);
    if (mismatch_col >= 0) {
      error = kInf;
      largest_col = mismatch_col;
    }
    result.row_errors[static_cast<size_t>(row)] = error;
    if (result.worst_row < 0 || error > result.max_error) {
      result.max_error = error;
      result.worst_row = row;
      result.worst_col = largest_col;
      result.worst_got = got[static_cast<size_t>(row * cols + largest_col)];
      result.worst_want = want[static_cast<size_t>(row * cols + largest_col)];
    }
  }
  return result;
}

}  // namespace mla::test
