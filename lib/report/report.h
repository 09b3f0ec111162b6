// The page that puts two finished runs side by side: what holds, settings, accuracy, timing, steps,
// memory. One HTML file that needs nothing else, in light and dark.
#pragma once

#include <string>
#include <vector>

#include "lib/eval/compare.h"

namespace mla {

// Times of a run's finished requests in milliseconds, one a choice; itl: the median of each.
struct RequestTimes {
  std::vector<double> ttft, itl, e2e;
};

// Of a run's outputs.jsonl, records of either form. Throws Error with path and line.
RequestTimes read_request_times(const std::string& outputs_path);

// Reads both runs' outputs once more for the times. Throws Error where they cannot be read.
std::string report_html(const CompareReport& report, const Thresholds& thresholds);

}  // namespace mla
