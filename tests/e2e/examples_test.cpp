// The scripts of examples/ that a user starts with a checkpoint of his own, here with the small
// one.
#include <filesystem>

#include "tests/e2e/child.h"
#include "tests/support/small_gsm8k.h"

namespace mla::test::examples_test {
namespace {

namespace fs = std::filesystem;

const std::string kModelDir = source_path("tests/data/tiny-random");

// examples/NAME with the built program, its outputs in `o`.
ProcessResult run_script(const TempDir& dir, const std::string& variables, const std::string& name,
                         const std::string& arguments) {
  const std::string out = dir / "stdout", err = dir / "stderr";
  const int status = std::system(("env MLA_RUN=" + std::string(MLA_BINARY_DIR) +
                                  "/mla-run OUT_DIR=" + (dir / "o") + " " + variables + " " +
                                  source_path("examples/" + name) + " " + arguments + " >" + out +
                                  " 2>" + err + " </dev/null")
                                     .c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
}

std::string text_of(const std::vector<Json>& lines) {
  std::string text;
  for (const Json& line : lines) text += line.dump() + "\n";
  return text;
}

TEST_CASE("The check of V2-Lite's greedy tokens sees another token but where there is a near tie") {
  TempDir dir;
  const std::string golden = dir / "golden.jsonl";
  std::vector<Json> rows = read_lines(source_path("examples/v2_lite_greedy.jsonl"));
  REQUIRE(rows.size() == 8);
  const auto run = [&] {
    write_text(golden, text_of(rows));
    return run_script(dir, "GREEDY=" + golden, "verify_v2_lite.sh", kModelDir + " --device cpu");
  };
  // The small checkpoint is another model.
  const ProcessResult other = run();
  INFO(other.err);
  CHECK(other.exit_code == 4);
  CHECK(has(other.out, "DIFFERENT: the prompt has other tokens"));
  CHECK(run_json(dir / "o/on").at("counts").at("prompts_split").get<int>() >= 4);
  // With its own tokens as the recorded ones:
  const std::vector<Json> outputs = read_lines(dir / "o/off/outputs.jsonl");
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i]["prompt_ids"] = outputs[i].at("prompt_token_ids");
    rows[i]["greedy_ids"] = outputs[i].at("token_ids");
  }
  const ProcessResult same = run();
  INFO(same.out);
  CHECK(same.exit_code == 0);
  CHECK(has(same.out, "row 0: 16, 16;"));
  rows[2]["greedy_ids"][3] = 7;
  const ProcessResult tie = run();
  CHECK(tie.exit_code == 0);
  CHECK(has(tie.out, "row 2:  3,  3; "));
  rows[4]["greedy_ids"][15] = 7;
  const ProcessResult different = run();
  CHECK(different.exit_code == 4);
  CHECK(has(different.out, "row 4: 15, 15; "));
  CHECK(run_script(dir, "", "verify_v2_lite.sh", "").exit_code == 2);
}

TEST_CASE("The check of GSM8K in both modes prints the published score beside its own") {
  TempDir dir;
  write_small_gsm8k(dir / "data");
  const ProcessResult result =
      run_script(dir, "GSM8K=" + (dir / "data"), "gsm8k_ab.sh",
                 kModelDir + " --device cpu --max-tokens 8 --max-num-batched-tokens 64");
  INFO(result.err);
  CHECK(result.exit_code == 0);
  CHECK(has(result.out, "limit: 100.0, num_fewshot: 5"));
  CHECK(has(result.out, "identical: 3 of 3 requests"));
  CHECK(has(result.out, "published: 0.6600 ± 0.0476"));
  CHECK(has(result.out, "on: 0.0000 ± 0.0000  flexible-extract, -13.9 of"));
  CHECK(run_script(dir, "GSM8K=" + (dir / "data"), "gsm8k_ab.sh", kModelDir + " --no-such-option")
            .exit_code == 2);
}

}  // namespace
}  // namespace mla::test::examples_test
