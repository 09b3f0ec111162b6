// The pool of KV pages, some of which may be found again by the tokens in them. Pure bookkeeping:
// it hands out page numbers and takes them back.
//
// A page is published when it is full of prompt tokens: its content then depends on the tokens from
// the first of the prompt up to its last alone, so that any sequence that begins with them may hold
// it too. Generated tokens are computed in another way and their pages are never published.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

namespace mla {

class KvPool {
 public:
  // `num_pages` >= 1, each of kPageTokens tokens. `keep_prefixes`: a published page that nobody
  // holds any more can still be found until grow() needs it, the one released first before others.
  explicit KvPool(int32_t num_pages, bool keep_prefixes = false);

  int32_t num_pages() const;
  int32_t free_pages() const;  // what grow() can hand out, kept ones included

  // Grows `pages` until it holds `tokens` tokens. False, and nothing changes, when the pool has too
  // few free pages.
  bool grow(std::vector<int32_t>& pages, int32_t tokens);

  // Takes all of `pages` back and clears it; shared ones stay with their other holders. Throws
  // Error on a page that is free already.
  void release(std::vector<int32_t>& pages);

  // The published pages that begin with these tokens, as many as there are. Nobody holds them yet.
  std::vector<int32_t> find_prefix(std::span<const int32_t> tokens) const;
  // How many of `found` are free pages now.
  int32_t free_among(const std::vector<int32_t>& found) const;
  // Lets a table without pages begin with `found`.
  void share(const std::vector<int32_t>& found, std::vector<int32_t>& pages);
  // Pages [first, end) of the table are full of `tokens`, which begin with the prompt's first.
  // Where the same tokens are published already, that page stays the one that is found.
  void publish(const std::vector<int32_t>& pages, std::span<const int32_t> tokens, int32_t first,
               int32_t end);

 private:
  struct Page {
    int32_t holders = 0;
    bool published = false;
    int32_t parent = -1;          // of a published page: the one before it, -1: none
    std::vector<int32_t> tokens;  // of a published page
    uint64_t released = 0;        // key in kept_ while it is there
  };

  Page& at(int32_t page) { return pages_[static_cast<size_t>(page)]; }
  const Page& at(int32_t page) const { return pages_[static_cast<size_t>(page)]; }
  int32_t find(int32_t parent, std::span<const int32_t> tokens) const;  // -1: none
  void withdraw(int32_t page);
  int32_t take_free();

  bool keep_prefixes_;
  std::vector<Page> pages_;
  std::vector<int32_t> free_;  // a stack: the page released last is handed out first
  // Kept pages by the order of their release. Holders of a page hold its parent, and release it
  // after, so that no page is taken before those that follow it.
  std::map<uint64_t, int32_t> kept_;
  uint64_t releases_ = 0;
  std::unordered_multimap<uint64_t, int32_t> published_;  // by a hash of parent and tokens
};

}  // namespace mla
