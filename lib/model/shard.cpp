#include "lib/model/shard.h"

#include <algorithm>
#include <string>

#include "lib/base/error.h"

namespace mla {

int64_t rank_extent(int64_t total, int32_t size) {
  constexpr int64_t kUnit = 16;
  if (size == 1) return total;
  const int64_t share = (total + size - 1) / size;
  return (share + kUnit - 1) / kUnit * kUnit;
}

RankPart rank_part(int64_t total, int64_t extent, Rank rank) {
  const int64_t begin = std::min(rank.index * extent, total);
  return {begin, std::min(extent, total - begin)};
}

ModelConfig rank_config(const ModelConfig& config, int32_t size) {
  ModelConfig local = config;
  local.num_heads /= size;
  local.intermediate_size = static_cast<int32_t>(rank_extent(config.intermediate_size, size));
  local.moe_intermediate_size =
      static_cast<int32_t>(rank_extent(config.moe_intermediate_size, size));
  return local;
}

void check_tensor_parallel(const ModelConfig& config, int32_t size) {
  if (size >= 1 && config.num_heads % size == 0) return;
  std::string sizes;
  for (int32_t n = 1; n <= config.num_heads; ++n)
    if (config.num_heads % n == 0) sizes += fmt::format("{}{}", n > 1 ? ", " : "", n);
  usage_fail(
      "--tensor-parallel-size: expected a size that divides the model's num_attention_heads {} "
      "({}), found {}",
      config.num_heads, sizes, size);
}

}  // namespace mla
