// Byte-pair encoding of one word.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mla {

struct BpeMerge {
  int32_t left, right, result;
};

// Immutable; several threads may encode at once, each with its own Scratch.
class Bpe {
 public:
  struct Scratch {
    struct Symbol {
      int32_t id;
      uint32_t previous, next;  // kNone at the ends
      bool alive;
    };
    std::vector<Symbol> symbols;
    std::vector<std::pair<uint64_t, int32_t>> heap;  // rank << 32 | place, result
  };

  // `tokens`: the bytes of each id, empty where an id has none. `bytes`: the id of each byte, -1
  // for those that UTF-8 never has. `merges` in order of rank, every id within `tokens`.
  Bpe(std::vector<std::string> tokens, const std::array<int32_t, 256>& bytes,
      const std::vector<BpeMerge>& merges);

  // Appends the ids of a word of valid UTF-8. Of all pairs that follow each other the one of
  // lowest rank is merged first, of equals the leftmost. n log n in the length.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

  const std::vector<std::string>& tokens() const { return tokens_; }

 private:
  struct Pair {
    uint64_t key;  // left << 32 | right, or kEmpty
    uint32_t rank;
    int32_t result;
  };
  struct Whole {
    uint32_t tag;  // upper half of the hash
    int32_t id;    // -1: free
  };

  const Pair* find_pair(int32_t left, int32_t right) const;
  int32_t find_whole(std::string_view word) const;
  void index_whole_words();
  void merge_short(std::string_view word, std::vector<int32_t>& ids) const;
  void merge_long(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;
  void merge(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

  std::vector<std::string> tokens_;
  std::array<int32_t, 256> bytes_;
  std::vector<Pair> pairs_;   // open addressing, at most half full
  std::vector<Whole> whole_;  // likewise: the tokens to which their own bytes lead
  size_t longest_ = 0;        // bytes of the longest of those
};

}  // namespace mla
