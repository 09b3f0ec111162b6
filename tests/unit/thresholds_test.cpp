// What a comparison lets pass, and what repeats say of times.
#include <cmath>
#include <limits>

#include "lib/base/error.h"
#include "lib/eval/compare.h"
#include "tests/support/catch.h"

namespace mla::thresholds_test {
namespace {

CompareReport identical() {
  CompareReport r;
  r.in_both = r.compared = r.token_identical = r.logprob_identical = 10;
  r.max_logprob_difference = 0.0;
  r.a.answered = r.b.answered = 10;
  r.a.correct = r.b.correct = 7;
  return r;
}

std::string only_failure(const CompareReport& report, const Thresholds& thresholds) {
  const auto beyond = failures(report, thresholds);
  return beyond.size() == 1 ? beyond[0] : fmt::format("{} failures", beyond.size());
}

TEST_CASE("identical runs pass every threshold at its strictest") {
  CHECK(failures(identical(), {}).empty());
  CHECK(
      failures(identical(),
               {.min_match = 1, .max_logprob_diff = 0, .max_accuracy_drop = 0, .min_accuracy = 0.7})
          .empty());
}

TEST_CASE("each threshold is told by itself where it is passed") {
  CompareReport r = identical();
  r.logprob_identical = 9;
  CHECK(only_failure(r, {}) ==
        "the share of requests with the same logprob bits is 0.9, less than 1");
  CHECK(failures(r, {.min_match = 0.9}).empty());
  r = identical();
  r.max_logprob_difference = 0.5;
  CHECK(failures(r, {}).empty());
  CHECK(failures(r, {.max_logprob_diff = 0.5}).empty());
  CHECK(only_failure(r, {.max_logprob_diff = 0.25}) ==
        "the largest logprob difference is 0.5, more than 0.25");
  r.max_logprob_difference.reset();
  CHECK(only_failure(r, {.max_logprob_diff = 0.25}) ==
        "no logprobs are there to compare (--logprobs)");
  r.max_logprob_difference = std::numeric_limits<double>::quiet_NaN();
  CHECK(failures(r, {.max_logprob_diff = 0.25}).size() == 1);
  r = identical();
  r.b.correct = 6;
  CHECK(failures(r, {.max_accuracy_drop = 0.11}).empty());
  CHECK(only_failure(r, {.max_accuracy_drop = 0.05}) ==
        "accuracy drops from 0.7000 to 0.6000, by more than 0.05");
  CHECK(only_failure(r, {.min_accuracy = 0.65}) == "accuracy of B is 0.6000, less than 0.65");
  CHECK(failures(r, {.max_accuracy_drop = 0.1}).empty());  // 0.7 - 0.6 is a little more
  r.b.correct = 10;                                        // a rise is no drop
  CHECK(failures(r, {.max_accuracy_drop = 0}).empty());
  r.a.answered = 0;
  CHECK(only_failure(r, {.max_accuracy_drop = 1}) ==
        "no answers are known, of which accuracy could drop");
  CHECK(only_failure(r, {.min_accuracy = 0}) ==
        "A has no known answers, its accuracy is to be at least 0");
  r = identical();
  r.repeats.emplace();
  CHECK(failures(r, {}).empty());
  r.repeats->least_match = 0.8;
  CHECK(only_failure(r, {}) ==
        "the share of requests with the same bits in each repeat is 0.8, less than 1");
}

TEST_CASE("a threshold out of range is refused by its name") {
  const auto refused = [](const Thresholds& thresholds, const std::string& option) {
    try {
      failures(identical(), thresholds);
    } catch (const UsageError& e) {
      return std::string(e.what()).starts_with(option + ": expected a number");
    }
    return false;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double x : {-0.1, 1.5, nan}) {
    CHECK(refused({.min_match = x}, "--min-match"));
    CHECK(refused({.max_accuracy_drop = x}, "--max-accuracy-drop"));
    CHECK(refused({.min_accuracy = x}, "--min-accuracy"));
  }
  CHECK(refused({.max_logprob_diff = -0.1}, "--max-logprob-diff"));
  CHECK(refused({.max_logprob_diff = nan}, "--max-logprob-diff"));
}

TEST_CASE("the paired ratio is the geometric mean with Student's interval") {
  // ln(b/a) is 0.01, 0.02, 0.03: mean 0.02, deviation 0.01, t of 2 degrees 4.303.
  const std::vector<double> a = {1, 2, 4};
  std::vector<double> b;
  for (size_t i = 0; i < 3; ++i) b.push_back(a[i] * std::exp(0.01 * static_cast<double>(i + 1)));
  const PairedRatio r = paired_ratio(a, b);
  CHECK(std::fabs(r.ratio - std::exp(0.02)) < 1e-12);
  const double half = 4.303 * 0.01 / std::sqrt(3.0);
  REQUIRE(r.interval);
  CHECK(std::fabs(r.interval->first - std::exp(0.02 - half)) < 1e-12);
  CHECK(std::fabs(r.interval->second - std::exp(0.02 + half)) < 1e-12);
  CHECK_FALSE(paired_ratio({2}, {3}).interval);
  CHECK(paired_ratio({2}, {3}).ratio == 1.5);
  CHECK_THROWS_AS(paired_ratio({}, {}), Error);
  CHECK_THROWS_AS(paired_ratio({1}, {1, 2}), Error);
  CHECK_THROWS_AS(paired_ratio({0}, {1}), Error);
}

TEST_CASE("Student's quantile goes on where the table ends") {
  CHECK(student_t_975(1) == 12.706);
  CHECK(student_t_975(30) == 2.042);
  // Of published tables.
  for (const auto& [degrees, t] :
       {std::pair(31, 2.0395), {40, 2.0211}, {60, 2.0003}, {120, 1.9799}})
    CHECK(std::fabs(student_t_975(degrees) - t) < 1e-4);
  CHECK_THROWS_AS(student_t_975(0), Error);
}

}  // namespace
}  // namespace mla::thresholds_test
