// Both modes run several times in alternation: what that says of their times.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/json.h"

namespace mla {

// B's values over A's, pair by pair, which takes out what changes from pair to pair.
struct PairedRatio {
  double ratio = 0;  // geometric mean of b / a
  // 95 %, of Student's t over the logarithms; absent for a single pair.
  std::optional<std::pair<double, double>> interval;
};
// Values above 0, as many of one as of the other, at least one.
PairedRatio paired_ratio(const std::vector<double>& a, const std::vector<double>& b);

// The quantile of Student's t at 0.975; `degrees` of freedom >= 1.
double student_t_975(int64_t degrees);

struct RepeatReport {
  struct Metric {
    std::string name;          // of run.json's summary
    std::vector<double> a, b;  // of the pairs in their order
    PairedRatio ratio;
  };
  int64_t runs = 0;   // of each mode
  int64_t pairs = 0;  // that have times: a resumed run does not have all of them
  std::vector<Metric> metrics;
  // The smallest share of requests of a repeat that have the tokens and logprob bits of the first
  // run of that mode.
  double least_match = 1.0;
  std::vector<std::string> notes;  // what was left out, and repeats that differ
};

// Folders of finished runs, A's and B's of each repeat; the first is what the others are compared
// with. Throws Error where one cannot be read.
RepeatReport compare_repeats(const std::vector<std::pair<std::string, std::string>>& folders);

OrderedJson to_json(const RepeatReport& report);
std::string to_text(const RepeatReport& report);

}  // namespace mla
