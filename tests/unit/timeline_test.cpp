#include "lib/engine/timeline.h"

#include <algorithm>
#include <vector>

#include "tests/support/catch.h"

namespace mla::test::timeline_test {
namespace {

TEST_CASE("A short timeline has an entry a step") {
  StepTimeline timeline;
  timeline.add(0.5, 100, 0);
  timeline.add(0.75, 20, 7);
  CHECK(timeline.json() == OrderedJson{{"steps_per_entry", 1},
                                       {"seconds", {0.5, 0.75}},
                                       {"prefill_tokens", {100, 20}},
                                       {"decode_tokens", {0, 7}}});
  CHECK(StepTimeline().json().at("seconds").empty());
}

TEST_CASE("A long timeline keeps its sums and its end in a bounded number of entries") {
  for (const int steps : {1024, 1025, 2048, 2049, 5000, 100000}) {
    StepTimeline timeline;
    for (int i = 1; i <= steps; ++i) timeline.add(i, i, 2 * i);
    const OrderedJson json = timeline.json();
    const auto entries = static_cast<int64_t>(json.at("seconds").size());
    const auto per_entry = json.at("steps_per_entry").get<int64_t>();
    INFO(steps << " steps in " << entries << " entries of " << per_entry);
    CHECK(entries <= 1024);
    CHECK(entries > 500);
    CHECK(entries == (steps + per_entry - 1) / per_entry);
    int64_t prefill = 0, decode = 0;
    for (int64_t i = 0; i < entries; ++i) {
      const auto at = static_cast<size_t>(i);
      CHECK(json.at("seconds")[at].get<double>() ==
            static_cast<double>(std::min<int64_t>((i + 1) * per_entry, steps)));
      prefill += json.at("prefill_tokens")[at].get<int64_t>();
      decode += json.at("decode_tokens")[at].get<int64_t>();
    }
    CHECK(prefill == int64_t{steps} * (steps + 1) / 2);
    CHECK(decode == int64_t{steps} * (steps + 1));
  }
}

TEST_CASE("Timelines of several engines are one in order of time, with their sums") {
  for (const int steps : {0, 1, 10, 700, 3000}) {
    StepTimeline a, b, none;
    int64_t prefill = 0, decode = 0;
    for (int i = 1; i <= steps; ++i) {
      a.add(i, i, 1);
      prefill += i, decode += 1;
    }
    for (int i = 1; i <= 600; ++i) {
      b.add(i + 0.5, 2, i);
      prefill += 2, decode += i;
    }
    const OrderedJson json = StepTimeline::merged({&a, &b, &none}).json();
    const auto seconds = json.at("seconds").get<std::vector<double>>();
    INFO(steps << " steps: " << seconds.size() << " entries");
    CHECK(seconds.size() <= 1024);
    CHECK(seconds.size() > 200);
    CHECK(std::is_sorted(seconds.begin(), seconds.end()));
    CHECK(seconds.back() == std::max<double>(steps, 600.5));
    CHECK(json.at("steps_per_entry") == (steps == 3000 ? 4 : steps == 700 ? 2 : 1));
    for (const auto& [key, sum] :
         {std::pair("prefill_tokens", prefill), {"decode_tokens", decode}}) {
      int64_t found = 0;
      for (const auto& n : json.at(key)) found += n.get<int64_t>();
      CHECK(found == sum);
    }
  }
}

}  // namespace
}  // namespace mla::test::timeline_test
