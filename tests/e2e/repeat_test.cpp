// Both modes several times, and a fault that has to be seen.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "tests/e2e/process.h"

namespace mla::test::repeat_test {
namespace {

namespace fs = std::filesystem;

const std::string kBoth = "-m " + source_path("tests/data/tiny-random") +
                          " --device cpu --quiet --chunked-prefill both "
                          "--max-num-batched-tokens 64 --limit 8 " +
                          source_path("tests/data/tiny-prompts.jsonl") + " --output ";

TEST_CASE("Repeats alternate, are compared pair by pair and have the same bits") {
  TempDir dir;
  const ProcessResult result = run_program(dir, kBoth + (dir / "out") + " --repeat 3");
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(has(result.out, "3 runs of each mode in alternation, 3 pairs with times"));
  const Json report = read_json(dir / "out/compare.json");
  const Json& repeats = report.at("repeats");
  CHECK(repeats.at("runs") == 3);
  CHECK(repeats.at("pairs") == 3);
  CHECK(repeats.at("least_match") == 1.0);
  CHECK(repeats.at("notes").empty());
  const Json& elapsed = repeats.at("metrics").at("elapsed_time");
  for (const auto& [key, mode] : {std::pair("a", "off"), {"b", "on"}}) {
    REQUIRE(elapsed.at(key).size() == 3);
    for (int i = 0; i < 3; ++i) {
      const std::string of_repeat = i == 0 ? "" : fmt::format("repeat-{}/", i + 1);
      const std::string folder = dir / "out/" + of_repeat + mode;
      const Json run = read_json(folder + "/run.json");
      CHECK(elapsed.at(key)[static_cast<size_t>(i)] == run.at("summary").at("elapsed_time"));
      CHECK(run.at("options").at("chunked_prefill") == mode);
    }
  }
  const double ratio = elapsed.at("ratio").get<double>();
  CHECK(elapsed.at("interval_95")[0].get<double>() <= ratio);
  CHECK(ratio <= elapsed.at("interval_95")[1].get<double>());
  const std::string page = read_file(dir / "out/report.html");
  CHECK(has(page, "<h2>Repeats</h2>"));
  CHECK_FALSE(has(page, "nan"));
  // Off on, on off, off on.
  const auto written = [&](const std::string& folder) {
    return fs::last_write_time(dir / "out/" + folder + "/run.json");
  };
  CHECK(written("off") <= written("on"));
  CHECK(written("on") <= written("repeat-2/on"));
  CHECK(written("repeat-2/on") <= written("repeat-2/off"));
  CHECK(written("repeat-2/off") <= written("repeat-3/off"));

  // A run that went on has no time of its own, and a repeat with other bits is seen.
  const std::string second = dir / "out/repeat-2/on/outputs.jsonl";
  std::string text = read_file(second);
  write_text(second, text.substr(0, text.find('\n') + 1));
  fs::rename(second, second + ".partial");
  std::string changed = read_file(dir / "out/repeat-3/off/outputs.jsonl");
  const size_t at = changed.find("\"token_ids\":[") + 13;
  changed.replace(at, changed.find(',', at) - at, "7");
  write_text(dir / "out/repeat-3/off/outputs.jsonl", changed);
  const ProcessResult resumed = run_program(dir, kBoth + (dir / "out") + " --repeat 3 --resume");
  INFO(resumed.err);
  CHECK(resumed.exit_code == 4);
  CHECK(has(resumed.out, "3 runs of each mode in alternation, 2 pairs with times"));
  CHECK(has(resumed.out, "repeat-2/on: no times: a run went on"));
  CHECK(has(resumed.out, "FAIL: the share of requests with the same bits in each repeat is 0.875"));
  CHECK(has(resumed.out, "repeat-3/off against"));
}

TEST_CASE("What an earlier run with more repeats has left goes when it is overwritten") {
  TempDir dir;
  REQUIRE(run_program(dir, kBoth + (dir / "out") + " --repeat 3").exit_code == 0);
  REQUIRE(fs::exists(dir / "out/repeat-3/on/outputs.jsonl"));
  write_text(dir / "out/repeat-3/mine.txt", "not of a run");
  // The device fails, which ends the program before its comparison.
  const ProcessResult failed = run_program(dir, kBoth + (dir / "out") + " --repeat 2 --overwrite",
                                           "/dev/null", "MLA_FAULT=throw:0", "mla-run-faulty");
  CHECK(failed.exit_code == 1);
  CHECK_FALSE(fs::exists(dir / "out/compare.json"));
  CHECK_FALSE(fs::exists(dir / "out/report.html"));
  CHECK_FALSE(fs::exists(dir / "out/repeat-3/on"));
  CHECK(fs::exists(dir / "out/repeat-3/mine.txt"));
  CHECK(fs::exists(dir / "out/repeat-2/on/run.json"));
  // A run of one mode has nothing to do with the comparison beside it.
  write_text(dir / "out/compare.json", "{}");
  REQUIRE(run_program(dir, "-m " + source_path("tests/data/tiny-random") +
                               " --device cpu --quiet --overwrite --limit 1 -o " + (dir / "out") +
                               " " + source_path("tests/data/tiny-prompts.jsonl"))
              .exit_code == 0);
  CHECK(fs::exists(dir / "out/compare.json"));
}

TEST_CASE("Options of both are refused with one mode") {
  TempDir dir;
  const std::string one = "-m " + source_path("tests/data/tiny-random") +
                          " --device cpu --output " + (dir / "out") + " " +
                          source_path("tests/data/tiny-prompts.jsonl") + " ";
  for (const std::string option : {"--repeat 2", "--min-match 0.5", "--max-logprob-diff 1",
                                   "--max-accuracy-drop 0.1", "--min-accuracy 0.5"}) {
    const ProcessResult result = run_program(dir, one + option);
    CHECK(result.exit_code == 2);
    CHECK(has(result.err, option.substr(0, option.find(' ')) +
                              ": expected --chunked-prefill both with it, found off"));
  }
  CHECK(run_program(dir, one + "--repeat 0").exit_code == 2);
  CHECK_FALSE(fs::exists(dir / "out"));
}

TEST_CASE("One wrong logit in one mode is caught: exit 4, and where the answers part") {
  TempDir dir;
  const auto run = [&](const std::string& fault) {
    return run_program(dir, kBoth + (dir / "out") + " --overwrite --logprobs 2", "/dev/null", fault,
                       "mla-run-faulty");
  };
  REQUIRE(run("").exit_code == 0);
  const ProcessResult result = run("MLA_FAULT=logit");
  INFO(result.out);
  CHECK(result.exit_code == 4);
  CHECK(has(result.out, "different: 7 of 8 requests have the same tokens"));
  CHECK(has(result.out, "FAIL: the share of requests with the same tokens is 0.875"));
  const Json report = read_json(dir / "out/compare.json");
  REQUIRE(report.at("divergences").size() == 1);
  const Json& divergence = report.at("divergences")[0];
  CHECK(divergence.at("token_a") != divergence.at("token_b"));
  CHECK(divergence.at("margin_a").is_number());
  CHECK(divergence.at("margin_b").get<double>() > 500);  // the wrong one stands far above
  CHECK(has(read_file(dir / "out/report.html"), "Where answers part"));
  CHECK(has(read_file(dir / "out/report.html"), "class=\"verdict bad\">Different"));
}

}  // namespace
}  // namespace mla::test::repeat_test
