#include "lib/schedule/step_plan.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "lib/base/error.h"
#include "tests/support/catch.h"

namespace mla::test::step_plan_test {

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

using Pair = std::pair<int32_t, int32_t>;

std::vector<Pair> tiles_of(const StepPlan& plan, int32_t begin, int32_t end) {
  std::vector<Pair> tiles;
  for (int32_t i = begin; i < end; ++i) {
    const mla::WorkTile& tile = plan.tiles[static_cast<size_t>(i)];
    tiles.emplace_back(tile.span, tile.begin);
  }
  return tiles;
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

TEST_CASE("Key tiles are every tile of every span in order and query tiles the heaviest first") {
  const StepPlan plan = plan_of({{0, 5}, {300, 100}, {0, 130}}, 1024);
  REQUIRE(plan.passes.size() == 1);
  const mla::Pass& pass = plan.passes[0];
  CHECK(tiles_of(plan, pass.key_tile_begin, pass.key_tile_end) ==
        std::vector<Pair>{{0, 0}, {1, 0}, {1, 128}, {1, 256}, {1, 384}, {2, 0}, {2, 128}});
  // Of 400 keys, 130, 128 and 5.
  CHECK(tiles_of(plan, pass.query_tile_begin, pass.query_tile_end) ==
        std::vector<Pair>{{1, 0}, {2, 128}, {2, 0}, {0, 0}});
}

TEST_CASE("A query tile without a key of the span is in the pass that ends the request alone") {
  const StepPlan plan = plan_of({{0, 300}}, 128);
  REQUIRE(plan.passes.size() == 3);
  const auto queries = [&](size_t p) {
    return tiles_of(plan, plan.passes[p].query_tile_begin, plan.passes[p].query_tile_end);
  };
  CHECK(queries(0) == std::vector<Pair>{{0, 0}, {0, 128}, {0, 256}});
  CHECK(queries(1) == std::vector<Pair>{{0, 128}, {0, 256}});
  CHECK(queries(2) == std::vector<Pair>{{0, 256}, {0, 128}, {0, 0}});
}

TEST_CASE("The tiles of a step cover each pair of a new token and a key that it sees") {
  const std::vector<std::vector<Pair>> batches = {
      {{0, 1}}, {{0, 700}, {129, 260}, {0, 3}}, {{1000, 1}, {127, 130}, {255, 129}, {0, 128}}};
  for (const auto& batch : batches) {
    for (const int32_t workspace : {128, 256, 640, 8192}) {
      const StepPlan plan = plan_of(batch, workspace);
      for (size_t r = 0; r < batch.size(); ++r) {
        const auto [context, q_len] = batch[r];
        std::vector<int32_t> recomputed(static_cast<size_t>(context + q_len), 0);
        std::vector<int32_t> seen(static_cast<size_t>(q_len), 0);
        std::vector<int32_t> ended(static_cast<size_t>(q_len), 0);
        for (const mla::Pass& pass : plan.passes) {
          const auto of_request = [&](const Pair& tile, auto&& f) {
            const mla::KeySpan& span =
                plan.key_spans[static_cast<size_t>(pass.span_begin + tile.first)];
            if (span.prefill == static_cast<int32_t>(r)) f(span, tile.second);
          };
          for (const Pair& tile : tiles_of(plan, pass.key_tile_begin, pass.key_tile_end)) {
            of_request(tile, [&](const mla::KeySpan& span, int32_t begin) {
              for (int32_t k = begin; k < std::min(begin + kKeyTile, span.key_end); ++k)
                ++recomputed[static_cast<size_t>(k)];
            });
          }
          for (const Pair& tile : tiles_of(plan, pass.query_tile_begin, pass.query_tile_end)) {
            of_request(tile, [&](const mla::KeySpan& span, int32_t begin) {
              for (int32_t q = begin; q < std::min(begin + mla::kQueryTile, q_len); ++q) {
                const int32_t end = std::min(span.key_end, context + q + 1);
                seen[static_cast<size_t>(q)] += std::max(0, end - span.key_begin);
                ended[static_cast<size_t>(q)] += span.key_end == context + q_len;
              }
            });
          }
        }
        CHECK(recomputed == std::vector<int32_t>(recomputed.size(), 1));
        CHECK(ended == std::vector<int32_t>(ended.size(), 1));
        for (int32_t q = 0; q < q_len; ++q) CHECK(seen[static_cast<size_t>(q)] == context + q + 1);
      }
    }
  }
}

TEST_CASE("Cutting again replaces the passes that were there") {
  StepPlan plan = plan_of({{0, 300}}, 128);
  REQUIRE(plan.passes.size() == 3);
  mla::cut_passes(plan, 512);
  CHECK(plan.passes.size() == 1);
  CHECK(plan.key_spans.size() == 1);
  CHECK(plan.tiles.size() == 3 + 3);
}

TEST_CASE("A workspace that is not a positive multiple of the key tile is an error") {
  StepPlan plan;
  CHECK_THROWS_WITH(mla::cut_passes(plan, 100),
                    "workspace rows: expected a positive multiple of 128, found 100");
  CHECK_THROWS_AS(mla::cut_passes(plan, 0), mla::Error);
  CHECK_THROWS_AS(mla::cut_passes(plan, -128), mla::Error);
}

}  // namespace mla::test::step_plan_test
