// Several ranks against one, and their bits against themselves.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "lib/base/json.h"
#include "tests/e2e/bit_contract.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"

namespace mla::test::tensor_parallel_test {
namespace {

// A checkpoint of the expected ones with `heads` heads (0: as it is), written to `dir`.
std::string checkpoint_with(const TempDir& dir, const std::string& name, int heads) {
  const std::string from = source_path("tests/data/expected/" + name), path = from + "/config.json";
  OrderedJson config = OrderedJson::parse(read_file(path));
  if (heads) config["num_attention_heads"] = config["num_key_value_heads"] = heads;
  const std::string config_dir = dir / (name + "-config"), out = dir / name;
  std::filesystem::create_directories(config_dir);
  std::ofstream(config_dir + "/config.json") << config.dump();
  write_synthetic_checkpoint(config_dir, out, 1, 11);
  return out;
}

std::vector<int32_t> some_ids(const ModelConfig& config, size_t count) {
  std::vector<int32_t> ids;
  std::mt19937 random(4);
  for (size_t i = 0; i < count; ++i)
    ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size)));
  return ids;
}

struct Case {
  std::string name;
  int heads;
  std::vector<int32_t> ranks;
};

// 28 and 84 columns and a vocabulary of 96 over 3 and 4 ranks leave some with less, or with
// nothing.
const std::vector<Case> kCases = {{"lite_yarn", 0, {2}},       {"lite_groups", 0, {2}},
                                  {"lite_dense", 4, {4}},      {"odd_plain", 4, {2, 4}},
                                  {"odd_groups", 0, {3}},      {"odd_tied", 0, {3}},
                                  {"odd_yarn", 12, {3, 4, 12}}};

TEST_CASE("Logits of several ranks in float32 are those of one") {
  TempDir dir;
  for (const Case& c : kCases) {
    const std::string path = checkpoint_with(dir, c.name, c.heads);
    LoadedModel one(path, DType::f32, 1);
    const std::vector<int32_t> ids = some_ids(one.config, 150);
    const std::vector<float> want = prompt_logprobs(one, {}, ids);
    for (const int32_t ranks : c.ranks) {
      LoadedModel several(path, DType::f32, 1, BackendKind::cpu, ranks);
      const std::vector<float> got = prompt_logprobs(several, {}, ids);
      const CompareResult result = compare_rows(got, want, one.config.vocab_size);
      std::printf("%-12s %d heads, %d ranks: max error %.3g\n", c.name.c_str(),
                  one.config.num_heads, ranks, result.max_error);
      INFO(c.name << " over " << ranks << ": " << result.describe());
      CHECK(result.within(2e-5));
      CHECK(prompt_logprobs(several, {.chunked = true, .budget = 17}, ids) == got);
    }
  }
}

// Rounding the partial sums is one rounding more, and may choose another expert: the median row is
// judged, as where bfloat16 is compared to float32.
TEST_CASE("Logits of several ranks in bfloat16 are near those of one") {
  TempDir dir;
  for (const Case& c : kCases) {
    const std::string path = checkpoint_with(dir, c.name, c.heads);
    LoadedModel one(path, DType::bf16, 1);
    const std::vector<int32_t> ids = some_ids(one.config, 150);
    const std::vector<float> want = prompt_logprobs(one, {}, ids);
    for (const int32_t ranks : c.ranks) {
      LoadedModel several(path, DType::bf16, 1, BackendKind::cpu, ranks);
      const std::vector<float> got = prompt_logprobs(several, {}, ids);
      const CompareResult result = compare_rows(got, want, one.config.vocab_size);
      std::vector<double> errors = result.row_errors;
      std::sort(errors.begin(), errors.end());
      const double median = errors[errors.size() / 2];
      std::printf("%-12s %d heads, %d ranks: median error %.3g, max %.3g\n", c.name.c_str(),
                  one.config.num_heads, ranks, median, result.max_error);
      INFO(c.name << " over " << ranks << ": " << result.describe());
      CHECK(result.mask_mismatches == 0);
      CHECK(median <= 3e-2);
      CHECK(median > 0);  // it did round
      CHECK(prompt_logprobs(several, {.chunked = true, .budget = 17}, ids) == got);
    }
  }
}

TEST_CASE("Greedy tokens of several ranks are those of one where the margin exceeds the error") {
  TempDir dir;
  for (const Case& c : kCases) {
    const std::string path = checkpoint_with(dir, c.name, c.heads);
    LoadedModel one(path, DType::f32, 1);
    LoadedModel several(path, DType::f32, 1, BackendKind::cpu, c.ranks.back());
    std::vector<BatchRequest> requests;
    for (size_t i = 0; i < 12; ++i) {
      requests.push_back({.prompt = some_ids(one.config, 3 + 7 * i), .sampling = {}});
      requests.back().sampling.max_tokens = 12;
      requests.back().sampling.ignore_eos = true;
      requests.back().sampling.logprobs = 2;
    }
    const RunOptions options{.chunked = true, .budget = 33};
    const BatchRun want = run_requests(one, options, requests);
    const BatchRun got = run_requests(several, options, requests);
    int64_t same = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      const BatchResult &a = want.results[i], &b = got.results[i];
      REQUIRE(a.tokens.size() == b.tokens.size());
      for (size_t t = 0; t < a.tokens.size(); ++t) {
        INFO(c.name << " request " << i << " token " << t);
        if (a.tokens[t] != b.tokens[t]) {
          CHECK(a.top[2 * t].second - a.top[2 * t + 1].second <= 1e-4f);
          break;  // what follows has another context
        }
        CHECK(std::fabs(a.top[2 * t].second - b.top[2 * t].second) <= 1e-3f);
        ++same;
      }
    }
    std::printf("%-12s %d ranks: %lld of 144 tokens alike before any difference\n", c.name.c_str(),
                c.ranks.back(), static_cast<long long>(same));
    CHECK(same > 100);
  }
}

TEST_CASE("The bits of a request of two ranks depend on nothing around it in bfloat16") {
  check_contract("lite_yarn", DType::bf16, BackendKind::cpu, 2);
}

TEST_CASE("The bits of a request of two ranks depend on nothing around it in float32") {
  check_contract("lite_groups", DType::f32, BackendKind::cpu, 2);
}

TEST_CASE("The bits hold with three ranks of uneven shares in bfloat16") {
  check_contract("odd_groups", DType::bf16, BackendKind::cpu, 3);
}

TEST_CASE("Logits of two GPUs are near those of two ranks of the CPU") {
  MLA_NEED_GPUS(2);
  TempDir dir;
  for (const char* name : {"lite_yarn", "lite_groups", "lite_dense"}) {
    const std::string path = checkpoint_with(dir, name, 0);
    LoadedModel cpu(path, DType::bf16, 1, BackendKind::cpu, 2);
    LoadedModel gpus(path, DType::bf16, 1, BackendKind::cuda, 2);
    const std::vector<int32_t> ids = some_ids(cpu.config, 150);
    const std::vector<float> want = prompt_logprobs(cpu, {}, ids);
    const std::vector<float> got = prompt_logprobs(gpus, {}, ids);
    const CompareResult result = compare_rows(got, want, cpu.config.vocab_size);
    std::vector<double> errors = result.row_errors;
    std::sort(errors.begin(), errors.end());
    std::printf("%-12s 2 GPUs: median error %.3g, max %.3g\n", name, errors[errors.size() / 2],
                result.max_error);
    INFO(name << ": " << result.describe());
    CHECK(result.mask_mismatches == 0);
    CHECK(errors[errors.size() / 2] <= 1e-2);
    CHECK(prompt_logprobs(gpus, {.chunked = true, .budget = 17}, ids) == got);
  }
}

TEST_CASE("The bits of a request of two GPUs depend on nothing around it") {
  MLA_NEED_GPUS(2);
  check_contract("lite_yarn", DType::bf16, BackendKind::cuda, 2);
}

TEST_CASE("The bits hold on four GPUs, whose sums are gathered") {
  MLA_NEED_GPUS(4);
  TempDir dir;
  const std::string path = checkpoint_with(dir, "lite_yarn", 4);
  LoadedModel gpus(path, DType::bf16, 1, BackendKind::cuda, 4);
  LoadedModel cpu(path, DType::bf16, 1, BackendKind::cpu, 4);
  const std::vector<int32_t> ids = some_ids(cpu.config, 150);
  const std::vector<float> got = prompt_logprobs(gpus, {}, ids);
  const CompareResult result =
      compare_rows(got, prompt_logprobs(cpu, {}, ids), cpu.config.vocab_size);
  std::vector<double> errors = result.row_errors;
  std::sort(errors.begin(), errors.end());
  INFO(result.describe());
  CHECK(errors[errors.size() / 2] <= 1e-2);
  CHECK(prompt_logprobs(gpus, {.chunked = true, .budget = 17}, ids) == got);
}

}  // namespace
}  // namespace mla::test::tensor_parallel_test
