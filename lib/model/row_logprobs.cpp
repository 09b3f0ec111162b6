// Model::row_logprobs: log-probabilities of tokens that are given, not sampled.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "lib/base/error.h"
#include "lib/model/model.h"

namespace mla {
namespace {

constexpr size_t kBlockRows = 64;

void add_row(std::span<const float> logits, int32_t token, size_t top, std::vector<int32_t>& ids,
             Model::RowLogprobs& out) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - most);
  // NaN where a logit is one.
  const double log_sum =
      std::isfinite(most) ? std::log(sum) : std::numeric_limits<double>::quiet_NaN();
  const auto logprob = [&](int32_t id) {
    const double x = logits[static_cast<size_t>(id)];
    return static_cast<float>(x - most - log_sum);
  };
  out.logprobs.push_back(logprob(token));
  if (top == 0) return;
  std::iota(ids.begin(), ids.end(), 0);
  const auto better = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  if (!std::isnan(log_sum))  // NaN has no order
    std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(top), ids.end(),
                      better);
  for (size_t i = 0; i < top; ++i) {
    out.top_ids.push_back(ids[i]);
    out.top_logprobs.push_back(logprob(ids[i]));
  }
}

}  // namespace

Model::RowLogprobs Model::row_logprobs(std::span<const int32_t> rows,
                                       std::span<const int32_t> tokens, int32_t top) {
  if (rows.size() != tokens.size())
    fail("{} rows, {} tokens to look up in them", rows.size(), tokens.size());
  const auto vocab = static_cast<size_t>(c_.vocab_size);
  const size_t block = std::min(kBlockRows, static_cast<size_t>(limits_.max_seqs));
  std::vector<float> host(std::min(block, rows.size()) * vocab);
  std::vector<int32_t> ids(vocab);
  RowLogprobs out;
  for (size_t first = 0; first < rows.size(); first += block) {
    const size_t count = std::min(block, rows.size() - first);
    const float* device = logits(rows.subspan(first, count));
    backend_.download(host.data(), device, count * vocab * sizeof(float));
    for (size_t i = 0; i < count; ++i)
      add_row(std::span<const float>(host).subspan(i * vocab, vocab), tokens[first + i],
              std::min(static_cast<size_t>(top), vocab), ids, out);
  }
  return out;
}

}  // namespace mla
