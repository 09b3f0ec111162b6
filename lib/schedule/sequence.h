// One request as the scheduler sees it: tokens, progress, pages. No text, no sampling parameters.
#pragma once

#include <cstdint>
#include <vector>

namespace mla {

enum class SequenceState : uint8_t { waiting, running };

// Whether the pages of a prompt are shared with other sequences that begin alike. give: others may
// take its pages, while it computes its whole prompt.
enum class PrefixReuse : uint8_t { none, give, take };

struct Sequence {
  int64_t id = 0;               // unique; the smaller, the older
  std::vector<int32_t> tokens;  // the prompt, then what was generated
  int32_t prompt_len = 0;       // >= 1
  int32_t max_tokens = 0;       // prompt and generated; at this size it only waits for finish()
  PrefixReuse reuse = PrefixReuse::none;
  SequenceState state = SequenceState::waiting;

  int32_t computed = 0;        // tokens whose cache rows are there after the steps planned so far
  int32_t high_water = 0;      // the most `computed` has been: rows below it are recomputation
  std::vector<int32_t> pages;  // page table; pages.size() * kPageTokens >= computed
  int32_t in_flight = 0;       // tokens sampled by the steps planned so far, not yet committed
  int32_t token_slot = -1;     // of the device, for the newest token of a running sequence

  // Statistics.
  int32_t prefill_chunks = 0;     // steps in which prompt tokens ran, recomputation included
  int32_t first_pass_chunks = 0;  // the same without recomputation: > 1 means the prompt was split
  int32_t preemptions = 0;
  int32_t cached_tokens = 0;  // of the prompt, found when it was admitted first

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  int32_t generated() const { return size() - prompt_len; }

  // With those that are in flight.
  int32_t length() const { return size() + in_flight; }

  // Tokens that a step could compute now, one of them perhaps in flight. 0 while more than one is,
  // and at max_tokens.
  int32_t pending() const {
    return in_flight <= 1 && length() < max_tokens ? length() - computed : 0;
  }
  // Needs only the row of its newest generated token; otherwise it has a prompt or a recomputation
  // to fill in.
  bool decodes() const { return pending() == 1 && computed >= prompt_len; }
  bool fills() const { return pending() > 0 && !decodes(); }
};

}  // namespace mla
