// The CUDA backend against the CPU backend, and its bits against themselves.
#include <algorithm>
#include <cmath>

#include "tests/e2e/bit_contract.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"

namespace mla::test::cuda_test {
namespace {

const std::string kRoot = source_path("tests/data/expected");
// The checkpoints with DeepSeek-V2's head sizes.
const std::vector<std::string> kCheckpoints = {"lite_dense",           "lite_groups",
                                               "lite_plain",           "lite_yarn",
                                               "lite_yarn_no_all_dim", "lite_yarn_one_shared"};
// ‖Δ‖/‖ref‖ of a position: two backends round at the same points and sum in another order.
constexpr double kLogitTolerance = 2e-2;
// Nearer router scores may choose another expert, and the row says nothing of the arithmetic.
constexpr float kRouterGap = 2e-3f;

// Logits of all positions of a prompt, [T, vocab].
std::vector<float> logits_of(LoadedModel& loaded, const RunOptions& options,
                             const std::vector<int32_t>& ids) {
  const auto vocab = static_cast<size_t>(loaded.config.vocab_size);
  std::vector<float> all;
  LogitsRunner(loaded, options).run(ids, [&](int32_t, const float* row) {
    all.insert(all.end(), row, row + vocab);
  });
  return all;
}

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double x : values) sum += x;
  return sum / static_cast<double>(values.size());
}

// Rows that are kept and beyond the tolerance.
int64_t beyond(const CompareResult& result, const std::vector<uint8_t>& skip) {
  int64_t count = 0;
  for (size_t i = 0; i < skip.size(); ++i)
    count += !skip[i] && !(result.row_errors[i] <= kLogitTolerance);
  return count;
}

// Rounding to bfloat16 flips experts where router scores are close, on either backend: a flipped
// row is a wholly other row. So the two are compared where the gap is wide, and there they may
// differ in no more rows than rounding itself changes; and in all rows the error against float32 is
// that of the CPU backend.
TEST_CASE("Logits of the CUDA backend are those of the CPU backend in both modes") {
  MLA_NEED_CUDA();
  TempDir dir;
  for (const std::string& name : kCheckpoints) {
    const Expected expected = load_expected(kRoot, name);
    write_synthetic_checkpoint(expected.dir, dir / name);
    LoadedModel exact(dir / name, DType::f32, 4);
    LoadedModel cpu(dir / name, DType::bf16, 4);
    LoadedModel cuda(dir / name, DType::bf16, 1, BackendKind::cuda);
    std::vector<float> reference, want, got[2];
    std::vector<uint8_t> skip;
    const auto append = [](std::vector<float>& to, const std::vector<float>& rows) {
      to.insert(to.end(), rows.begin(), rows.end());
    };
    for (const ExpectedPrompt& prompt : expected.prompts) {
      append(reference, logits_of(exact, {}, prompt.ids));
      append(want, logits_of(cpu, {}, prompt.ids));
      for (const float gap : prompt.router_gap) skip.push_back(!(gap > kRouterGap));
      append(got[0], logits_of(cuda, {}, prompt.ids));
      append(
          got[1],
          logits_of(cuda,
                    {.chunked = true, .budget = 17, .workspace_tokens = kKeyTile, .max_seqs = 32},
                    prompt.ids));
    }
    const int32_t vocab = expected.vocab_size;
    const CompareResult between = compare_rows(got[0], want, vocab);
    const CompareResult of_cpu = compare_rows(want, reference, vocab);
    const CompareResult of_cuda = compare_rows(got[0], reference, vocab);
    const auto kept = std::count(skip.begin(), skip.end(), uint8_t{0});
    std::vector<double> errors;
    for (size_t i = 0; i < skip.size(); ++i)
      if (!skip[i]) errors.push_back(between.row_errors[i]);
    std::sort(errors.begin(), errors.end());
    const double median = errors[errors.size() / 2];
    std::printf(
        "%-22s cuda: %zu positions, %lld of a wide gap: median error %.3g, %lld rows beyond %.0e "
        "(%lld of the CPU against float32); mean error against float32 %.4g, of the CPU %.4g\n",
        name.c_str(), skip.size(), static_cast<long long>(kept), median,
        static_cast<long long>(beyond(between, skip)), kLogitTolerance,
        static_cast<long long>(beyond(of_cpu, skip)), mean(of_cuda.row_errors),
        mean(of_cpu.row_errors));
    INFO(name << ": " << between.describe());
    CHECK(kept * 2 >= static_cast<int64_t>(skip.size()));
    CHECK(median <= kLogitTolerance / 2);
    // One in a hundred more: which rows flip is chance.
    CHECK(beyond(between, skip) <= beyond(of_cpu, skip) + kept / 100);
    if (name == "lite_dense") CHECK(between.within(kLogitTolerance));  // nothing to flip
    CHECK(mean(of_cuda.row_errors) <= 1.2 * mean(of_cpu.row_errors));
    // Not nearly: the same bits.
    CHECK(got[0] == got[1]);
  }
}

TEST_CASE("Greedy tokens of the CUDA backend are the CPU's where their margin exceeds the error") {
  MLA_NEED_CUDA();
  TempDir dir;
  for (const std::string& name : kCheckpoints) {
    const Expected expected = load_expected(kRoot, name);
    write_synthetic_checkpoint(expected.dir, dir / name);
    LoadedModel cpu(dir / name, DType::bf16, 4);
    LoadedModel cuda(dir / name, DType::bf16, 1, BackendKind::cuda);
    std::vector<BatchRequest> requests;
    for (const ExpectedPrompt& prompt : expected.prompts) {
      requests.push_back({.prompt = prompt.ids, .sampling = {}});
      requests.back().sampling.max_tokens = 12;
      requests.back().sampling.ignore_eos = true;
    }
    const RunOptions options{.chunked = true, .budget = 33};
    const BatchRun want = run_requests(cpu, options, requests);
    RunOptions cuda_options = options;
    cuda_options.pipelined = cuda_options.graphs = true;
    const BatchRun got = run_requests(cuda, cuda_options, requests);
    const auto vocab = static_cast<size_t>(cpu.config.vocab_size);
    int64_t checked = 0, wrong = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::vector<int32_t>& tokens = want.results[i].tokens;
      REQUIRE(got.results[i].tokens.size() == tokens.size());
      std::vector<int32_t> ids = requests[i].prompt;
      ids.insert(ids.end(), tokens.begin(), tokens.end());
      const std::vector<float> rows = logits_of(cpu, {}, ids);
      for (size_t t = 0; t < tokens.size(); ++t) {
        const float* row = rows.data() + (requests[i].prompt.size() + t - 1) * vocab;
        std::vector<float> sorted(row, row + vocab);
        double norm = 0.0;
        for (const float x : sorted) norm += double{x} * double{x};
        std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<>());
        const bool same = got.results[i].tokens[t] == tokens[t];
        // Two elements of Δ are apart by √2·‖Δ‖ at most.
        if (double{sorted[0] - sorted[1]} > std::sqrt(2.0 * norm) * kLogitTolerance) {
          ++checked;
          wrong += !same;
        }
        if (!same) break;  // what follows has another context
      }
    }
    std::printf("%-22s cuda: %lld greedy tokens of a clear margin, %lld others\n", name.c_str(),
                static_cast<long long>(checked), static_cast<long long>(wrong));
    INFO(name);
    CHECK(checked > 0);
    CHECK(wrong == 0);
  }
}

TEST_CASE("The bits of a request depend on nothing around it on CUDA") {
  MLA_NEED_CUDA();
  check_contract("lite_yarn", DType::bf16, BackendKind::cuda);
}

TEST_CASE("The bits hold with expert groups on CUDA") {
  MLA_NEED_CUDA();
  check_contract("lite_groups", DType::bf16, BackendKind::cuda);
}

}  // namespace
}  // namespace mla::test::cuda_test
