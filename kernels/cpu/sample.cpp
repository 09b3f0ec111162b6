// Sampling of one token a row.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/cpu/cpu_backend_impl.h"
#include "kernels/philox.h"
#include "kernels/sampling.h"

namespace mla::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// log-softmax's two constants: x - max - log_sum. The sum runs in sixteen lanes and double.
struct LogSoftmax {
  float max;
  double log_sum;
  float operator()(float x) const {
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(max) - log_sum);
  }
};

// False when a logit is NaN or +infinity, or when all are -infinity.
bool log_softmax(const float* logits, int32_t n, LogSoftmax& out) {
  float max = kMinusInfinity;
  bool nan = false;
  for (int32_t i = 0; i < n; ++i) {
    nan |= logits[i] != logits[i];
    max = logits[i] > max ? logits[i] : max;
  }
  if (nan || !std::isfinite(max)) return false;
  double lanes[16] = {};
  for (int32_t i = 0; i < n; ++i) lanes[i % 16] += static_cast<double>(exp_f32(logits[i] - max));
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  out = {max, std::log(sum)};
  return true;
}

// Better first: larger value, then lower id.
struct Better {
  const float* values;
  bool operator()(int32_t a, int32_t b) const {
    return values[a] != values[b] ? values[a] > values[b] : a < b;
  }
};

std::vector<int32_t> best_ids(const float* values, int32_t n, int32_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  count = std::min(count, n);
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(), Better{values});
  ids.resize(static_cast<size_t>(count));
  return ids;
}

int32_t argmax(const float* values, int32_t n) {
  int32_t best = 0;
  for (int32_t i = 1; i < n; ++i)
    if (values[i] > values[best]) best = i;
  return best;
}

// The ids that top-k and then top-p keep, best first; empty: all of them. `scaled` are logits/T;
// those of -infinity have no mass.
std::vector<int32_t> kept_ids(const float* scaled, int32_t n, int32_t k, float top_p) {
  const bool by_k = k > 0 && k < n, by_p = top_p < 1.0f;
  if (!by_k && !by_p) return {};
  std::vector<int32_t> ids = best_ids(scaled, n, by_k ? k : n);
  if (!by_p) return ids;
  const double max = static_cast<double>(scaled[ids[0]]);
  std::vector<double> p(ids.size());
  double sum = 0.0;
  for (size_t i = 0; i < ids.size(); ++i) {
    p[i] = std::exp(static_cast<double>(scaled[ids[i]]) - max);
    sum += p[i];
  }
  // The shortest run of best ids whose probabilities reach top_p.
  double reached = 0.0;
  size_t kept = 0;
  while (kept < ids.size() && reached < static_cast<double>(top_p) * sum) reached += p[kept++];
  ids.resize(std::max<size_t>(kept, 1));
  return ids;
}

// The Gumbel noise of one (seed, choice, position, token).
double gumbel(const SampleSpec& spec, int32_t token) {
  const uint32_t bits =
      philox4x32({static_cast<uint32_t>(token), spec.position, spec.choice, 0}, spec.seed)[0];
  return -std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-32));
}

int32_t sample_row(const SampleSpec& spec, std::vector<float>& logits) {
  const int32_t n = static_cast<int32_t>(logits.size());
  const int32_t best_id = argmax(logits.data(), n);
  const float max = logits[static_cast<size_t>(best_id)];
  if (!std::isfinite(max)) return -1;
  if (spec.temperature == 0.0f) return best_id;
  // Relative to the largest, so that a tiny temperature makes no infinity minus infinity.
  for (float& x : logits) {
    x = (x - max) / spec.temperature;
    if (x < spec.min_scaled) x = kMinusInfinity;
  }
  const std::vector<int32_t> kept = kept_ids(logits.data(), n, spec.top_k, spec.top_p);
  double best = -std::numeric_limits<double>::infinity();
  int32_t pick = -1;
  const auto consider = [&](int32_t id) {
    if (logits[static_cast<size_t>(id)] == kMinusInfinity) return;
    const double score = static_cast<double>(logits[static_cast<size_t>(id)]) + gumbel(spec, id);
    if (pick < 0 || score > best || (score == best && id < pick)) {
      best = score;
      pick = id;
    }
  };
  if (kept.empty()) {
    for (int32_t id = 0; id < n; ++id) consider(id);
  } else {
    for (const int32_t id : kept) consider(id);
  }
  return pick;
}

}  // namespace

template <class T>
void CpuBackend<T>::sample(const SampleParams& p) {
  const auto give = [&p](int32_t s, int32_t token, float logprob) {
    p.tokens[s] = token;
    p.logprobs[s] = logprob;
    const int32_t slot = p.specs[s].token_slot;
    if (p.sampled && slot >= 0) p.sampled[slot] = std::max(token, 0);
  };
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
  for (int32_t s = 0; s < p.S; ++s) {
    const SampleSpec& spec = p.specs[s];
    const float* raw = p.logits + int64_t{s} * p.vocab;
    LogSoftmax logprob;
    if (!log_softmax(raw, p.vocab, logprob)) {
      give(s, -1, 0.0f);
      continue;
    }
    std::vector<float> logits(raw, raw + p.vocab);
    for (int32_t e = spec.edit_begin; e < spec.edit_end; ++e) {
      float& x = logits[static_cast<size_t>(p.edits[e].token)];
      x = edited_logit(x, spec, p.edits[e]);
    }
    const int32_t token = sample_row(spec, logits);  // -1: all of them are ruled out
    give(s, token, token < 0 ? 0.0f : logprob(raw[token]));
    if (spec.num_top == 0) continue;
    const std::vector<int32_t> top = best_ids(raw, p.vocab, spec.num_top);
    for (size_t i = 0; i < top.size(); ++i) {
      p.top_ids[int64_t{s} * p.max_top + static_cast<int64_t>(i)] = top[i];
      p.top_logprobs[int64_t{s} * p.max_top + static_cast<int64_t>(i)] = logprob(raw[top[i]]);
    }
  }
}

template void CpuBackend<float>::sample(const SampleParams&);
template void CpuBackend<bf16>::sample(const SampleParams&);

}  // namespace mla::cpu
