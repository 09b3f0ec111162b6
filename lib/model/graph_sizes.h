// The numbers of rows that decode steps are padded to, so that each can be recorded once.
#pragma once

#include <cstdint>
#include <vector>

namespace mla {

// 1, 2, 4, then multiples of 8 up to 64, of 16 up to 256 and of 64; the last is max_rows.
std::vector<int32_t> graph_sizes(int32_t max_rows);

// The smallest of graph_sizes that holds `rows`; 0: none does.
int32_t graph_size(const std::vector<int32_t>& sizes, int32_t rows);

}  // namespace mla
