// How tensor parallelism cuts a model: what one of several ranks has of it.
#pragma once

#include <cstdint>

#include "lib/model/config.h"

namespace mla {

struct Rank {
  int32_t index = 0, size = 1;  // index in [0, size)
};

// What each of `size` ranks has room for of `total` columns that are cut: their share, up to a
// multiple of 16, so that every rank has the same shapes. The last ranks may have fewer, or none;
// the rest of their room is zero. All of it where size is 1.
int64_t rank_extent(int64_t total, int32_t size);

// The part [begin, begin + count) of `total` that lies in a rank's room for `extent`.
struct RankPart {
  int64_t begin, count;
};
RankPart rank_part(int64_t total, int64_t extent, Rank rank);

// The config of a rank's share: heads divided; intermediate_size and moe_intermediate_size are
// rank_extent. The vocabulary stays: only the LM head has rank_extent(vocab_size) rows.
ModelConfig rank_config(const ModelConfig& config, int32_t size);

// Throws UsageError that names the sizes that work: those that divide num_attention_heads.
void check_tensor_parallel(const ModelConfig& config, int32_t size);

}  // namespace mla
