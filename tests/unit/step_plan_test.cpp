#include "lib/schedule/step_plan.h"

#include <utility>
#include <vector>

#include "lib/base/error.h"
#include "tests/support/catch.h"

namespace {

using mla::kKeyTile;
using mla::StepPlan;

// Requests as pairs of context and new tokens.
StepPlan plan_of(const std::vector<std::pair<int32_t, int32_t>>& requests, int32_t workspace) {
  StepPlan plan;
  int32_t row = 0;
  for (const auto& [context, q] : requests) {
    plan.prefill.push_back({row, q, context, 0});
    row += q;
  }
  mla::cut_passes(plan, workspace);
  return plan;
}

struct Span {
  int32_t pass, prefill, begin, end, workspace_row;
  friend bool operator==(const Span&, const Span&) = default;
};

std::vector<Span> spans_of(const StepPlan& plan) {
  std::vector<Span> spans;
  for (size_t p = 0; p < plan.passes.size(); ++p) {
    for (int32_t i = plan.passes[p].span_begin; i < plan.passes[p].span_end; ++i) {
      const mla::KeySpan& s = plan.key_spans[static_cast<size_t>(i)];
      spans.push_back(
          {static_cast<int32_t>(p), s.prefill, s.key_begin, s.key_end, s.workspace_row});
    }
  }
  return spans;
}

size_t passes_of(const std::vector<std::pair<int32_t, int32_t>>& requests, int32_t workspace) {
  return plan_of(requests, workspace).passes.size();
}

}  // namespace

TEST_CASE("A step without prompt rows has no pass") {
  const StepPlan plan = plan_of({}, 128);
  CHECK(plan.passes.empty());
  CHECK(plan.key_spans.empty());
}

TEST_CASE("Requests that fit the workspace together share one pass without gaps") {
  const StepPlan plan = plan_of({{0, 5}, {130, 1}, {0, 120}}, 256);
  CHECK(spans_of(plan) ==
        std::vector<Span>{{0, 0, 0, 5, 0}, {0, 1, 0, 131, 5}, {0, 2, 0, 120, 136}});
  CHECK(plan.passes[0].rows == 256);
}

TEST_CASE("A long request is cut at the largest multiple of the key tile that fits") {
  const StepPlan plan = plan_of({{0, 5}, {300, 100}, {0, 7}}, 384);
  CHECK(spans_of(plan) ==
        std::vector<Span>{
            {0, 0, 0, 5, 0}, {0, 1, 0, 256, 5}, {1, 1, 256, 400, 0}, {1, 2, 0, 7, 144}});
  CHECK(plan.passes[0].rows == 261);
  CHECK(plan.passes[1].rows == 151);
}

TEST_CASE("A request for which less than a tile is left begins in the next pass") {
  const StepPlan plan = plan_of({{0, 200}, {0, 100}}, 256);
  CHECK(spans_of(plan) == std::vector<Span>{{0, 0, 0, 200, 0}, {1, 1, 0, 100, 0}});
}

TEST_CASE("A workspace of one tile takes one tile a pass") {
  CHECK(passes_of({{0, 127}}, kKeyTile) == 1);
  CHECK(passes_of({{0, 128}}, kKeyTile) == 1);
  CHECK(passes_of({{0, 129}}, kKeyTile) == 2);
  CHECK(passes_of({{1000, 1}}, kKeyTile) == 8);
  CHECK(passes_of({{1024, 1}}, kKeyTile) == 9);
}

TEST_CASE("Keys exactly at and one over the workspace take one pass and two") {
  CHECK(passes_of({{1023, 1}}, 1024) == 1);
  CHECK(passes_of({{1024, 1}}, 1024) == 2);
  CHECK(passes_of({{0, 2048}}, 1024) == 2);
  CHECK(passes_of({{0, 2049}}, 1024) == 3);
}

TEST_CASE("One long request beside many short ones costs one pass more") {
  const int32_t workspace = 4096;
  for (size_t place = 0; place <= 30; ++place) {
    std::vector<std::pair<int32_t, int32_t>> requests(30, {0, 100});
    requests.insert(requests.begin() + static_cast<std::ptrdiff_t>(place), {4000, 96});
    CHECK(passes_of(requests, workspace) == 2);
  }
}

TEST_CASE("Cutting again replaces the passes that were there") {
  StepPlan plan = plan_of({{0, 300}}, 128);
  REQUIRE(plan.passes.size() == 3);
  mla::cut_passes(plan, 512);
  CHECK(plan.passes.size() == 1);
  CHECK(plan.key_spans.size() == 1);
}

TEST_CASE("A workspace that is not a positive multiple of the key tile is an error") {
  StepPlan plan;
  CHECK_THROWS_WITH(mla::cut_passes(plan, 100),
                    "workspace rows: expected a positive multiple of 128, found 100");
  CHECK_THROWS_AS(mla::cut_passes(plan, 0), mla::Error);
  CHECK_THROWS_AS(mla::cut_passes(plan, -128), mla::Error);
}
