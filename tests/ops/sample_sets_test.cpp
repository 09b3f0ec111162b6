// What min-p, top-k and top-p keep, penalties and biases by vLLM's formulas, and 100,000 draws
// against the exact distribution of each.
#include <map>

#include "tests/ops/sample_fixture.h"

namespace mla::test::sample_sets_test {
namespace {

constexpr int32_t kDraws = 100000;

// Of `spec` from one row, in calls that every backend takes.
std::vector<int32_t> many_draws(const BackendCase& c, const Floats& row, SampleSpec spec,
                                const Edits& edits = {}) {
  constexpr int32_t kAtOnce = 20000;
  std::vector<int32_t> all;
  spec.edit_end = static_cast<int32_t>(edits.size());
  for (int32_t first = 0; first < kDraws; first += kAtOnce) {
    // Each row changes its own logits; the edits' kept logits are the same in all of them.
    Floats logits;
    std::vector<SampleSpec> specs;
    for (int32_t i = first; i < first + kAtOnce; ++i) {
      logits.insert(logits.end(), row.begin(), row.end());
      spec.position = static_cast<uint32_t>(i);
      specs.push_back(spec);
    }
    Device dev(c);
    const std::vector<int32_t> tokens =
        run_sample(dev, logits, static_cast<int32_t>(row.size()), specs, edits).tokens;
    all.insert(all.end(), tokens.begin(), tokens.end());
  }
  return all;
}

// The exact distribution: temperature, then min-p, top-k, top-p, ties to the lower id.
std::vector<double> exact(const Floats& row, double temperature, double min_p, int32_t k,
                          double top_p) {
  std::vector<double> p = softmax(row, temperature);
  std::vector<int32_t> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return row[at(a)] > row[at(b)]; });
  const double best = p[at(order[0])];
  std::set<int32_t> kept;
  for (const int32_t id : order)
    if (p[at(id)] >= min_p * best * (1 - 1e-7) && (k == 0 || static_cast<int32_t>(kept.size()) < k))
      kept.insert(id);
  p = only(p, kept);
  double mass = 0.0;
  std::set<int32_t> nucleus;
  for (const int32_t id : order) {
    if (!kept.count(id) || mass >= top_p * (1 - 1e-7)) continue;
    nucleus.insert(id);
    mass += p[at(id)];
  }
  return only(p, nucleus);
}

double freedom(const std::vector<double>& p) {
  return static_cast<double>(std::count_if(p.begin(), p.end(), [](double x) { return x > 0; })) - 1;
}

TEST_CASE("100,000 draws follow the exact distribution of temperature, min-p, top-k and top-p") {
  // Ties where each of them cuts.
  const Floats row = {0.3f, 1.9f, -0.7f, 1.2f, -2.5f, 0.9f, 1.9f, -1.1f,
                      0.9f, 0.6f, -0.7f, 1.2f, -3.0f, 0.3f, 0.9f, -2.5f};
  struct Case {
    float temperature, min_p;
    int32_t top_k;
    float top_p;
  };
  for (const BackendCase& c : bf16_cases())
    for (const Case& x : std::vector<Case>{{0.5f, 0, 0, 1},
                                           {1, 0, 0, 1},
                                           {2, 0, 0, 1},
                                           {0.8f, 0, 5, 1},
                                           {1, 0, 3, 1},
                                           {1, 0, 0, 0.5f},
                                           {1, 0, 0, 0.77f},
                                           {1, 0.2f, 0, 1},
                                           {0.7f, 0.1f, 0, 1},
                                           {1, 0.49f, 0, 1},
                                           {1, 0.1f, 7, 0.9f},
                                           {1.3f, 0.3f, 4, 0.6f},
                                           {1, 1, 0, 1}}) {
      INFO(c.name << ", temperature " << x.temperature << ", min_p " << x.min_p << ", top_k "
                  << x.top_k << ", top_p " << x.top_p);
      const std::vector<double> p =
          exact(row, double{x.temperature}, double{x.min_p}, x.top_k, double{x.top_p});
      const SampleSpec spec{.temperature = x.temperature,
                            .top_p = x.top_p,
                            .top_k = x.top_k,
                            .min_scaled = std::log(x.min_p),
                            .seed = 21};
      CHECK(chi_square(many_draws(c, row, spec), p) <= chi_limit(freedom(p)));
    }
}

TEST_CASE("Min-p keeps what is at least its share of the best, before top-k and top-p") {
  for (const BackendCase& c : backend_cases()) {
    INFO(c.name);
    const auto kept = [&](float min_p, int32_t k = 0, float top_p = 1.0f, float temperature = 1) {
      return drawn(
          c, logs({0.1, 0.4, 0.2, 0.2, 0.06, 0.04}),
          {.temperature = temperature, .top_p = top_p, .top_k = k, .min_scaled = std::log(min_p)});
    };
    CHECK(kept(0.0f) == std::set<int32_t>{0, 1, 2, 3, 4, 5});
    CHECK(kept(0.12f) == std::set<int32_t>{0, 1, 2, 3, 4});
    CHECK(kept(0.2f) == std::set<int32_t>{0, 1, 2, 3});
    CHECK(kept(0.49f) == std::set<int32_t>{1, 2, 3});
    CHECK(kept(0.51f) == std::set<int32_t>{1});
    CHECK(kept(1.0f) == std::set<int32_t>{1});
    // Of equal ones all are kept, where top-k keeps the lower id.
    CHECK(kept(0.3f, 2) == std::set<int32_t>{1, 2});
    // Shares of what min-p left, 0.8: the best has a half of it.
    CHECK(kept(0.3f, 0, 0.49f) == std::set<int32_t>{1});
    CHECK(kept(0.3f, 0, 0.7f) == std::set<int32_t>{1, 2});
    // Temperature first: at 0.5 the probabilities are as their squares.
    CHECK(kept(0.3f, 0, 1.0f, 0.5f) == std::set<int32_t>{1});
    CHECK(kept(0.2f, 0, 1.0f, 0.5f) == std::set<int32_t>{1, 2, 3});
  }
}

TEST_CASE("Penalties and biases are vLLM's formulas and leave the logprobs alone") {
  // By hand: bias; then repetition 1.5 of tokens in prompt or answer, positive logits divided,
  // others multiplied; then frequency 0.25 a time and presence 0.5 once of tokens in the answer.
  const Floats row = {3.0f, -1.0f, 2.0f, 0.5f, -2.0f, 1.0f, 0.0f};
  const Edits edits = {{.token = 0, .count = 2, .bias = 0, .raw = 0},  // 2 - 0.5 - 0.5 = 1
                       {.token = 1, .count = 0, .bias = 0, .raw = 0},  // -1.5
                       {.token = 2, .count = 0, .bias = 1, .raw = 0},  // 3 / 1.5 = 2
                       {.token = 4, .count = 1, .bias = 0, .raw = 0},  // -3 - 0.25 - 0.5 = -3.75
                       {.token = 5, .count = -1, .bias = 0.5f, .raw = 0},  // 1.5
                       {.token = 6, .count = 3, .bias = 0, .raw = 0}};     // -0.75 - 0.5 = -1.25
  const Floats want = {1.0f, -1.5f, 2.0f, 0.5f, -3.75f, 1.5f, -1.25f};
  SampleSpec spec{.num_top = 3,
                  .repetition_penalty = 1.5f,
                  .frequency_penalty = 0.25f,
                  .presence_penalty = 0.5f};
  spec.edit_end = static_cast<int32_t>(edits.size());
  const std::vector<double> raw = softmax(row, 1.0);
  for (const BackendCase& c : bf16_cases()) {
    INFO(c.name);
    Device dev(c);
    const Sampled got = run_sample(dev, row, 7, {spec}, edits, 3);
    CHECK(got.tokens[0] == 2);  // 0 without the edits
    CHECK(std::fabs(double{got.logprobs[0]} - std::log(raw[2])) <= 1e-5);
    CHECK(got.top_ids == std::vector<int32_t>{0, 2, 5});
    CHECK(std::fabs(double{got.top_logprobs[0]} - std::log(raw[0])) <= 1e-5);
    CHECK(dev.guards_hold());

    SampleSpec warm = spec;
    warm.temperature = 1.0f, warm.num_top = 0, warm.seed = 5;
    const std::vector<double> p = softmax(want, 1.0);
    CHECK(chi_square(many_draws(c, row, warm, edits), p) <= chi_limit(6));
    // And what the sets keep is of the edited logits.
    warm.top_k = 2;
    CHECK(chi_square(many_draws(c, row, warm, edits), only(p, {2, 5})) <= chi_limit(1));
  }
}

TEST_CASE("Rows of many edits over a large vocabulary choose the best edited logit") {
  constexpr int32_t kVocab = 102400, kRows = 5;
  for (const BackendCase& c : bf16_cases()) {
    const Floats logits = random_values(c, int64_t{kRows} * kVocab, 31, 3.0f);
    Edits edits;
    std::vector<SampleSpec> specs(kRows);
    std::vector<int32_t> want;
    for (int32_t s = 0; s < kRows; ++s) {
      SampleSpec& spec = specs[at(s)];
      spec.repetition_penalty = 1.1f, spec.frequency_penalty = 0.1f * static_cast<float>(s);
      spec.temperature = s % 2 ? 1e-30f : 0.0f;  // by the one kernel and by the other
      spec.edit_begin = static_cast<int32_t>(edits.size());
      Floats row(logits.begin() + int64_t{s} * kVocab, logits.begin() + int64_t{s + 1} * kVocab);
      for (int32_t id = s; id < kVocab; id += 1 + s * 37) {
        const LogitEdit edit = {.token = id, .count = id % 4, .bias = -0.5f, .raw = 0};
        edits.push_back(edit);
        float& x = row[at(id)];
        x += edit.bias;
        x = x > 0 ? x / 1.1f : x * 1.1f;
        x -= spec.frequency_penalty * static_cast<float>(edit.count);
      }
      spec.edit_end = static_cast<int32_t>(edits.size());
      want.push_back(static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
    }
    Device dev(c);
    INFO(c.name);
    const Sampled got = run_sample(dev, logits, kVocab, specs, edits);
    CHECK(got.tokens == want);
    for (int32_t s = 0; s < kRows; ++s) {
      const float* row = logits.data() + int64_t{s} * kVocab;
      double sum = 0.0;
      for (int32_t i = 0; i < kVocab; ++i) sum += std::exp(double{row[i]});
      CHECK(std::fabs(double{got.logprobs[at(s)]} - (double{row[want[at(s)]]} - std::log(sum))) <=
            1e-4);
    }
    CHECK(dev.guards_hold());
  }
}

}  // namespace
}  // namespace mla::test::sample_sets_test
