#include "lib/batch/run_record.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "lib/base/error.h"
#include "tests/support/catch.h"

namespace mla::run_record_test {
namespace {

// Relative; a NaN is near nothing.
bool near(double x, double expected, double relative = 1e-6) {
  UNSCOPED_INFO(x << ", expected " << expected);
  return std::fabs(x - expected) <= relative * std::fabs(expected);
}

const std::vector<double> kValues = {12.5, 3.25,  99.0, 7.125, 7.125, 0.5,
                                     41.0, 18.75, 63.5, 2.0,   88.25};

// Expected values: numpy 2, mean, std, percentile.
TEST_CASE("a distribution gives numpy's figures") {
  Distribution d;
  for (const double x : kValues) d.add(x);
  CHECK(d.count() == 11);
  CHECK(near(d.mean(), 31.181818181818183, 1e-14));
  CHECK(near(d.std_dev(), 34.681807011793744, 1e-14));
  CHECK(d.max() == 99.0);
  CHECK(d.percentile(0) == 0.5);
  CHECK(d.percentile(50) == 12.5);
  CHECK(d.percentile(90) == 88.25);
  CHECK(near(d.percentile(95), 93.625, 1e-14));
  CHECK(near(d.percentile(99), 97.925, 1e-14));
  CHECK(d.percentile(100) == 99.0);
  d.add(1000);  // after the values were sorted
  CHECK(d.percentile(100) == 1000);
}

TEST_CASE("percentiles of two values lie between them") {
  CHECK(near(percentile({1.0, 2.0}, 50), 1.5));
  CHECK(near(percentile({1.0, 2.0}, 90), 1.9));
  CHECK(near(percentile({1.0, 2.0}, 99), 1.99));
  CHECK(percentile({4.0}, 99) == 4.0);
}

TEST_CASE("beyond its bound a distribution stays within one percent") {
  Distribution d(100);
  for (int64_t i = 0; i < 1000; ++i) d.add(static_cast<double>(i * i * 7919 % 10007) / 8);
  CHECK(d.count() == 1000);
  CHECK(near(d.mean(), 591.808125, 1e-12));
  CHECK(near(d.std_dev(), 354.5258961533831, 1e-12));
  CHECK(near(d.percentile(50), 592.375, 0.01));
  CHECK(near(d.percentile(90), 1101.8625, 0.01));
  CHECK(near(d.percentile(95), 1176.0875, 0.01));
  CHECK(near(d.percentile(99), 1230.4225, 0.01));
  CHECK(d.percentile(0) == 0);
  CHECK(d.percentile(100) <= d.max());
}

TEST_CASE("an empty distribution is zero and NaN is refused") {
  Distribution d;
  CHECK(d.percentile(99) == 0);
  CHECK(d.mean() == 0);
  CHECK(d.std_dev() == 0);
  CHECK_THROWS_AS(d.add(std::numeric_limits<double>::quiet_NaN()), Error);
}

Result request(int32_t prompt_tokens, const std::vector<double>& token_times) {
  Result r;
  r.id = 1;
  r.prompt_tokens = prompt_tokens;
  Choice& choice = r.choices.front();
  choice.timing.arrive(10);
  choice.timing.schedule(12);
  for (const double t : token_times) {
    choice.timing.token(t);
    choice.token_ids.push_back(0);
  }
  return r;
}

TEST_CASE("the summary has the names and meanings of the vLLM benches") {
  SummaryBuilder builder;
  builder.add(request(100, {20, 22, 26, 36}));  // ttft 10, tpot 16/3, itl 2 4 10, e2e 26
  builder.add(request(50, {40}));               // ttft 30, e2e 30
  const OrderedJson s = builder.summary(2.0);
  CHECK(s["elapsed_time"] == 2.0);
  CHECK(s["num_requests"] == 2);
  CHECK(s["total_num_tokens"] == 155);
  CHECK(s["requests_per_second"] == 1.0);
  CHECK(s["tokens_per_second"] == 77.5);
  CHECK(s["request_throughput"] == 1.0);
  CHECK(s["output_throughput"] == 2.5);
  CHECK(s["total_token_throughput"] == 77.5);
  CHECK(s["mean_ttft_ms"] == 20.0);
  CHECK(s["median_ttft_ms"] == 20.0);
  CHECK(s["std_ttft_ms"] == 10.0);
  CHECK(near(s["p90_ttft_ms"].get<double>(), 28.0));
  CHECK(near(s["mean_tpot_ms"].get<double>(), 16.0 / 3));  // of requests with two tokens
  CHECK(s["median_itl_ms"] == 4.0);                        // of all tokens together
  CHECK(near(s["p95_itl_ms"].get<double>(), 9.4));
  CHECK(near(s["p99_e2el_ms"].get<double>(), 29.96));
}

TEST_CASE("a summary counts a prompt once and the tokens and times of every choice") {
  Result r = request(100, {20, 22, 26, 36});
  r.choices.push_back(request(0, {40}).choices[0]);
  SummaryBuilder builder;
  builder.add(r);
  const OrderedJson s = builder.summary(2.0);
  CHECK(s["num_requests"] == 1);
  CHECK(s["total_input_tokens"] == 100);
  CHECK(s["total_output_tokens"] == 5);
  CHECK(s["mean_ttft_ms"] == 20.0);
  CHECK(s["mean_e2el_ms"] == 28.0);
  CHECK(near(s["mean_tpot_ms"].get<double>(), 16.0 / 3));
}

TEST_CASE("a summary without requests or time has no NaN") {
  const OrderedJson s = SummaryBuilder().summary(0);
  for (const auto& [name, value] : s.items()) {
    INFO(name);
    CHECK(std::isfinite(value.get<double>()));
  }
}

TEST_CASE("a field of run.json with another type is named with its file") {
  test::TempDir dir;
  RunRecord record;
  record.options = {{"load_format", "auto"}};
  record.model = {{"fingerprint", "f"}};
  write_run_record(dir.path(), record);
  const std::string path = dir / "run.json";
  const Json good = read_run_record(path);
  CHECK(good.at("state") == "running");
  const auto refused = [&](const char* pointer, const Json& value) {
    Json changed = good;
    changed[Json::json_pointer(pointer)] = value;
    std::ofstream(path) << changed.dump();
    try {
      read_run_record(path);
    } catch (const Error& e) {
      return std::string(e.what()).substr(path.size());
    }
    return std::string("accepted");
  };
  CHECK(refused("", Json::array()) == ": field '': expected an object, found a list");
  CHECK(refused("", nullptr) == ": expected an object, found null");
  CHECK(refused("/options/load_format", 3) ==
        ": field '/options/load_format': expected a string, found the number 3");
  CHECK(refused("/counts/ok", "x") ==
        ": field '/counts/ok': expected an integer, found the string \"x\"");
  CHECK(refused("/memory_plan", {{"bytes", {{"weights", "x"}}}}) ==
        ": field '/memory_plan/bytes': expected an object of numbers, found an object");
  CHECK(refused("/timeline", 3) == ": field '/timeline': expected an object, found the number 3");
  CHECK(refused("/timeline", {{"seconds", {1, "x"}}}) ==
        ": field '/timeline/seconds': expected a list of numbers, found a list");
  CHECK(refused("/new", 3) == "accepted");
  CHECK(refused("/model", nullptr) == "accepted");
}

TEST_CASE("JSON text holds no NUL and a link that leads nowhere is not an absent file") {
  test::TempDir dir;
  const auto message = [](const auto& what) {
    try {
      what();
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const std::string text("{}\0{", 4);
  CHECK(message([&] { parse_json(text, "t"); }) == "t: not valid JSON: a NUL byte at offset 2");
  CHECK(parse_ordered_json(R"({"b":1,"a":2})", "t").dump() == R"({"b":1,"a":2})");
  CHECK(message([] { parse_ordered_json(R"({"b":1,"b":2})", "t"); }) == "t: duplicate key 'b'");

  std::filesystem::create_symlink("nowhere", dir / "link");
  CHECK(has_entry(dir / "link"));
  CHECK_FALSE(has_entry(dir / "nowhere"));
  CHECK(message([&] { read_file(dir / "link"); }) ==
        (dir / "link") + ": a link to a file that is not there");
  CHECK(message([&] { read_file(dir / "nowhere"); }) ==
        (dir / "nowhere") + ": No such file or directory");
}

TEST_CASE("run.json is running first and then replaced") {
  test::TempDir dir;
  RunRecord record;
  record.version = "0.1.0";
  record.options["chunked_prefill"] = "on";
  record.input_path = "prompts.jsonl";
  write_run_record(dir.path(), record);
  Json j = parse_json(read_file(dir / "run.json"), "run.json");
  CHECK(j["state"] == "running");
  CHECK(j["input"]["sha256"].is_null());
  CHECK(j["load_time"].is_null());
  CHECK(j["summary"].is_null());
  CHECK_FALSE(j.contains("error"));

  record.state = "finished";
  record.input_sha256 = "ab";
  record.counts.ok = 3;
  record.counts.prompts_split = 2;
  record.load_time_s = 1.5;
  record.summary = SummaryBuilder().summary(1);
  write_run_record(dir.path(), record);
  j = parse_json(read_file(dir / "run.json"), "run.json");
  CHECK(j["state"] == "finished");
  CHECK(j["options"]["chunked_prefill"] == "on");
  CHECK(j["input"]["sha256"] == "ab");
  CHECK(j["counts"]["ok"] == 3);
  CHECK(j["counts"]["prompts_split"] == 2);
  CHECK(j["load_time"] == 1.5);
  CHECK(j["summary"]["num_requests"] == 0);
}

}  // namespace
}  // namespace mla::run_record_test
