// sample against exact probabilities, the generator's published answers, and the backend's exp.
#include <bit>
#include <map>

#include "kernels/cpu/micro.h"
#include "kernels/philox.h"
#include "tests/ops/sample_fixture.h"

namespace mla::test::sample_test {
namespace {

TEST_CASE("Greedy sampling takes the lowest id of the largest logit") {
  for (const BackendCase& c : backend_cases())
    for (const int32_t vocab : {1, 3, 17, 63, 64, 65, 127, 129, 1013}) {
      Floats logits;
      std::vector<int32_t> want;
      for (const int32_t best : {0, vocab / 2, vocab - 1}) {
        Floats row = random_values(c, vocab, static_cast<uint32_t>(vocab));
        for (float& x : row) x = std::min(x, 2.0f);
        for (int32_t i = best; i < vocab; i += std::max(1, vocab / 3)) row[at(i)] = 5.0f;
        logits.insert(logits.end(), row.begin(), row.end());
        want.push_back(best);
      }
      Device dev(c);
      INFO(c.name << ", vocabulary " << vocab);
      CHECK(run_sample(dev, logits, vocab, std::vector<SampleSpec>(3)).tokens == want);
      CHECK(dev.guards_hold());
    }
}

TEST_CASE("Banned tokens are not sampled and their logits stay in the logprobs") {
  for (const BackendCase& c : backend_cases()) {
    Device dev(c);
    Floats logits = kRow;
    logits.insert(logits.end(), kRow.begin(), kRow.end());
    SampleSpec first, second;
    first.edit_begin = 0, first.edit_end = 2;
    second.edit_begin = 2, second.edit_end = 3;
    const Sampled got = run_sample(dev, logits, 13, {first, second}, bans({1, 6, 3}));
    CHECK(got.tokens == std::vector<int32_t>{3, 1});
    const std::vector<double> p = softmax(kRow, 1.0);
    CHECK(std::fabs(double{got.logprobs[0]} - std::log(p[3])) <= 1e-5);

    SampleSpec spec{.temperature = 1.0f};
    spec.edit_end = 3;
    CHECK(drawn(c, {1.0f, 1.0f, 1.0f, 1.0f}, spec, bans({0, 2, 3})) == std::set<int32_t>{1});
    // What top-k and top-p keep is of the tokens that may be sampled.
    spec.top_k = 2;
    CHECK(drawn(c, {9.0f, 1.0f, 8.0f, 7.0f, 1.0f}, spec, bans({0, 2, 3})) ==
          std::set<int32_t>{1, 4});
    spec.top_k = 0, spec.top_p = 0.4f;
    CHECK(drawn(c, {9.0f, 1.0f, 8.0f, 7.0f, 1.0f}, spec, bans({0, 2, 3})) == std::set<int32_t>{1});
  }
}

TEST_CASE("A row of NaN or of plus infinity or without a token samples nothing") {
  for (const BackendCase& c : backend_cases())
    for (const float temperature : {0.0f, 1.0f}) {
      const std::vector<Floats> bad = {{0, kNan, 1, 2},
                                       {kNan, 0, 0, 0},
                                       {0, 1, 2, kNan},
                                       {0, kInf, 1, 2},
                                       {-kInf, -kInf, -kInf, -kInf},
                                       {kInf, kNan, 0, 0}};
      Floats logits;
      for (const Floats& row : bad) logits.insert(logits.end(), row.begin(), row.end());
      logits.insert(logits.end(), {-kInf, -kInf, 0.5f, -kInf});  // good: one token
      logits.insert(logits.end(), {0.0f, 1.0f, 2.0f, 3.0f});     // all banned
      std::vector<SampleSpec> specs(
          8, SampleSpec{.temperature = temperature, .top_p = 0.9f, .top_k = 3});
      specs[7].edit_end = 4;
      Device dev(c);
      const Sampled got = run_sample(dev, logits, 4, specs, bans({0, 1, 2, 3}));
      CHECK(got.tokens == std::vector<int32_t>{-1, -1, -1, -1, -1, -1, 2, -1});
      CHECK(std::fabs(got.logprobs[6]) <= (c.cuda ? 1e-6f : 0.0f));
    }
}

TEST_CASE("A sampled token stays in its slot of the device and none is 0") {
  for (const BackendCase& c : backend_cases()) {
    const Floats logits = {0, 1, 5, 2, kNan, 0, 0, 0, 9, 0, 0, 0, 0, 9, 0, 0, 1, 2, 3, 4};
    std::vector<SampleSpec> specs(5);
    specs[0].token_slot = 3;
    specs[1].token_slot = 0;  // not a number: no token
    specs[2].token_slot = -1;
    specs[3].token_slot = 1;
    specs[4].token_slot = 5;  // all banned
    specs[4].edit_end = 4;
    Device dev(c);
    auto* sampled = dev.plain(std::vector<int32_t>(6, 77));
    dev->sample({.logits = device_logits(dev, logits, 4),
                 .specs = dev.plain(specs),
                 .edits = dev.plain(bans({0, 1, 2, 3})),
                 .tokens = dev.poisoned_plain<int32_t>(5),
                 .sampled = sampled,
                 .logprobs = dev.poisoned_plain<float>(5),
                 .top_ids = nullptr,
                 .top_logprobs = nullptr,
                 .S = 5,
                 .vocab = static_cast<int32_t>(c.size(4)),
                 .max_top = 0});
    INFO(c.name);
    CHECK(dev.read_plain<int32_t>(sampled, 6) == std::vector<int32_t>{0, 1, 77, 2, 77, 0});
    CHECK(dev.guards_hold());
  }
}

TEST_CASE("Top-k and top-p keep the lower id of a tie") {
  for (const BackendCase& c : backend_cases()) {
    INFO(c.name);
    const Floats ties = {0.0f, 2.0f, 1.0f, 2.0f, 1.0f, 1.0f, 0.0f};
    const std::vector<std::set<int32_t>> by_k = {
        {1}, {1, 3}, {1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4, 5}};
    for (int32_t k = 1; k <= 5; ++k)
      CHECK(drawn(c, ties, {.temperature = 1.5f, .top_k = k}) == by_k[at(k - 1)]);
    for (const int32_t k : {0, 7, 100})
      CHECK(drawn(c, ties, {.temperature = 1.5f, .top_k = k}) ==
            std::set<int32_t>{0, 1, 2, 3, 4, 5, 6});

    const Floats p = logs({0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.1});
    const auto by_p = [&](float top_p, int32_t k = 0) {
      return drawn(c, p, {.temperature = 1.0f, .top_p = top_p, .top_k = k});
    };
    CHECK(by_p(0.01f) == std::set<int32_t>{0});
    CHECK(by_p(0.39f) == std::set<int32_t>{0, 2});
    CHECK(by_p(0.45f) == std::set<int32_t>{0, 2, 4});
    CHECK(by_p(0.65f) == std::set<int32_t>{0, 1, 2, 4});
    CHECK(by_p(0.75f) == std::set<int32_t>{0, 1, 2, 3, 4});
    CHECK(by_p(1.0f) == std::set<int32_t>{0, 1, 2, 3, 4, 5, 6});
    // Top-p is of what top-k left: 0.7 of {0.2, 0.2, 0.2}.
    CHECK(by_p(0.6f, 3) == std::set<int32_t>{0, 2});
    CHECK(by_p(0.7f, 3) == std::set<int32_t>{0, 2, 4});
    // Temperature first: at 0.5 the weights are 4 : 1.
    CHECK(drawn(c, p, {.temperature = 0.5f, .top_p = 0.74f}) == std::set<int32_t>{0, 2, 4});
    CHECK(drawn(c, p, {.temperature = 0.5f, .top_p = 0.77f}) == std::set<int32_t>{0, 1, 2, 4});
  }
}

TEST_CASE("Draws of seeds and of choices follow the softmax as those of positions do") {
  for (const BackendCase& c : backend_cases())
    for (const bool by_seed : {true, false}) {
      Device dev(c);
      Floats logits;
      std::vector<SampleSpec> specs;
      for (uint32_t i = 0; i < 20000; ++i) {
        logits.insert(logits.end(), kRow.begin(), kRow.end());
        specs.push_back({.temperature = 1.0f,
                         .choice = by_seed ? 0 : i,
                         .position = 5,
                         .seed = by_seed ? uint64_t{i} << 20 : 9});
      }
      INFO(c.name << ", by seed " << by_seed);
      CHECK(chi_square(run_sample(dev, logits, 13, specs).tokens, softmax(kRow, 1.0)) <=
            chi_limit(12));
    }
}

// Pairs of neighbouring positions and choices: the joint distribution is the product.
TEST_CASE("Draws at neighbouring positions and choices are independent") {
  for (const BackendCase& c : bf16_cases()) {
    INFO(c.name);
    const Floats row = {0.0f, 0.5f, 1.0f};
    const std::vector<int32_t> a = draws(c, row, {.temperature = 1.0f, .seed = 3}, 20000);
    const std::vector<int32_t> b =
        draws(c, row, {.temperature = 1.0f, .choice = 1, .seed = 3}, 20000);
    const std::vector<double> p = softmax(row, 1.0);
    std::vector<double> joint;
    for (const double x : p)
      for (const double y : p) joint.push_back(x * y);
    std::vector<int32_t> by_position, by_choice;
    for (size_t i = 0; i < a.size(); ++i) {
      if (i % 2) by_position.push_back(a[i - 1] * 3 + a[i]);
      by_choice.push_back(a[i] * 3 + b[i]);
    }
    CHECK(chi_square(by_position, joint) <= chi_limit(8));
    CHECK(chi_square(by_choice, joint) <= chi_limit(8));
  }
}

TEST_CASE(
    "A draw depends on seed and choice and position and not on the row's place or the threads") {
  const int32_t vocab = 129, S = 65;
  for (const BackendCase& c : backend_cases()) {
    const Floats logits = random_values(c, int64_t{S} * vocab, 4, 2.0f);
    std::vector<SampleSpec> specs;
    for (int32_t s = 0; s < S; ++s)
      specs.push_back({.temperature = s % 4 ? 0.3f * static_cast<float>(s % 4) : 0.0f,
                       .top_p = s % 3 ? 1.0f : 0.8f,
                       .top_k = s % 5 ? 0 : 20,
                       .choice = static_cast<uint32_t>(s % 2),
                       .position = static_cast<uint32_t>(s / 2),
                       .seed = static_cast<uint64_t>(s) * 0x9E3779B97F4A7C15u,
                       .num_top = s % 6});
    check_row_bits(c, S, [&](Device& dev, int64_t first, int64_t rows) {
      const std::vector<SampleSpec> some(specs.begin() + first, specs.begin() + first + rows);
      const Sampled got = run_sample(dev, rows_of(logits, vocab, first, rows), vocab, some, {}, 8);
      Floats out;
      for (int64_t r = 0; r < rows; ++r) {
        out.push_back(static_cast<float>(got.tokens[at(r)]));
        out.push_back(got.logprobs[at(r)]);
        for (int64_t i = 0; i < 8; ++i) {
          out.push_back(static_cast<float>(got.top_ids[at(r * 8 + i)]));
          out.push_back(got.top_logprobs[at(r * 8 + i)]);
        }
      }
      return out;
    });
    // One row in all places, by one seed: one token.
    Floats same;
    for (int32_t s = 0; s < S; ++s) same.insert(same.end(), kRow.begin(), kRow.end());
    Device dev(c);
    const Sampled got = run_sample(
        dev, same, 13,
        std::vector<SampleSpec>(S, SampleSpec{.temperature = 3.0f, .position = 2, .seed = 6}));
    CHECK(std::set<int32_t>(got.tokens.begin(), got.tokens.end()).size() == 1);
  }
}

TEST_CASE("A temperature too small for the logits is greedy and never NaN") {
  for (const BackendCase& c : backend_cases())
    for (const float temperature : {1e-30f, 1e-44f})
      for (const int32_t k : {0, 3}) {
        const SampleSpec spec{.temperature = temperature, .top_p = k ? 0.9f : 1.0f, .top_k = k};
        CHECK(drawn(c, kRow, spec) == std::set<int32_t>{1});
      }
}

TEST_CASE("Logprobs are the log-softmax of the raw logits and the best come first") {
  for (const BackendCase& c : backend_cases())
    for (const int32_t vocab : {1, 3, 17, 65, 129, 102400}) {
      Floats row = random_values(c, vocab, 6, 4.0f);
      if (vocab > 20) row[7] = row[11] = row[19] = 20.0f, row[3] = -kInf;
      double max = -1e300, sum = 0.0;
      for (const float x : row) max = std::max(max, double{x});
      for (const float x : row) sum += std::exp(double{x} - max);
      const double log_sum = max + std::log(sum);
      const double tolerance = (c.cuda ? 5e-6 : 2e-6) * (1 + std::fabs(log_sum));
      Device dev(c);
      SampleSpec spec{.temperature = 0.5f, .seed = 8, .num_top = 5};
      const Sampled got = run_sample(dev, row, vocab, {spec}, {}, 6);
      INFO(c.name << ", vocabulary " << vocab);
      REQUIRE(got.tokens[0] >= 0);
      CHECK(std::fabs(double{got.logprobs[0]} - (double{row[at(got.tokens[0])]} - log_sum)) <=
            tolerance);
      std::vector<int32_t> order(at(vocab));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return row[at(a)] > row[at(b)]; });
      for (int32_t i = 0; i < std::min(5, vocab); ++i) {
        CHECK(got.top_ids[at(i)] == order[at(i)]);
        const double want = double{row[at(order[at(i)])]} - log_sum;
        CHECK(std::fabs(double{got.top_logprobs[at(i)]} - want) <= tolerance);
      }
      CHECK(got.top_ids[5] == -1);  // beyond num_top nothing is written
    }
}

// kat_vectors of Random123, the reference implementation by the paper's authors.
TEST_CASE("Philox gives the published answers") {
  using Words = std::array<uint32_t, 4>;
  CHECK(philox4x32({0, 0, 0, 0}, 0) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const uint32_t ones = 0xffffffff;
  CHECK(philox4x32({ones, ones, ones, ones}, ~uint64_t{0}) ==
        Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("The exp of the CPU backend is within 2 ulp over the whole range of floats") {
  double worst = 0.0, worst_subnormal = 0.0;
  const double ulp_subnormal = 0x1p-149;
  // Every 509th float, both signs; all exponents, all residues of the mantissa's low bits.
  for (uint64_t bits = 0; bits <= 0xffffffff; bits += 509) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    const float y = cpu::exp_f32(x);
    if (std::isnan(x)) {
      if (!std::isnan(y)) FAIL("exp of NaN is " << y);
      continue;
    }
    if (x > 88.73f ? y != kInf : x < -103.98f ? y != 0.0f : !(y >= 0.0f))
      FAIL("exp(" << x << ") is " << y);
    if (x > 88.722f || x < -103.98f) continue;
    const double want = std::exp(double{x});
    if (want < 0x1p-126) {
      worst_subnormal = std::max(worst_subnormal, std::fabs(double{y} - want) / ulp_subnormal);
    } else {
      const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
      worst = std::max(worst, std::fabs(double{y} - want) / ulp);
    }
  }
  CHECK(worst <= 2.0);
  CHECK(worst_subnormal <= 1.5);
  CHECK(cpu::exp_f32(0.0f) == 1.0f);
  CHECK(cpu::exp_f32(-0.0f) == 1.0f);
  CHECK(cpu::exp_f32(-kInf) == 0.0f);
  CHECK(cpu::exp_f32(kInf) == kInf);
  CHECK(cpu::silu(0.0f) == 0.0f);
  CHECK(cpu::silu(-1000.0f) == 0.0f);
  CHECK(cpu::silu(1000.0f) == 1000.0f);
}

}  // namespace
}  // namespace mla::test::sample_test
