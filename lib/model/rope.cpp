#include "lib/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace mla {
namespace {

// yarn_get_mscale: the temperature of attention, natural logarithm.
double yarn_mscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

// The dimension whose pair turns `rotations` times over the original context
// (yarn_find_correction_dim).
double correction_dim(double rotations, double dim, double theta, double context) {
  return dim * std::log(context / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(theta));
}

}  // namespace

std::vector<float> rope_inv_freq(const ModelConfig& config) {
  const int32_t dim = config.qk_rope_head_dim;
  const YarnConfig& yarn = config.yarn_config;
  double low = 0.0, high = 0.0;
  if (config.yarn) {
    const auto context = static_cast<double>(yarn.original_max_position_embeddings);
    low = std::floor(correction_dim(yarn.beta_fast, dim, config.rope_theta, context));
    high = std::ceil(correction_dim(yarn.beta_slow, dim, config.rope_theta, context));
    low = std::max(low, 0.0);
    high = std::min(high, dim - 1.0);
    if (low == high) high += 0.001;  // the modelling code's guard against 0/0
  }

  std::vector<float> inv_freq(static_cast<size_t>(dim / 2));
  for (int32_t i = 0; i < dim / 2; ++i) {
    const double plain = std::pow(config.rope_theta, -2.0 * i / dim);
    double value = plain;
    if (config.yarn) {
      const double ramp = std::clamp((i - low) / (high - low), 0.0, 1.0);
      value = plain / yarn.factor * ramp + plain * (1.0 - ramp);
    }
    inv_freq[static_cast<size_t>(i)] = static_cast<float>(value);
  }
  return inv_freq;
}

float softmax_scale(const ModelConfig& config) {
  double scale =
      1.0 / std::sqrt(static_cast<double>(config.qk_nope_head_dim + config.qk_rope_head_dim));
  if (config.yarn && config.yarn_config.mscale_all_dim != 0.0) {
    const double m = yarn_mscale(config.yarn_config.factor, config.yarn_config.mscale_all_dim);
    scale *= m * m;
  }
  return static_cast<float>(scale);
}

float rope_multiplier(const ModelConfig& config) {
  if (!config.yarn) return 1.0f;
  const YarnConfig& yarn = config.yarn_config;
  if (yarn.mscale != 0.0 && yarn.mscale_all_dim != 0.0)
    return static_cast<float>(yarn_mscale(yarn.factor, yarn.mscale) /
                              yarn_mscale(yarn.factor, yarn.mscale_all_dim));
  return static_cast<float>(yarn_mscale(yarn.factor, 1.0));
}

std::vector<float> rope_table(const ModelConfig& config, int64_t positions) {
  const std::vector<float> inv_freq = rope_inv_freq(config);
  const float multiplier = rope_multiplier(config);
  const size_t half = inv_freq.size();
  std::vector<float> table(static_cast<size_t>(positions) * half * 2);
  float* row = table.data();
  for (int64_t position = 0; position < positions; ++position, row += 2 * half) {
    for (size_t i = 0; i < half; ++i) {
      // The angle is a float, as in the modelling code; its cosine is of that float, in double, so
      // that the table does not depend on the C library's float functions.
      const float angle = static_cast<float>(position) * inv_freq[i];
      row[i] = static_cast<float>(std::cos(double{angle})) * multiplier;
      row[half + i] = static_cast<float>(std::sin(double{angle})) * multiplier;
    }
  }
  return table;
}

}  // namespace mla
