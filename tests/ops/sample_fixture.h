// Rows of logits to sample from, and what the draws should be.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "tests/ops/backends.h"

namespace mla::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline size_t at(int64_t i) { return static_cast<size_t>(i); }

using Edits = std::vector<LogitEdit>;

// Edits by which these tokens are not sampled.
inline Edits bans(const std::vector<int32_t>& ids) {
  Edits edits;
  for (const int32_t id : ids) edits.push_back({.token = id, .count = -1, .bias = -kInf, .raw = 0});
  return edits;
}

struct Sampled {
  std::vector<int32_t> tokens;
  Floats logprobs;
  std::vector<int32_t> top_ids;
  Floats top_logprobs;
};

// On the GPU a row is of a multiple of 16 logits: the tokens past `vocab` are impossible.
inline float* device_logits(Device& dev, const Floats& logits, int32_t vocab) {
  const int64_t width = dev.backend_case().size(vocab);
  Floats rows;
  for (size_t row = 0; row < logits.size(); row += at(vocab)) {
    const auto from = logits.begin() + static_cast<std::ptrdiff_t>(row);
    rows.insert(rows.end(), from, from + vocab);
    rows.insert(rows.end(), at(width - vocab), -kInf);
  }
  return dev.plain(rows);
}

inline Sampled run_sample(Device& dev, const Floats& logits, int32_t vocab,
                          const std::vector<SampleSpec>& specs, const Edits& edits = {},
                          int32_t max_top = 0) {
  const int32_t S = static_cast<int32_t>(specs.size());
  auto* tokens = dev.poisoned_plain<int32_t>(S);
  auto* logprobs = dev.poisoned_plain<float>(S);
  auto* top_ids = dev.poisoned_plain<int32_t>(int64_t{S} * max_top);
  auto* top_logprobs = dev.poisoned_plain<float>(int64_t{S} * max_top);
  dev->sample({.logits = device_logits(dev, logits, vocab),
               .specs = dev.plain(specs),
               .edits = dev.plain(edits),
               .tokens = tokens,
               .logprobs = logprobs,
               .top_ids = top_ids,
               .top_logprobs = top_logprobs,
               .S = S,
               .vocab = static_cast<int32_t>(dev.backend_case().size(vocab)),
               .max_top = max_top});
  return {dev.read_plain<int32_t>(tokens, S), dev.read_plain<float>(logprobs, S),
          dev.read_plain<int32_t>(top_ids, int64_t{S} * max_top),
          dev.read_plain<float>(top_logprobs, int64_t{S} * max_top)};
}

// n draws from one row of logits, at n positions.
inline std::vector<int32_t> draws(const BackendCase& c, const Floats& row, SampleSpec spec,
                                  int32_t n, const Edits& edits = {}) {
  Device dev(c);
  Floats logits;
  std::vector<SampleSpec> specs;
  for (int32_t i = 0; i < n; ++i) {
    logits.insert(logits.end(), row.begin(), row.end());
    spec.position = static_cast<uint32_t>(i);
    specs.push_back(spec);
  }
  return run_sample(dev, logits, static_cast<int32_t>(row.size()), specs, edits).tokens;
}

inline std::set<int32_t> drawn(const BackendCase& c, const Floats& row, const SampleSpec& spec,
                               const Edits& edits = {}) {
  const std::vector<int32_t> tokens = draws(c, row, spec, 600, edits);
  return {tokens.begin(), tokens.end()};
}

// Logits whose softmax at temperature 1 are these probabilities, up to rounding.
inline Floats logs(const std::vector<double>& p) {
  Floats out;
  for (const double x : p) out.push_back(static_cast<float>(std::log(x)));
  return out;
}

// Pearson's statistic of the tokens against probabilities p; its mean is the degrees of freedom and
// its variance twice that. Infinite where a token of probability 0 was drawn.
inline double chi_square(const std::vector<int32_t>& tokens, const std::vector<double>& p) {
  std::vector<double> count(p.size(), 0.0);
  for (const int32_t t : tokens) {
    if (t < 0 || at(t) >= p.size() || p[at(t)] == 0.0) return HUGE_VAL;
    ++count[at(t)];
  }
  double sum = 0.0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double expected = p[i] * static_cast<double>(tokens.size());
    if (expected > 0.0) sum += (count[i] - expected) * (count[i] - expected) / expected;
  }
  return sum;
}

// One in a hundred thousand of honest samples exceeds it; the seeds are fixed.
inline double chi_limit(double freedom) { return freedom + 5.0 * std::sqrt(2.0 * freedom) + 6.0; }

inline std::vector<double> softmax(const Floats& row, double temperature) {
  std::vector<double> p;
  double sum = 0.0;
  for (const float x : row) sum += p.emplace_back(std::exp(double{x} / temperature));
  for (double& x : p) x /= sum;
  return p;
}

// p over `kept` alone.
inline std::vector<double> only(std::vector<double> p, const std::set<int32_t>& kept) {
  double sum = 0.0;
  for (size_t i = 0; i < p.size(); ++i)
    sum += p[i] = kept.count(static_cast<int32_t>(i)) ? p[i] : 0.0;
  for (double& x : p) x /= sum;
  return p;
}

inline const Floats kRow = {0.3f,  1.9f, -0.7f, 1.2f,  -2.5f, 0.9f, 1.6f,
                            -1.1f, 0.0f, 0.6f,  -0.2f, 1.0f,  -3.0f};

}  // namespace mla::test
