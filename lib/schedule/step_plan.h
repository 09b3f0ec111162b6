// What one engine step computes: plain data, made once, read by every layer and every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/base/step_types.h"
#include "lib/schedule/sequence.h"

namespace mla {

// A row whose logits are needed: it samples the next token of its sequence.
struct SampleRow {
  int32_t row;         // of the step
  int64_t sequence;    // Sequence::id
  int32_t position;    // of the token that will be sampled: the sequence's length at planning
  int32_t token_slot;  // where the token stays on the device, in [0, max_seqs)
};

struct StepPlan {
  // Rows. Prompt rows come first, [0, prefill_rows), then the decode rows; within each kind the
  // rows of a sequence are adjacent and in order of position.
  std::vector<int32_t> token_ids;  // [T]; -1 - token_slot: sampled by the step before this one
  std::vector<int32_t> positions;  // [T]
  std::vector<int64_t> slots;      // [T] cache slot that the row writes
  int32_t prefill_rows = 0;

  std::vector<int32_t> page_table;  // tables of the step's sequences, one after the other
  std::vector<PrefillSpan> prefill;
  std::vector<int64_t> prefill_ids;  // Sequence::id of each prefill span
  std::vector<KeySpan> key_spans;    // of all passes
  std::vector<Pass> passes;
  std::vector<WorkTile> tiles;             // of all passes
  std::vector<DecodeRow> decode;           // [T - prefill_rows]
  std::vector<DecodeSplit> decode_splits;  // of all decode rows, in order
  std::vector<DecodeSplit> decode_groups;  // the same work by groups
  std::vector<SampleRow> samples;          // [S], at most one a sequence

  int32_t rows() const { return static_cast<int32_t>(token_ids.size()); }
  bool empty() const { return token_ids.empty(); }
};

// Cuts the key spans of `prefill` into passes over a workspace of `workspace_rows` rows (a positive
// multiple of kKeyTile): requests in order, whole spans while they fit, then the largest piece that
// is a multiple of kKeyTile. Replaces plan.key_spans, plan.passes and plan.tiles. No span is empty.
// A query tile is left out of a pass in which it sees no key, unless the request ends there. Throws
// Error for other workspaces.
void cut_passes(StepPlan& plan, int32_t workspace_rows);

// Adds decode rows up to `rows` that compute nothing of use: at position -1, without keys, writing
// no cache.
void pad_decode_rows(StepPlan& plan, int32_t rows);

// Appends a decode row of `key_len` keys, with its splits and groups.
void add_decode_row(StepPlan& plan, int32_t key_len, int32_t table_begin);

}  // namespace mla
