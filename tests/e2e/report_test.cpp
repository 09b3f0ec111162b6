// The page of a comparison, from outside; what it looks like is looked at in a browser.
#include <filesystem>

#include "tests/e2e/process.h"

namespace mla::test::report_test {
namespace {

namespace fs = std::filesystem;

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu --quiet ";

TEST_CASE("Both modes give a page that stands alone and says that they are identical") {
  TempDir dir;
  const ProcessResult result = run_program(
      dir, kModel + "--chunked-prefill both --max-num-batched-tokens 64 --limit 20 --output " +
               (dir / "out") + " " + source_path("tests/data/tiny-prompts.jsonl"));
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  const std::string page = read_file(dir / "out/report.html");
  CHECK(has(page, "Identical in every bit"));
  CHECK(has(page, "identical: 20 of 20 requests"));
  for (const char* part : {"Distributions", "Steps", "Tokens a second", "Memory plan", "Settings",
                           "budget 64", "chunked prefill off", "chunked prefill on"}) {
    INFO(part);
    CHECK(has(page, part));
  }
  CHECK_FALSE(has(page, "http"));
  CHECK_FALSE(has(page, "nan"));
  CHECK_FALSE(has(page, "<script"));
  const Json run = read_json(dir / "out/on/run.json");
  const Json& timeline = run.at("timeline");
  int64_t tokens = 0;
  for (const char* kind : {"prefill_tokens", "decode_tokens"})
    for (const Json& n : timeline.at(kind)) tokens += n.get<int64_t>();
  const Json& summary = run.at("summary");
  // The last token of a request is not computed.
  CHECK(tokens == summary.at("total_num_tokens").get<int64_t>() - 20);
}

TEST_CASE(
    "The page shows where two runs part, with what they wrote, and --min-match is the limit") {
  TempDir dir;
  write_text(dir / "p.jsonl",
             "{\"id\": \"<q>\", \"prompt\": \"one two\"}\n{\"id\": \"r\", \"prompt\": \"four\"}\n");
  REQUIRE(
      run_program(dir, kModel + "--output " + (dir / "a") + " " + (dir / "p.jsonl")).exit_code ==
      0);
  fs::copy(dir / "a", dir / "b");
  std::string text = read_file(dir / "b/outputs.jsonl");
  const size_t at = text.find("\"token_ids\":[") + 13;
  text.replace(at, text.find(',', at) - at, "7");
  write_text(dir / "b/outputs.jsonl", text);
  const auto compare = [&](const std::string& options) {
    return run_program(dir, "compare --json " + (dir / "c.json") + " --html " + (dir / "c.html") +
                                " " + options + " " + (dir / "a") + " " + (dir / "b"));
  };
  CHECK(compare("").exit_code == 4);
  const std::string page = read_file(dir / "c.html");
  CHECK(has(page, "class=\"verdict bad\">Different"));
  CHECK(has(page, "Where answers part"));
  CHECK(has(page, "&lt;q&gt;"));
  CHECK_FALSE(has(page, "<q>"));
  CHECK(has(page, "token 7"));
  CHECK(compare("--min-match 0.5").exit_code == 0);
  CHECK(has(read_file(dir / "c.html"), "Different, within the threshold"));
  CHECK(compare("--min-match 1.5").exit_code == 2);
  const ProcessResult alone =
      run_program(dir, kModel + "--html x.html --output " + (dir / "z") + " " + (dir / "p.jsonl"));
  CHECK(alone.exit_code == 2);
  CHECK(has(alone.err, "--html: expected --chunked-prefill both with it, found off"));
}

}  // namespace
}  // namespace mla::test::report_test
