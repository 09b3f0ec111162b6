#include "lib/model/graph_sizes.h"

#include <algorithm>

namespace mla {

std::vector<int32_t> graph_sizes(int32_t max_rows) {
  std::vector<int32_t> sizes;
  int32_t rows = 1;
  while (rows < max_rows) {
    sizes.push_back(rows);
    rows += rows < 4 ? rows : rows < 8 ? 4 : rows < 64 ? 8 : rows < 256 ? 16 : 64;
  }
  sizes.push_back(max_rows);
  return sizes;
}

int32_t graph_size(const std::vector<int32_t>& sizes, int32_t rows) {
  const auto found = std::lower_bound(sizes.begin(), sizes.end(), rows);
  return found == sizes.end() ? 0 : *found;
}

}  // namespace mla
