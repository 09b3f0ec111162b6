#include "lib/schedule/kv_pool.h"

#include <cstddef>

#include "lib/base/error.h"
#include "lib/base/step_types.h"

namespace mla {

int32_t pages_for(int32_t tokens) {
  return tokens / kPageTokens + (tokens % kPageTokens != 0 ? 1 : 0);
}

KvPool::KvPool(int32_t num_pages) {
  if (num_pages < 1) fail("KV pool: expected at least 1 page, found {}", num_pages);
  const auto count = static_cast<size_t>(num_pages);
  in_use_.resize(count, false);
  free_.resize(count);
  // Backwards, so that a fresh pool hands out page 0 first.
  for (int32_t i = 0; i < num_pages; ++i) free_[static_cast<size_t>(i)] = num_pages - 1 - i;
}

int32_t KvPool::num_pages() const { return static_cast<int32_t>(in_use_.size()); }

int32_t KvPool::free_pages() const { return static_cast<int32_t>(free_.size()); }

bool KvPool::grow(std::vector<int32_t>& pages, int32_t tokens) {
  const int32_t missing = pages_for(tokens) - static_cast<int32_t>(pages.size());
  if (missing > free_pages()) return false;
  for (int32_t i = 0; i < missing; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    in_use_[static_cast<size_t>(page)] = true;
    pages.push_back(page);
  }
  return true;
}

void KvPool::release(std::vector<int32_t>& pages) {
  // From the last page to the first, so that the same pages come back in the same order.
  while (!pages.empty()) {
    const int32_t page = pages.back();
    if (page < 0 || page >= num_pages()) {
      fail("KV pool: released page {}, expected 0 to {}", page, num_pages() - 1);
    }
    if (!in_use_[static_cast<size_t>(page)]) fail("KV pool: page {} is free already", page);
    in_use_[static_cast<size_t>(page)] = false;
    free_.push_back(page);
    pages.pop_back();
  }
}

}  // namespace mla
