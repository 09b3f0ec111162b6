#include "lib/engine/logit_edits.h"

#include <cmath>
#include <map>

#include "tests/support/catch.h"

namespace mla::test::logit_edits_test {
namespace {

struct Entry {
  int32_t count;
  float bias;
  bool operator==(const Entry&) const = default;
};

std::map<int32_t, Entry> entries(const LogitEdits& edits) {
  std::map<int32_t, Entry> all;
  for (const LogitEdit& edit : edits.list()) {
    CHECK(all.count(edit.token) == 0);  // distinct
    all[edit.token] = {edit.count, edit.bias};
  }
  return all;
}

TEST_CASE("A request without penalties and biases edits nothing") {
  LogitEdits edits({}, std::vector<int32_t>{1, 2, 2}, std::vector<int32_t>{7});
  edits.add(5);
  CHECK(edits.list().empty());
  CHECK_FALSE(edits.follow_tokens());
}

TEST_CASE("Prompt tokens are edited for the repetition penalty alone, generated ones counted") {
  SamplingParams s;
  s.frequency_penalty = 0.5f;
  LogitEdits by_frequency(s, std::vector<int32_t>{1, 2, 2}, {});
  CHECK(by_frequency.follow_tokens());
  CHECK(by_frequency.list().empty());
  by_frequency.add(2);
  by_frequency.add(9);
  by_frequency.add(2);
  CHECK(entries(by_frequency) == std::map<int32_t, Entry>{{2, {2, 0}}, {9, {1, 0}}});

  s = {};
  s.repetition_penalty = 1.2f;
  s.logit_bias = {{2, 3.0f}, {4, -1.0f}};
  LogitEdits by_repetition(s, std::vector<int32_t>{1, 2, 2}, {});
  CHECK(entries(by_repetition) ==
        std::map<int32_t, Entry>{{1, {0, 0}}, {2, {0, 3}}, {4, {-1, -1}}});
  by_repetition.add(4);
  by_repetition.add(1);
  CHECK(entries(by_repetition) == std::map<int32_t, Entry>{{1, {1, 0}}, {2, {0, 3}}, {4, {1, -1}}});
}

TEST_CASE("End ids are banned before min_tokens and have their own bias after") {
  SamplingParams s;
  s.min_tokens = 3;
  s.logit_bias = {{7, 2.0f}};
  LogitEdits edits(s, {}, std::vector<int32_t>{7, 8});
  CHECK_FALSE(edits.follow_tokens());
  CHECK(entries(edits) == std::map<int32_t, Entry>{{7, {-1, -INFINITY}}, {8, {-1, -INFINITY}}});
  edits.end_bans();
  CHECK(entries(edits) == std::map<int32_t, Entry>{{7, {-1, 2}}, {8, {-1, 0}}});
}

}  // namespace
}  // namespace mla::test::logit_edits_test
