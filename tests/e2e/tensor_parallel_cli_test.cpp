// --tensor-parallel-size from outside.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "tests/e2e/child.h"
#include "tests/support/devices.h"

namespace mla::test::tensor_parallel_cli_test {
namespace {

namespace fs = std::filesystem;

const std::string kTiny = "-m " + source_path("tests/data/tiny-random") + " --device cpu ";
const std::string kWords = "-m " + source_path("examples/word-problems") + " --device cpu ";
const std::string kPrompts = source_path("tests/data/tiny-prompts.jsonl");

TEST_CASE("Two ranks solve the word problems as one does and alike in both modes") {
  TempDir dir;
  const auto run = [&](const std::string& more, const std::string& out) {
    return run_program(dir, kWords + more + " --chunked-prefill both --max-num-batched-tokens 64 " +
                                "--limit 40 -o " + (dir / out) + " " +
                                source_path("examples/prompts.jsonl"));
  };
  const ProcessResult two = run("-tp 2", "two"), one = run("--tensor-parallel-size 1", "one");
  INFO(two.out << two.err);
  CHECK(two.exit_code == 0);
  CHECK(one.exit_code == 0);
  CHECK(has(two.out, "identical: 40 of 40 requests"));
  CHECK(has(two.err, "memory plan of each of 2 ranks"));
  const std::vector<Json> a = read_lines(dir / "one/on/outputs.jsonl"),
                          b = read_lines(dir / "two/on/outputs.jsonl");
  REQUIRE(a.size() == 40);
  REQUIRE(b.size() == 40);
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i].at("text") == b[i].at("text"));
  CHECK(run_json(dir / "two/on").at("options").at("tensor_parallel_size") == 2);
  CHECK(run_json(dir / "one/on").at("options").at("tensor_parallel_size") == 1);
}

TEST_CASE("The prompts of the tests give the same bits in both modes with two ranks") {
  TempDir dir;
  const ProcessResult result = run_program(
      dir, kTiny + "-tp=2 --chunked-prefill both --max-num-batched-tokens 64 --logprobs 2 " +
               "--prompt-logprobs 1 -o " + (dir / "out") + " " + kPrompts);
  INFO(result.out << result.err);
  CHECK(result.exit_code == 0);
  CHECK(has(result.out, "identical: 64 of 64 requests"));
}

TEST_CASE("A number of ranks that does not divide the heads is refused before anything is there") {
  TempDir dir;
  for (const char* command : {"run ", "plan ", "bench "}) {
    const bool run = std::string(command) == "run ";
    const ProcessResult result =
        run_program(dir, command + kTiny + "-tp 3 " +
                             (run ? "-o " + (dir / "out") + " " + kPrompts : std::string()));
    INFO(command << result.err);
    CHECK(result.exit_code == 2);
    CHECK(has(result.err,
              "--tensor-parallel-size: expected a size that divides the model's "
              "num_attention_heads 2 (1, 2), found 3"));
  }
  CHECK(!fs::exists(dir / "out"));
  const ProcessResult none = run_program(dir, "plan " + kTiny + "-tp 0");
  CHECK(none.exit_code == 2);
  CHECK(has(none.err, "--tensor-parallel-size"));
  CHECK(has(run_program(dir, "run --help").out, "--tensor-parallel-size"));
}

TEST_CASE("A run is resumed with as many ranks as it had and no others") {
  TempDir dir;
  const std::string command = kTiny + "--threads 2 --max-num-seqs 3 --max-tokens 20 --ignore-eos ";
  const auto to = [&](const std::string& out) { return " -o " + (dir / out) + " " + kPrompts; };
  REQUIRE(run_program(dir, command + "-tp 2" + to("whole")).exit_code == 0);
  const auto lines = [&] {
    const std::string path = dir / "o/outputs.jsonl.partial";
    if (!fs::exists(path)) return std::ptrdiff_t{0};
    const std::string text = read_file(path);
    return std::count(text.begin(), text.end(), '\n');
  };
  Child child(dir, command + "-tp 2" + to("o"));
  wait_until([&] { return lines() >= 5 || !child.running(); });
  child.send(SIGINT);
  CHECK(child.wait() == 130);
  const auto kept = lines();
  CHECK(kept >= 5);
  const ProcessResult other = run_program(dir, command + "-tp 1 --resume" + to("o"));
  CHECK(other.exit_code == 2);
  CHECK(has(other.err, "option tensor_parallel_size: expected 1, found 2"));
  CHECK(run_program(dir, command + "-tp 2 --resume" + to("o")).exit_code == 0);
  CHECK(run_json(dir / "o").at("counts").at("kept").get<int64_t>() == kept);
  CHECK(without_timing(dir / "o/outputs.jsonl") == without_timing(dir / "whole/outputs.jsonl"));
}

TEST_CASE("Ranks have parts of the same random weights") {
  TempDir dir;
  fs::create_directories(dir / "m");
  fs::copy_file(source_path("tests/data/tiny-random/config.json"), dir / "m/config.json");
  write_text(dir / "p.jsonl",
             "{\"prompt\": [5, 6, 7], \"logprobs\": 1}\n{\"prompt\": [900, 3], \"logprobs\": 1}\n");
  std::vector<Json> records[2];
  for (const int ranks : {1, 2}) {
    const std::string out = dir / std::to_string(ranks);
    const ProcessResult result = run_program(
        dir, "-m " + (dir / "m") + " --device cpu --load-format dummy --dtype float32 " +
                 "--max-tokens 8 --ignore-eos -tp " + std::to_string(ranks) + " -o " + out + " " +
                 (dir / "p.jsonl"));
    INFO(result.err);
    REQUIRE(result.exit_code == 0);
    records[ranks - 1] = read_lines(out + "/outputs.jsonl");
  }
  for (size_t i = 0; i < 2; ++i) {
    CHECK(records[0][i].at("token_ids") == records[1][i].at("token_ids"));
    for (size_t t = 0; t < 8; ++t) {
      const auto logprob = [&](int ranks) {
        return records[ranks][i].at("logprobs").at(t).at("logprob").get<double>();
      };
      CHECK(std::fabs(logprob(0) - logprob(1)) < 1e-4);
    }
  }
}

TEST_CASE("The plan and the bench know of ranks") {
  TempDir dir;
  const ProcessResult plan = run_program(dir, "plan " + kTiny + "-tp 2 --json");
  INFO(plan.err);
  CHECK(plan.exit_code == 0);
  CHECK(Json::parse(plan.out).at(0).at("tensor_parallel_size") == 2);
  const ProcessResult bench = run_program(
      dir, "bench " + kTiny + "-tp 2 --repeats 1 --quiet --json --workload mixed:3x20x4");
  INFO(bench.err);
  CHECK(bench.exit_code == 0);
  CHECK(Json::parse(bench.out).at("tensor_parallel_size") == 2);
}

TEST_CASE("An option of the environment names the number of ranks too") {
  TempDir dir;
  setenv("MLA_RUN_TENSOR_PARALLEL_SIZE", "3", 1);
  const ProcessResult result = run_program(dir, "plan " + kTiny);
  unsetenv("MLA_RUN_TENSOR_PARALLEL_SIZE");
  CHECK(result.exit_code == 2);
  CHECK(has(result.err, "(--tensor-parallel-size comes from MLA_RUN_TENSOR_PARALLEL_SIZE)"));
}

TEST_CASE("Two GPUs solve the word problems alike in both modes") {
  MLA_NEED_GPUS(2);
  TempDir dir;
  const ProcessResult result = run_program(
      dir, "-m " + source_path("examples/word-problems") +
               " --device cuda -tp 2 --gpu-memory-utilization 0.1 --chunked-prefill both "
               "--max-num-batched-tokens 64 -o " +
               (dir / "out") + " " + source_path("examples/prompts.jsonl"));
  INFO(result.out << result.err);
  CHECK(result.exit_code == 0);
  CHECK(has(result.out, "identical: 200 of 200 requests"));
  const Json report = read_json(dir / "out/compare.json");
  for (const char* side : {"a", "b"}) CHECK(report.at(side).at("correct").get<int>() >= 190);
  const ProcessResult nccl = run_program(
      dir, "-m " + source_path("examples/word-problems") +
               " --device cuda -tp 2 --gpu-memory-utilization 0.1 --disable-custom-all-reduce -o " +
               (dir / "nccl") + " " + source_path("examples/prompts.jsonl"));
  INFO(nccl.err);
  CHECK(nccl.exit_code == 0);
  CHECK(without_timing(dir / "nccl/outputs.jsonl") ==
        without_timing(dir / "out/off/outputs.jsonl"));
}

TEST_CASE("More GPUs than there are is said before anything is loaded") {
  MLA_NEED_CUDA();
  TempDir dir;
  const std::string command = "-m " + source_path("tests/data/tiny-random") + " --device cuda -o " +
                              (dir / "out") + " " + kPrompts + " ";
  const auto refused = [&](const std::string& options, const std::string& message) {
    const ProcessResult result =
        run_program(dir, command + options, "/dev/null", "CUDA_VISIBLE_DEVICES=0");
    CHECK(result.exit_code == 2);
    CHECK(has(result.err, message));
    CHECK(!fs::exists(dir / "out"));
  };
  refused("-dp 3", "expected 3 GPUs for --data-parallel-size 3, found 1");
#ifdef MLA_WITH_NCCL
  refused("-tp 2", "expected 2 GPUs for --tensor-parallel-size 2, found 1");
  refused("-tp 2 -dp 2",
          "expected 4 GPUs for --tensor-parallel-size 2 and --data-parallel-size 2, found 1");
#else
  for (const char* options : {"-tp 2", "-tp 2 -dp 2"})
    refused(options, "--tensor-parallel-size 2: expected a build with NCCL");
#endif
}

}  // namespace
}  // namespace mla::test::tensor_parallel_cli_test
