// The comparator of the tests: equal NaN and infinity masks first, then ‖Δ‖/‖ref‖ row by row.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace mla::test {

struct CompareResult {
  bool comparable = false;      // equal sizes, whole rows, at least one row
  int64_t mask_mismatches = 0;  // elements where NaN, +Inf or -Inf stands on one side only
  double max_error = 0.0;       // largest ‖Δ‖/‖ref‖ over the rows, of the finite elements
  int64_t worst_row = -1;       // of a mask mismatch, else of max_error
  int64_t worst_col = -1;       // there: the mismatch, else the largest |Δ|
  float worst_got = 0.0f;
  float worst_want = 0.0f;
  std::vector<double> row_errors;  // [rows]; infinite for a row of unequal masks

  // False for a NaN too, of either: a test fails on !(error <= tolerance).
  bool within(double tolerance) const;
  // One line with the worst place, for INFO and FAIL.
  std::string describe() const;
};

// got, want: [rows, cols], row-major. A row whose reference is all zero has error 0 if got is all
// zero too, else infinity. Rows with skip[row] != 0 are left out; skip is empty or [rows].
CompareResult compare_rows(std::span<const float> got, std::span<const float> want, int64_t cols,
                           std::span<const uint8_t> skip = {});

}  // namespace mla::test
