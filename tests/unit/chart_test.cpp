#include "lib/report/chart.h"

#include <algorithm>

#include "tests/support/catch.h"

namespace mla::test::chart_test {
namespace {

int64_t count(const std::string& text, const std::string& part) {
  int64_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST_CASE("Text cannot leave its element") {
  CHECK(escape_html("<b a=\"1\" c='2'>&</b>") ==
        "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;&lt;/b&gt;");
  CHECK(to_svg(LineChart{.x_label = "<x>", .y_label = "\"y\"", .lines = {}}).find("<x>") ==
        std::string::npos);
}

TEST_CASE("Numbers are short and thousands apart") {
  CHECK(short_number(0) == "0");
  CHECK(short_number(0.012345) == "0.0123");
  CHECK(short_number(9.876) == "9.88");
  CHECK(short_number(123.456) == "123.5");
  CHECK(short_number(999.96) == "1000");
  CHECK(short_number(1234567.8) == "1,234,568");
  CHECK(short_number(-65536) == "-65,536");
}

TEST_CASE("Ticks are round and reach the largest value") {
  CHECK(axis_ticks(10, 5) == std::vector<double>{0, 2, 4, 6, 8, 10});
  CHECK(axis_ticks(64, 5) == std::vector<double>{0, 20, 40, 60, 80});
  CHECK(axis_ticks(0, 5) == std::vector<double>{0, 1});
  CHECK(axis_ticks(-3, 5) == std::vector<double>{0, 1});
  for (const double max : {1e-6, 0.03, 0.999, 1.0, 7.0, 1023.0, 5e12}) {
    const std::vector<double> ticks = axis_ticks(max, 5);
    INFO(max);
    CHECK(ticks.back() >= max * (1 - 1e-9));
    CHECK(ticks.size() >= 3);
    CHECK(ticks.size() <= 12);
    CHECK(ticks[ticks.size() - 2] < max);
  }
}

TEST_CASE("A stack has a bar for every value that is not 0 and a line at its limit") {
  const std::string svg = to_svg(StackChart{.x_label = "steps",
                                            .y_label = "tokens",
                                            .lower = {5, 0, 3},
                                            .upper = {0, 0, 2},
                                            .limit = 8,
                                            .limit_label = "budget 8"});
  CHECK(count(svg, "class=\"prefill\"") == 2);
  CHECK(count(svg, "class=\"decode\"") == 1);
  CHECK(count(svg, "class=\"limit\"") == 1);
  CHECK(count(svg, "budget 8") == 1);
}

TEST_CASE("A distribution ends at 100 % and has its values in order") {
  std::vector<double> a, b;
  for (int i = 0; i < 1000; ++i) a.push_back((i * 37) % 1000), b.push_back(5);
  const std::string svg = distribution_svg(a, b, "ms");
  CHECK(count(svg, "class=\"line a\"") == 1);
  CHECK(count(svg, "class=\"line b\"") == 1);
  CHECK(svg.find("nan") == std::string::npos);
  CHECK(distribution_svg({}, {}, "ms").find("nan") == std::string::npos);
}

TEST_CASE("Small parts of the memory stand together") {
  const std::string bar = memory_bar({{"weights", 900}, {"cache", 95}, {"a", 3}, {"b", 2}}, 1000);
  CHECK(count(bar, "<li>") == 3);
  CHECK(bar.find("other") != std::string::npos);
  CHECK(bar.find("width:90.000%") != std::string::npos);
}

}  // namespace
}  // namespace mla::test::chart_test
