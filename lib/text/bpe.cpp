#include "lib/text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "lib/base/error.h"

namespace mla {
namespace {

constexpr uint64_t kEmpty = ~uint64_t{0};
constexpr uint32_t kNone = ~uint32_t{0};
constexpr uint32_t kNoRank = ~uint32_t{0};
// Up to this many bytes, scanning for the lowest rank costs less than a heap does.
constexpr size_t kShort = 48;

uint64_t mix(uint64_t x) {
  x *= 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio
  return x ^ x >> 32;
}

uint64_t hash_bytes(std::string_view word) {
  uint64_t h = word.size();
  const char* p = word.data();
  size_t left = word.size();
  uint64_t block = 0;
  for (; left >= 8; p += 8, left -= 8) {
    std::memcpy(&block, p, 8);
    h = mix(h ^ block);
  }
  block = 0;
  std::memcpy(&block, p, left);
  return mix(h ^ block);
}

size_t table_size(size_t entries) { return std::bit_ceil(std::max<size_t>(2 * entries, 16)); }

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

}  // namespace

Bpe::Bpe(std::vector<std::string> tokens, const std::array<int32_t, 256>& bytes,
         const std::vector<BpeMerge>& merges)
    : tokens_(std::move(tokens)), bytes_(bytes) {
  pairs_.assign(table_size(merges.size()), {kEmpty, 0, 0});
  const size_t mask = pairs_.size() - 1;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const BpeMerge& m = merges[rank];
    const uint64_t key = pair_key(m.left, m.right);
    size_t i = mix(key) & mask;
    while (pairs_[i].key != kEmpty && pairs_[i].key != key) i = (i + 1) & mask;
    // Of a pair that is listed twice the later rank holds, as in Hugging Face's map.
    pairs_[i] = {key, static_cast<uint32_t>(rank), m.result};
  }
  index_whole_words();
}

const Bpe::Pair* Bpe::find_pair(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  const size_t mask = pairs_.size() - 1;
  for (size_t i = mix(key) & mask;; i = (i + 1) & mask) {
    if (pairs_[i].key == key) return &pairs_[i];
    if (pairs_[i].key == kEmpty) return nullptr;
  }
}

int32_t Bpe::find_whole(std::string_view word) const {
  if (word.size() > longest_) return -1;
  const uint64_t h = hash_bytes(word);
  const size_t mask = whole_.size() - 1;
  for (size_t i = h & mask; whole_[i].id >= 0; i = (i + 1) & mask) {
    if (whole_[i].tag == static_cast<uint32_t>(h >> 32) &&
        tokens_[static_cast<size_t>(whole_[i].id)] == word)
      return whole_[i].id;
  }
  return -1;
}

// Most words of a text are one token. Which tokens their own bytes lead to is found by merging
// each: being in the vocabulary is not enough.
void Bpe::index_whole_words() {
  whole_.assign(table_size(tokens_.size()), {0, -1});
  const size_t mask = whole_.size() - 1;
  Scratch scratch;
  std::vector<int32_t> ids;
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const std::string& token = tokens_[id];
    const auto never = [&](char c) { return bytes_[static_cast<unsigned char>(c)] < 0; };
    if (token.empty() || std::any_of(token.begin(), token.end(), never)) continue;
    ids.clear();
    merge(token, scratch, ids);
    if (ids.size() != 1 || ids[0] != static_cast<int32_t>(id)) continue;
    const uint64_t h = hash_bytes(token);
    size_t i = h & mask;
    while (whole_[i].id >= 0) i = (i + 1) & mask;
    whole_[i] = {static_cast<uint32_t>(h >> 32), static_cast<int32_t>(id)};
    longest_ = std::max(longest_, token.size());
  }
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  const int32_t whole = find_whole(word);
  if (whole >= 0) {
    ids.push_back(whole);
  } else {
    merge(word, scratch, ids);
  }
}

void Bpe::merge(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  if (word.size() <= kShort) {
    merge_short(word, ids);
  } else {
    merge_long(word, scratch, ids);
  }
}

void Bpe::merge_short(std::string_view word, std::vector<int32_t>& ids) const {
  int32_t id[kShort];
  uint32_t rank[kShort];  // of the pair i, i + 1
  int32_t result[kShort];
  size_t n = word.size();
  const auto look_up = [&](size_t i) {
    const Pair* pair = i + 1 < n ? find_pair(id[i], id[i + 1]) : nullptr;
    rank[i] = pair ? pair->rank : kNoRank;
    result[i] = pair ? pair->result : -1;
  };
  for (size_t i = 0; i < n; ++i) id[i] = bytes_[static_cast<unsigned char>(word[i])];
  for (size_t i = 0; i < n; ++i) look_up(i);
  while (n > 1) {
    const size_t at = static_cast<size_t>(std::min_element(rank, rank + n) - rank);
    if (rank[at] == kNoRank) break;
    id[at] = result[at];
    for (size_t i = at + 1; i + 1 < n; ++i) {
      id[i] = id[i + 1];
      rank[i] = rank[i + 1];
      result[i] = result[i + 1];
    }
    --n;
    if (at > 0) look_up(at - 1);
    look_up(at);
  }
  ids.insert(ids.end(), id, id + n);
}

void Bpe::merge_long(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  if (word.size() >= kNone) fail("one word of {} bytes is too long for the tokenizer", word.size());
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  const auto n = static_cast<uint32_t>(word.size());
  symbols.resize(n);
  heap.clear();
  for (uint32_t i = 0; i < n; ++i) {
    symbols[i] = {bytes_[static_cast<unsigned char>(word[i])], i == 0 ? kNone : i - 1,
                  i + 1 == n ? kNone : i + 1, true};
  }
  const auto entry = [&](uint32_t at) {
    const Pair* pair = find_pair(symbols[at].id, symbols[symbols[at].next].id);
    if (!pair) return false;
    heap.emplace_back(uint64_t{pair->rank} << 32 | at, pair->result);
    return true;
  };
  for (uint32_t i = 0; i + 1 < n; ++i) entry(i);
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto push = [&](uint32_t at) {
    if (entry(at)) std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto [key, result] = heap.back();
    heap.pop_back();
    const auto at = static_cast<uint32_t>(key);
    Scratch::Symbol& left = symbols[at];
    if (!left.alive || left.next == kNone) continue;
    // An entry is stale when one of its symbols has grown since; the ranks then differ.
    const Pair* pair = find_pair(left.id, symbols[left.next].id);
    if (!pair || pair->rank != key >> 32) continue;
    Scratch::Symbol& right = symbols[left.next];
    right.alive = false;
    left.id = result;
    left.next = right.next;
    if (left.next != kNone) {
      symbols[left.next].previous = at;
      push(at);
    }
    if (left.previous != kNone) push(left.previous);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace mla
