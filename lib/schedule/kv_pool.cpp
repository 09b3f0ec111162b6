#include "lib/schedule/kv_pool.h"

#include <algorithm>
#include <cstddef>

#include "lib/base/error.h"
#include "lib/base/step_types.h"

namespace mla {
namespace {

uint64_t hash_of(int32_t parent, std::span<const int32_t> tokens) {
  uint64_t hash = static_cast<uint32_t>(parent);
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

std::span<const int32_t> tokens_of_page(std::span<const int32_t> tokens, int32_t page) {
  return tokens.subspan(static_cast<size_t>(page) * kPageTokens, kPageTokens);
}

}  // namespace

KvPool::KvPool(int32_t num_pages, bool keep_prefixes) : keep_prefixes_(keep_prefixes) {
  if (num_pages < 1) fail("KV pool: expected at least 1 page, found {}", num_pages);
  const auto count = static_cast<size_t>(num_pages);
  pages_.resize(count);
  free_.resize(count);
  // Backwards, so that a fresh pool hands out page 0 first.
  for (int32_t i = 0; i < num_pages; ++i) free_[static_cast<size_t>(i)] = num_pages - 1 - i;
}

int32_t KvPool::num_pages() const { return static_cast<int32_t>(pages_.size()); }

int32_t KvPool::free_pages() const { return static_cast<int32_t>(free_.size() + kept_.size()); }

int32_t KvPool::take_free() {
  if (free_.empty()) {
    const int32_t page = kept_.begin()->second;
    kept_.erase(kept_.begin());
    withdraw(page);
    return page;
  }
  const int32_t page = free_.back();
  free_.pop_back();
  return page;
}

bool KvPool::grow(std::vector<int32_t>& pages, int32_t tokens) {
  const int64_t missing = pages_of(tokens) - std::ssize(pages);
  if (missing > free_pages()) return false;
  for (int64_t i = 0; i < missing; ++i) {
    pages.push_back(take_free());
    at(pages.back()).holders = 1;
  }
  return true;
}

void KvPool::release(std::vector<int32_t>& pages) {
  // From the last page to the first, so that the same pages come back in the same order.
  while (!pages.empty()) {
    const int32_t number = pages.back();
    if (number < 0 || number >= num_pages()) {
      fail("KV pool: released page {}, expected 0 to {}", number, num_pages() - 1);
    }
    Page& page = at(number);
    if (page.holders == 0) fail("KV pool: page {} is free already", number);
    pages.pop_back();
    if (--page.holders > 0) continue;
    if (page.published && keep_prefixes_) {
      page.released = releases_++;
      kept_.emplace(page.released, number);
      continue;
    }
    if (page.published) withdraw(number);
    free_.push_back(number);
  }
}

int32_t KvPool::find(int32_t parent, std::span<const int32_t> tokens) const {
  const auto [begin, end] = published_.equal_range(hash_of(parent, tokens));
  for (auto it = begin; it != end; ++it) {
    const Page& page = at(it->second);
    if (page.parent == parent && std::ranges::equal(page.tokens, tokens)) return it->second;
  }
  return -1;
}

std::vector<int32_t> KvPool::find_prefix(std::span<const int32_t> tokens) const {
  std::vector<int32_t> found;
  const auto whole = static_cast<int32_t>(tokens.size() / kPageTokens);
  int32_t parent = -1;
  for (int32_t i = 0; i < whole; ++i) {
    parent = find(parent, tokens_of_page(tokens, i));
    if (parent < 0) break;
    found.push_back(parent);
  }
  return found;
}

int32_t KvPool::free_among(const std::vector<int32_t>& found) const {
  return static_cast<int32_t>(
      std::ranges::count_if(found, [&](int32_t page) { return at(page).holders == 0; }));
}

void KvPool::share(const std::vector<int32_t>& found, std::vector<int32_t>& pages) {
  if (!pages.empty()) fail("KV pool: a table of {} pages cannot begin anew", pages.size());
  for (const int32_t number : found) {
    Page& page = at(number);
    if (!page.published) fail("KV pool: page {} is shared and not published", number);
    if (page.holders++ == 0) kept_.erase(page.released);
    pages.push_back(number);
  }
}

void KvPool::publish(const std::vector<int32_t>& pages, std::span<const int32_t> tokens,
                     int32_t first, int32_t end) {
  for (int32_t i = first; i < end; ++i) {
    const int32_t number = pages[static_cast<size_t>(i)];
    Page& page = at(number);
    if (page.published) continue;
    const int32_t parent = i == 0 ? -1 : pages[static_cast<size_t>(i) - 1];
    // Where another page is the one that is found, those that follow are behind that one.
    if (parent >= 0 && !at(parent).published) return;
    const std::span<const int32_t> own = tokens_of_page(tokens, i);
    if (find(parent, own) >= 0) return;
    page.published = true;
    page.parent = parent;
    page.tokens.assign(own.begin(), own.end());
    published_.emplace(hash_of(parent, own), number);
  }
}

void KvPool::withdraw(int32_t number) {
  Page& page = at(number);
  const auto [begin, end] = published_.equal_range(hash_of(page.parent, page.tokens));
  for (auto it = begin; it != end; ++it) {
    if (it->second != number) continue;
    published_.erase(it);
    break;
  }
  page.published = false;
  page.parent = -1;
  page.tokens = {};
}

}  // namespace mla
