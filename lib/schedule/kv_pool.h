// The pool of KV pages. Pure bookkeeping: it hands out page numbers and takes them back.
#pragma once

#include <cstdint>
#include <vector>

namespace mla {

class KvPool {
 public:
  // `num_pages` >= 1, each of kPageTokens tokens.
  explicit KvPool(int32_t num_pages);

  int32_t num_pages() const;
  int32_t free_pages() const;

  // Grows `pages` until it holds `tokens` tokens. False, and nothing changes, when the pool has too
  // few free pages.
  bool grow(std::vector<int32_t>& pages, int32_t tokens);

  // Takes all of `pages` back and clears it. Throws Error on a page that is free already.
  void release(std::vector<int32_t>& pages);

 private:
  std::vector<int32_t> free_;  // a stack: the page released last is handed out first
  std::vector<bool> in_use_;
};

// Pages that hold `tokens` tokens.
int32_t pages_for(int32_t tokens);

}  // namespace mla
