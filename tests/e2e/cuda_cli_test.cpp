// The program on a GPU from outside, and what it says where there is none.
#include <filesystem>

#include "tests/e2e/process.h"
#include "tests/support/devices.h"

namespace mla::test::cuda_cli_test {
namespace {

namespace fs = std::filesystem;

const std::string kTiny = "-m " + source_path("tests/data/tiny-random") + " ";
const std::string kPrompts = source_path("tests/data/tiny-prompts.jsonl");

TEST_CASE("A GPU that is asked for and not there is a clear error") {
  TempDir dir;
  setenv("CUDA_VISIBLE_DEVICES", "", 1);  // none, where there are some
  const ProcessResult result =
      run_program(dir, kTiny + "--device cuda -o " + (dir / "out") + " " + kPrompts);
  const ProcessResult on_cpu =
      run_program(dir, kTiny + "--limit 1 -o " + (dir / "cpu") + " " + kPrompts);
  unsetenv("CUDA_VISIBLE_DEVICES");
  INFO(result.err);
#ifdef MLA_WITH_CUDA
  CHECK(result.exit_code == 1);
  CHECK(has(result.err, "--device cuda: expected an NVIDIA GPU with its driver, found none"));
#else
  CHECK(result.exit_code == 2);
  CHECK(has(result.err, "--device cuda: this build has no CUDA backend"));
#endif
  CHECK(!fs::exists(dir / "out/outputs.jsonl"));
  INFO(on_cpu.err);
  CHECK(on_cpu.exit_code == 0);  // auto goes on without
}

TEST_CASE("The quickstart's model solves word problems on a GPU, alike in both modes") {
  MLA_NEED_CUDA();
  TempDir dir;
  const ProcessResult result =
      run_program(dir, "-m " + source_path("examples/word-problems") +
                           " --device cuda --gpu-memory-utilization 0.1 --chunked-prefill both "
                           "--max-num-batched-tokens 64 -o " +
                           (dir / "out") + " " + source_path("examples/prompts.jsonl"));
  INFO(result.out << result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(has(result.out, "identical: 200 of 200 requests"));
  const Json report = read_json(dir / "out/compare.json");
  for (const char* side : {"a", "b"}) CHECK(report.at(side).at("correct").get<int>() >= 198);
  CHECK(report.at("b").at("prompts_split").get<int>() >= 100);
}

TEST_CASE("Both modes on a GPU are the same bits, and so they are without graphs") {
  MLA_NEED_CUDA();
  TempDir dir;
  const std::string common = kTiny + "--device cuda --logprobs 2 --gpu-memory-utilization 0.1 ";
  const ProcessResult result =
      run_program(dir, common + "--chunked-prefill both --max-num-batched-tokens 64 -o " +
                           (dir / "out") + " " + kPrompts);
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(has(result.out, "identical: 64 of 64 requests"));
  for (const char* mode : {"on", "off"}) {
    const Json run =
        parse_json(read_file(dir / ("out/" + std::string(mode) + "/run.json")), "run.json");
    CHECK(run.at("options").at("device") == "cuda");
  }
  const ProcessResult eager =
      run_program(dir, common + "--enforce-eager -o " + (dir / "eager") + " " + kPrompts);
  INFO(eager.err);
  REQUIRE(eager.exit_code == 0);
  CHECK(run_program(dir, "compare " + (dir / "out/off") + " " + (dir / "eager")).exit_code == 0);
}

// The driver counts the whole GPU: this looks only where nothing else runs on it (tests/gpu.sh).
TEST_CASE("A run takes the memory that was planned and none after its start") {
  if (!std::getenv("MLA_GPU_ALONE")) MLA_SKIP("MLA_GPU_ALONE is not set");
  MLA_NEED_CUDA();
  TempDir dir;
  const ProcessResult result = run_program(
      dir, kTiny + "--device cuda --chunked-prefill on -o " + (dir / "out") + " " + kPrompts);
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  const Json run = read_json(dir / "out/run.json");
  const Json& summary = run.at("summary");
  const auto in_use = summary.at("device_memory_bytes").get<uint64_t>();
  CHECK(in_use == summary.at("device_memory_bytes_at_start").get<uint64_t>());
  CHECK(in_use <= run.at("memory_plan").at("total_bytes").get<uint64_t>());
}

TEST_CASE("What a GPU cannot hold is refused with its numbers") {
  MLA_NEED_CUDA();
  TempDir dir;
  const auto refused = [&](const std::string& options) {
    const ProcessResult result = run_program(
        dir, kTiny + "--device cuda " + options + " -o " + (dir / "out") + " " + kPrompts);
    CHECK(result.exit_code == 2);
    return result.err;
  };
  CHECK(has(refused("--gpu-memory-utilization 0.001"), "does not fit the GPU: of its "));
  CHECK(has(refused("--dtype float32"), "--device cuda runs in bfloat16"));
  CHECK(
      has(refused("--gpu-memory-utilization 0.1 --max-model-len 400 --kv-cache-memory-bytes 300K"),
          "KV cache"));
  // A prompt that cannot fit is an error of its line.
  write_text(dir / "long.jsonl",
             "{\"prompt\": \"" + std::string(4000, 'x') + "\"}\n" + "{\"prompt\": \"short\"}\n");
  const ProcessResult result =
      run_program(dir, kTiny + "--device cuda --gpu-memory-utilization 0.1 --max-model-len 64 -o " +
                           (dir / "lines") + " " + (dir / "long.jsonl"));
  INFO(result.err);
  CHECK(result.exit_code == 3);
  const std::vector<Json> records = read_lines(dir / "lines/outputs.jsonl");
  REQUIRE(records.size() == 2);
  CHECK(records[0].at("status") == "error");
  CHECK(has(records[0].dump(), "expected fewer than max_model_len 64"));
  CHECK(records[1].at("status") == "ok");
}

}  // namespace
}  // namespace mla::test::cuda_cli_test
