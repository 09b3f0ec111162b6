// The CPU backend against other software and against the naive model.
#include <algorithm>
#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/naive_model.h"
#include "tests/support/runner.h"
#include "tests/support/synthetic.h"

namespace mla::test::logits_test {
namespace {

const std::string kRoot = source_path("tests/data/expected");
constexpr float kRouterGap = 1e-5f;  // nearer scores may choose another expert

// Rows of all prompts at positions >= 1, those of a narrow router gap skipped.
CompareResult compare_with_expected(LoadedModel& loaded, const RunOptions& options,
                                    const Expected& expected, int64_t& left_out, int64_t& rows) {
  LogitsRunner runner(loaded, options);
  const size_t vocab = static_cast<size_t>(expected.vocab_size);
  std::vector<float> got, want;
  std::vector<uint8_t> skip;
  for (const ExpectedPrompt& prompt : expected.prompts) {
    std::vector<float> all;
    runner.run(prompt.ids,
               [&](int32_t, const float* row) { all.insert(all.end(), row, row + vocab); });
    for (size_t i = 0; i < prompt.positions.size(); ++i) {
      const size_t position = static_cast<size_t>(prompt.positions[i]);
      if (position < 1) continue;
      const auto row = all.begin() + static_cast<std::ptrdiff_t>(position * vocab);
      got.insert(got.end(), row, row + static_cast<std::ptrdiff_t>(vocab));
      want.insert(want.end(), expected.row(prompt, i), expected.row(prompt, i) + vocab);
      skip.push_back(!(prompt.router_gap[position] > kRouterGap));
    }
  }
  left_out = std::count(skip.begin(), skip.end(), uint8_t{1});
  rows = static_cast<int64_t>(skip.size());
  return compare_rows(got, want, expected.vocab_size, skip);
}

TEST_CASE("Logits of the CPU backend in float32 are those of transformers in both modes") {
  TempDir dir;
  for (const std::string& name : expected_names(kRoot)) {
    const Expected expected = load_expected(kRoot, name);
    write_synthetic_checkpoint(expected.dir, dir / name, 2);
    LoadedModel loaded(dir / name, DType::f32, 2);
    for (const bool chunked : {false, true}) {
      RunOptions options{.chunked = chunked};
      if (chunked) {
        options.budget = 17;
        options.workspace_tokens = kKeyTile;
      }
      int64_t left_out = 0, rows = 0;
      const CompareResult result = compare_with_expected(loaded, options, expected, left_out, rows);
      std::printf("%-22s chunked %d: %lld rows, %lld left out, max error %.3g\n", name.c_str(),
                  chunked, static_cast<long long>(rows), static_cast<long long>(left_out),
                  result.max_error);
      INFO(name << " chunked " << chunked << ": " << result.describe());
      CHECK(rows > 0);
      CHECK(result.within(1e-4));
      CHECK(left_out * 100 <= rows);
    }
  }
}

// bfloat16 has 8 bits, and where two routing scores are near another expert may be chosen: such a
// row is far from float32 and says nothing of the arithmetic. The median row is what is judged.
TEST_CASE("Logits of the CPU backend in bfloat16 are near those of float32") {
  TempDir dir;
  for (const std::string name : {"lite_yarn", "lite_dense", "odd_groups", "odd_yarn"}) {
    const Expected expected = load_expected(kRoot, name);
    write_synthetic_checkpoint(expected.dir, dir / name);
    LoadedModel loaded(dir / name, DType::bf16, 2);
    int64_t left_out = 0, rows = 0;
    const CompareResult result = compare_with_expected(loaded, {}, expected, left_out, rows);
    std::vector<double> errors = result.row_errors;
    std::sort(errors.begin(), errors.end());
    const double median = errors[errors.size() / 2];
    std::printf("%-22s bfloat16: median error %.3g, max %.3g\n", name.c_str(), median,
                result.max_error);
    INFO(name << ": " << result.describe());
    CHECK(result.mask_mismatches == 0);
    CHECK(median <= 3e-2);
    CHECK(median >= 1e-4);  // it did round
  }
}

// Generated tokens take the absorbed path; the naive model has neither cache nor absorption.
TEST_CASE("Greedy generation in float32 follows the naive model token by token") {
  TempDir dir;
  for (const std::string name :
       {"lite_yarn", "lite_groups", "lite_yarn_no_all_dim", "odd_groups", "odd_yarn"}) {
    const Expected expected = load_expected(kRoot, name);
    write_synthetic_checkpoint(expected.dir, dir / name);
    LoadedModel loaded(dir / name, DType::f32, 2);
    const NaiveModel naive(Checkpoint::open(dir / name), loaded.config);
    std::vector<BatchRequest> requests;
    for (const ExpectedPrompt& prompt : expected.prompts) {
      BatchRequest request{.prompt = prompt.ids, .sampling = {}};
      request.sampling.max_tokens = 12;
      request.sampling.ignore_eos = true;
      requests.push_back(request);
    }
    const BatchRun run = run_requests(loaded, {.chunked = true, .budget = 33}, requests);
    int64_t checked = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      std::vector<int32_t> ids = requests[i].prompt;
      ids.insert(ids.end(), run.results[i].tokens.begin(), run.results[i].tokens.end());
      const NaiveOutput output = naive.run(ids);
      const size_t vocab = static_cast<size_t>(loaded.config.vocab_size);
      for (size_t t = requests[i].prompt.size(); t < ids.size(); ++t) {
        std::vector<float> row(output.logits.begin() + static_cast<std::ptrdiff_t>((t - 1) * vocab),
                               output.logits.begin() + static_cast<std::ptrdiff_t>(t * vocab));
        const float chosen = row[static_cast<size_t>(ids[t])];
        std::sort(row.begin(), row.end(), std::greater<>());
        INFO(name << " request " << i << " position " << t);
        const float scale = std::max(1.0f, std::fabs(row[0]));
        if (row[0] - row[1] > 1e-3f * scale) {
          CHECK(chosen == row[0]);
          ++checked;
        } else {
          CHECK(row[0] - chosen <= 1e-3f * scale);
        }
      }
    }
    CHECK(checked > 0);
  }
}

}  // namespace
}  // namespace mla::test::logits_test
