// Logits of every position of token-id prompts, for comparison with other software.
//   dump_logits MODEL DTYPE off|on BUDGET WORKSPACE_TOKENS THREADS < requests
// A request is one line {"ids": […], "out": PATH}: writes fp32 [T, vocab] to PATH and prints "ok".
#include <cstdio>
#include <fstream>
#include <iostream>

#include "kernels/cpu/cpu_backend.h"
#include "lib/base/json.h"
#include "tests/support/runner.h"

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: dump_logits MODEL DTYPE off|on BUDGET WORKSPACE_TOKENS THREADS\n");
    return 2;
  }
  using namespace mla;
  try {
    const DType dtype = std::string(argv[2]) == "float32" ? DType::f32 : DType::bf16;
    test::LoadedModel loaded(argv[1], dtype, std::atoi(argv[6]));
    test::RunOptions options;
    options.chunked = std::string(argv[3]) == "on";
    options.budget = std::atoi(argv[4]);
    options.workspace_tokens = std::atoi(argv[5]);
    options.max_model_len = 4096;
    test::LogitsRunner runner(loaded, options);
    std::string line;
    while (std::getline(std::cin, line)) {
      const Json request = parse_json(line, "request");
      std::ofstream out(request.at("out").get<std::string>(), std::ios::binary);
      runner.run(request.at("ids").get<std::vector<int32_t>>(), [&](int32_t, const float* row) {
        out.write(reinterpret_cast<const char*>(row),
                  static_cast<std::streamsize>(sizeof(float)) * loaded.config.vocab_size);
      });
      out.close();
      if (!out) fail("the logits could not be written");
      std::puts("ok");
      std::fflush(stdout);
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "dump_logits: %s\n", e.what());
    return 1;
  }
}
