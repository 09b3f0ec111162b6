// The CUDA backend against the CPU backend, and its bits against themselves.
#include <algorithm>
#include <cmath>

#include "tests/e2e/bit_contract.h"
#include "tests/support/compare.h"

namespace mla::test {
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

// True where the test has nothing to run on; with MLA_REQUIRE_CUDA that fails it.
bool no_cuda() {
  const std::string absence = cuda_absence();
  if (absence.empty()) return false;
  if (std::getenv("MLA_REQUIRE_CUDA")) FAIL(absence);
  std::printf("SKIPPED: %s\n", absence.c_str());
  SUCCEED("SKIPPED");
  return true;
}

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

TEST_CASE("Logits of the CUDA backend are those of the CPU backend in both modes") {
  if (no_cuda()) return;
  TempDir dir;
  for (const std::string& name : kCheckpoints) {
    const Expected expected = load_expected(kRoot, name);
    write_synthetic_checkpoint(expected.dir, dir / name);
    LoadedModel cpu(dir / name, DType::bf16, 4);
    LoadedModel cuda(dir / name, DType::bf16, 1, BackendKind::cuda);
    std::vector<float> want, got[2];
    std::vector<uint8_t> skip;
    for (const ExpectedPrompt& prompt : expected.prompts) {
      const std::vector<float> rows = logits_of(cpu, {}, prompt.ids);
      want.insert(want.end(), rows.begin(), rows.end());
      for (const float gap : prompt.router_gap) skip.push_back(!(gap > kRouterGap));
      for (const int chunked : {0, 1}) {
        RunOptions options;
        if (chunked)
          options = {.chunked = true, .budget = 17, .workspace_tokens = kKeyTile, .max_seqs = 32};
        const std::vector<float> part = logits_of(cuda, options, prompt.ids);
        got[chunked].insert(got[chunked].end(), part.begin(), part.end());
      }
    }
    const auto left_out = std::count(skip.begin(), skip.end(), uint8_t{1});
    const CompareResult result = compare_rows(got[0], want, expected.vocab_size, skip);
    std::vector<double> errors;
    for (size_t i = 0; i < skip.size(); ++i)
      if (!skip[i]) errors.push_back(result.row_errors[i]);
    std::sort(errors.begin(), errors.end());
    std::printf("%-22s cuda: %zu positions, %lld left out, median error %.3g, max %.3g\n",
                name.c_str(), skip.size(), static_cast<long long>(left_out),
                errors[errors.size() / 2], result.max_error);
    INFO(name << ": " << result.describe());
    // A flipped expert is a wholly other row; without experts there is none.
    const auto flipped = std::count_if(errors.begin(), errors.end(),
                                       [](double e) { return !(e <= kLogitTolerance); });
    INFO(flipped << " of " << errors.size() << " rows are beyond the tolerance");
    CHECK(flipped * 50 <= (name == "lite_dense" ? 0 : static_cast<std::ptrdiff_t>(errors.size())));
    CHECK(errors[errors.size() / 2] <= kLogitTolerance / 2);
    CHECK(left_out * 2 <= static_cast<int64_t>(skip.size()));
    // Not nearly: the same bits.
    CHECK(got[0] == got[1]);
  }
}

TEST_CASE("Greedy tokens of the CUDA backend are the CPU's where their margin exceeds the error") {
  if (no_cuda()) return;
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
    // A router score near a tie may choose another expert.
    CHECK(wrong * 20 <= checked);
  }
}

TEST_CASE("The bits of a request depend on nothing around it on CUDA") {
  if (no_cuda()) return;
  check_contract("lite_yarn", DType::bf16, BackendKind::cuda);
}

TEST_CASE("The bits hold with expert groups on CUDA") {
  if (no_cuda()) return;
  check_contract("lite_groups", DType::bf16, BackendKind::cuda);
}

}  // namespace
}  // namespace mla::test
