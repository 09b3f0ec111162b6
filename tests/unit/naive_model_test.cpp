#include "tests/support/naive_model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "lib/model/rope.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/synthetic.h"

namespace mla::test::naive_model_test {
namespace {

const std::string kRoot = source_path("tests/data/expected");

// Where two routing scores lie nearer than this, rounding may choose another expert.
constexpr float kRouterGap = 1e-5f;

bool near(double a, double b, double relative, double absolute = 0.0) {
  return std::fabs(a - b) <= std::max(relative * std::fabs(b), absolute);
}

struct Agreement {
  CompareResult compare;
  int64_t left_out = 0, rows = 0;
};

// Rows at positions >= 1; those of a narrow router gap are left out.
Agreement agreement(const NaiveModel& model, const Expected& expected) {
  std::vector<float> got, want;
  std::vector<uint8_t> skip;
  Agreement result;
  const size_t vocab = static_cast<size_t>(expected.vocab_size);
  for (const ExpectedPrompt& prompt : expected.prompts) {
    const NaiveOutput output = model.run(prompt.ids);
    for (size_t i = 0; i < prompt.positions.size(); ++i) {
      const size_t position = static_cast<size_t>(prompt.positions[i]);
      if (position < 1) continue;
      const float* row = output.logits.data() + position * vocab;
      got.insert(got.end(), row, row + vocab);
      const float* wanted = expected.row(prompt, i);
      want.insert(want.end(), wanted, wanted + vocab);
      skip.push_back(!(prompt.router_gap[position] > kRouterGap));
      result.left_out += skip.back();
    }
  }
  result.rows = static_cast<int64_t>(skip.size());
  result.compare = compare_rows(got, want, expected.vocab_size, skip);
  return result;
}

TEST_CASE("The naive model agrees with transformers on every expected checkpoint", "[naive]") {
  TempDir dir;
  for (const std::string& name : expected_names(kRoot)) {
    const Expected expected = load_expected(kRoot, name);
    write_synthetic_checkpoint(expected.dir, dir / name);
    const NaiveModel model(Checkpoint::open(dir / name), load_config(dir / name));
    const Agreement a = agreement(model, expected);
    std::printf("%-22s %lld rows, %lld left out, max error %.3g\n", name.c_str(),
                static_cast<long long>(a.rows), static_cast<long long>(a.left_out),
                a.compare.max_error);
    INFO(name << ": " << a.compare.describe());
    CHECK(a.compare.within(1e-4));
    CHECK(a.left_out * 100 <= a.rows);
  }
}

TEST_CASE("The naive model measures the router gap that transformers has", "[naive]") {
  TempDir dir;
  for (const std::string name : {"lite_yarn", "odd_groups", "lite_dense"}) {
    const Expected expected = load_expected(kRoot, name);
    write_synthetic_checkpoint(expected.dir, dir / name);
    const NaiveModel model(Checkpoint::open(dir / name), load_config(dir / name));
    const ExpectedPrompt& prompt = expected.prompts[2];
    const NaiveOutput output = model.run(prompt.ids);
    for (size_t t = 0; t < prompt.ids.size(); ++t) {
      INFO(name << " position " << t);
      if (std::isinf(prompt.router_gap[t])) {
        CHECK(std::isinf(output.router_gap[t]));
      } else {
        CHECK(near(output.router_gap[t], prompt.router_gap[t], 0.01, 1e-5));
      }
    }
  }
}

// A model that is wrong in one respect must not agree: the expected values see each of them.
TEST_CASE("The expected values see a wrong scale or rotation or router", "[naive]") {
  TempDir dir;
  const Expected expected = load_expected(kRoot, "odd_yarn");
  write_synthetic_checkpoint(expected.dir, dir / "odd_yarn");
  const Checkpoint checkpoint = Checkpoint::open(dir / "odd_yarn");
  const ModelConfig right = load_config(dir / "odd_yarn");
  const auto error_of = [&](const ModelConfig& config) {
    return agreement(NaiveModel(checkpoint, config), expected).compare.max_error;
  };
  ModelConfig wrong = right;
  wrong.yarn_config.mscale_all_dim = 0.0;
  CHECK(error_of(wrong) > 1e-2);
  wrong = right;
  wrong.yarn_config.mscale = right.yarn_config.mscale_all_dim;
  CHECK(error_of(wrong) > 1e-2);
  wrong = right;
  wrong.yarn = false;
  CHECK(error_of(wrong) > 1e-2);
  wrong = right;
  wrong.yarn_config.original_max_position_embeddings *= 4;
  CHECK(error_of(wrong) > 1e-2);
  wrong = right;
  wrong.num_experts_per_tok -= 1;
  CHECK(error_of(wrong) > 1e-2);
  wrong = right;
  wrong.routed_scaling_factor = 1.1f;
  CHECK(error_of(wrong) > 1e-3);
}

TEST_CASE("The scales and frequencies of the naive model are those of the model", "[naive]") {
  for (const std::string& name : expected_names(kRoot)) {
    INFO(name);
    const ModelConfig config = load_config(kRoot + "/" + name);
    const NaiveRope naive = naive_rope(config);
    CHECK(near(softmax_scale(config), naive.softmax_scale, 1e-6));
    CHECK(near(rope_multiplier(config), naive.multiplier, 1e-6));
    const std::vector<float> inv_freq = rope_inv_freq(config);
    REQUIRE(inv_freq.size() == naive.inv_freq.size());
    for (size_t i = 0; i < inv_freq.size(); ++i) {
      CHECK(near(inv_freq[i], naive.inv_freq[i], 1e-6));
    }
  }
}

TEST_CASE("V2-Lite's softmax scale is 0.11472139", "[naive]") {
  const ModelConfig config = load_config(kRoot + "/lite_yarn");
  CHECK(near(naive_rope(config).softmax_scale, 0.1147213867929261, 1e-9));
  CHECK(naive_rope(config).multiplier == 1.0);
}

}  // namespace
}  // namespace mla::test::naive_model_test
