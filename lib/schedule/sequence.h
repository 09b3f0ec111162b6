// One request as the scheduler sees it: tokens, progress, pages. No text, no sampling parameters.
#pragma once

#include <cstdint>
#include <vector>

namespace mla {

enum class SequenceState : uint8_t { waiting, running, finished };

struct Sequence {
  int64_t id = 0;               // unique; its order of arrival
  std::vector<int32_t> tokens;  // the prompt, then what was generated
  int32_t prompt_len = 0;       // >= 1
  SequenceState state = SequenceState::waiting;

  int32_t computed = 0;         // tokens whose cache rows are written by the steps planned so far
  std::vector<int32_t> pages;   // page table; pages.size() * kPageTokens >= computed

  // Statistics.
  int32_t prefill_chunks = 0;   // steps in which prompt tokens ran, recomputation included
  int32_t first_pass_chunks = 0;  // the same without recomputation: > 1 means the prompt was split
  int32_t preemptions = 0;

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  int32_t generated() const { return size() - prompt_len; }
};

}  // namespace mla
