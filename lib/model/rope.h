// YaRN's frequencies and scales, as DeepSeek-V2's modelling code has them (yarn_get_mscale,
// yarn_find_correction_range, yarn_linear_ramp_mask), computed in double and rounded once.
#pragma once

#include <vector>

#include "lib/model/config.h"

namespace mla {

// inv_freq [R/2]. Plain RoPE: theta^(-2i/R). YaRN: interpolated by `factor` above the correction
// range, not below it, a ramp between. The range is floored below, ceiled above, clamped to
// [0, R-1], its upper end + 0.001 if both are equal.
std::vector<float> rope_inv_freq(const ModelConfig& config);

// (P+R)^-1/2, times m² with m = 0.1·mscale_all_dim·ln(factor) + 1 where mscale_all_dim is not 0.
float softmax_scale(const ModelConfig& config);

// Multiplier of cos and sin: m(mscale)/m(mscale_all_dim) when both are not 0, else
// 0.1·ln(factor) + 1; 1 without YaRN or for factor <= 1.
float rope_multiplier(const ModelConfig& config);

// Rows [R] of one position: cos of the R/2 pairs, then sin. The angle is fp32 inv_freq × fp32
// position; the multiplier is in. [positions, R]
std::vector<float> rope_table(const ModelConfig& config, int64_t positions);

}  // namespace mla
