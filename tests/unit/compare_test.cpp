#include "tests/support/compare.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/catch.h"

namespace mla::test::compare_test {
namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInf = std::numeric_limits<float>::infinity();
const std::vector<float> kReference = {1, 2, 3, 4, 5, 6, 7, 8, 9};  // [3, 3]

std::vector<float> with(size_t index, float value) {
  std::vector<float> x = kReference;
  x[index] = value;
  return x;
}

TEST_CASE("The comparator finds equal rows equal", "[compare]") {
  const CompareResult r = compare_rows(kReference, kReference, 3);
  CHECK(r.within(0.0));
  CHECK(r.max_error == 0.0);
}

TEST_CASE("The comparator refuses a NaN that stands on one side only", "[compare]") {
  for (const auto& [got, want] :
       {std::pair{with(4, kNan), kReference}, std::pair{kReference, with(4, kNan)}}) {
    const CompareResult r = compare_rows(got, want, 3);
    CHECK_FALSE(r.within(1e30));
    CHECK(r.mask_mismatches == 1);
    CHECK(r.worst_row == 1);
    CHECK(r.worst_col == 1);
  }
}

TEST_CASE("The comparator refuses rows of NaN only", "[compare]") {
  const std::vector<float> nans(9, kNan);
  CHECK_FALSE(compare_rows(nans, kReference, 3).within(1e30));
}

TEST_CASE("The comparator accepts NaN and infinity where both sides have them", "[compare]") {
  std::vector<float> x = with(4, kNan);
  x[0] = -kInf;
  x[8] = kInf;
  CHECK(compare_rows(x, x, 3).within(0.0));
  std::vector<float> y = x;
  y[1] += 1.0f;
  CHECK_FALSE(compare_rows(y, x, 3).within(1e-3));
}

TEST_CASE("The comparator refuses an infinity of the other sign or for a NaN", "[compare]") {
  CHECK_FALSE(compare_rows(with(2, kInf), kReference, 3).within(1e30));
  CHECK_FALSE(compare_rows(kReference, with(2, kInf), 3).within(1e30));
  CHECK_FALSE(compare_rows(with(2, -kInf), with(2, kInf), 3).within(1e30));
  CHECK_FALSE(compare_rows(with(2, kNan), with(2, kInf), 3).within(1e30));
}

TEST_CASE("The comparator sees a flipped sign", "[compare]") {
  CHECK_FALSE(compare_rows(with(8, -9.0f), kReference, 3).within(0.5));
  std::vector<float> negated = kReference;
  for (float& v : negated) v = -v;
  const CompareResult r = compare_rows(negated, kReference, 3);
  CHECK(std::fabs(r.max_error - 2.0) < 1e-9);
}

TEST_CASE("The comparator sees rows that are off by one", "[compare]") {
  const std::vector<float> got(kReference.begin(), kReference.begin() + 6);
  const std::vector<float> want(kReference.begin() + 3, kReference.end());
  CHECK_FALSE(compare_rows(got, want, 3).within(0.3));
}

TEST_CASE("The comparator measures each row by its own norm", "[compare]") {
  // An error of the small row would vanish in a norm over all rows.
  const std::vector<float> want = {1e-3f, 1e-3f, 1e3f, 1e3f};
  const std::vector<float> got = {2e-3f, 1e-3f, 1e3f, 1e3f};
  const CompareResult r = compare_rows(got, want, 2);
  CHECK(std::fabs(r.max_error - std::sqrt(0.5)) < 1e-4);
  CHECK(r.worst_row == 0);
  CHECK(r.worst_col == 0);
  CHECK(r.row_errors[1] == 0.0);
  CHECK(r.describe().find("[0, 0]") != std::string::npos);
}

TEST_CASE("The comparator accepts only zero where the reference is all zero", "[compare]") {
  const std::vector<float> zero(6, 0.0f);
  CHECK(compare_rows(zero, zero, 3).within(0.0));
  std::vector<float> tiny = zero;
  tiny[4] = 1e-30f;
  CHECK_FALSE(compare_rows(tiny, zero, 3).within(1e30));
}

TEST_CASE("The comparator refuses unequal sizes and nothing to compare", "[compare]") {
  CHECK_FALSE(compare_rows(std::vector<float>(6), std::vector<float>(9), 3).within(1e30));
  CHECK_FALSE(compare_rows(std::vector<float>(8), std::vector<float>(8), 3).within(1e30));
  CHECK_FALSE(compare_rows({}, {}, 3).within(1e30));
  const std::vector<uint8_t> all = {1, 1, 1};
  CHECK_FALSE(compare_rows(kReference, kReference, 3, all).within(1e30));
}

TEST_CASE("The comparator leaves out the rows it is told to", "[compare]") {
  const std::vector<uint8_t> skip = {0, 1, 0};
  CHECK(compare_rows(with(4, kNan), kReference, 3, skip).within(0.0));
  CHECK_FALSE(compare_rows(with(0, kNan), kReference, 3, skip).within(1e30));
}

TEST_CASE("A tolerance that is a NaN accepts nothing", "[compare]") {
  CHECK_FALSE(compare_rows(kReference, kReference, 3).within(std::nan("")));
}

}  // namespace
}  // namespace mla::test::compare_test
