// Logits of every position of token-id prompts, for comparison with other software.
//   dump_logits MODEL DTYPE off|on BUDGET WORKSPACE_TOKENS THREADS [cpu|cuda] < requests
// BUDGET and WORKSPACE_TOKENS: 0 is the default. A request is one line {"ids": […], "out": PATH}:
// writes fp32 [T, vocab] to PATH and prints "ok". With "prompt": N the first N ids run as a prompt,
// the others one by one as if they had been generated. Says on standard error how fast it loaded.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "tests/support/runner.h"

namespace mla {
namespace {

constexpr int32_t kMaxModelLen = 16384;

test::BackendKind parse_device(const std::string& name) {
  if (name == "cuda") return test::BackendKind::cuda;
  if (name != "cpu") usage_fail("device: expected cpu or cuda, found '{}'", name);
  return test::BackendKind::cpu;
}

test::RunOptions parse_options(char** argv, const ModelConfig& config) {
  test::RunOptions options;
  options.chunked = std::string(argv[3]) == "on";
  options.budget = std::atoi(argv[4]);
  options.workspace_tokens = std::atoi(argv[5]);
  options.max_model_len = static_cast<int32_t>(
      std::min<int64_t>(kMaxModelLen, int64_t{config.max_position_embeddings}));
  // Whole prompts need a budget that holds the longest.
  if (!options.chunked && options.budget > 0)
    options.max_model_len = std::min(options.max_model_len, options.budget);
  // One prompt at a time: twice what it can fill.
  options.kv_pages = 2 * (options.max_model_len / kPageTokens + 1);
  return options;
}

int run(int argc, char** argv) {
  const DType dtype = std::string(argv[2]) == "float32" ? DType::f32 : DType::bf16;
  const auto start = std::chrono::steady_clock::now();
  test::LoadedModel loaded(argv[1], dtype, std::atoi(argv[6]),
                           parse_device(argc > 7 ? argv[7] : "cpu"));
  loaded.backend->synchronize();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto bytes = static_cast<double>(Checkpoint::open(argv[1]).total_bytes());
  std::fprintf(stderr, "dump_logits: loaded %.0f bytes in %.3f s, %.3e bytes/s\n", bytes, seconds,
               bytes / seconds);
  test::LogitsRunner runner(loaded, parse_options(argv, loaded.config));
  std::string line;
  while (std::getline(std::cin, line)) {
    const Json request = parse_json(line, "request");
    std::ofstream out(request.at("out").get<std::string>(), std::ios::binary);
    runner.run(
        request.at("ids").get<std::vector<int32_t>>(),
        [&](int32_t, const float* row) {
          out.write(reinterpret_cast<const char*>(row),
                    static_cast<std::streamsize>(sizeof(float)) * loaded.config.vocab_size);
        },
        request.value("prompt", 0));
    out.close();
    if (!out) fail("the logits could not be written");
    std::puts("ok");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace mla

int main(int argc, char** argv) {
  if (argc != 7 && argc != 8) {
    std::fprintf(stderr,
                 "usage: dump_logits MODEL DTYPE off|on BUDGET WORKSPACE_TOKENS THREADS "
                 "[cpu|cuda]\n");
    return 2;
  }
  try {
    return mla::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "dump_logits: %s\n", e.what());
    return 1;
  }
}
