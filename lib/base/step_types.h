// The plain records of one engine step that the scheduler writes and the attention kernels read.
// Symbols are those of the algorithm: T rows (tokens) of the step, C context tokens already cached,
// q new tokens, W workspace rows.
#pragma once

#include <cstdint>

namespace mla {

inline constexpr int kPageTokens = 64;    // tokens of a KV page
inline constexpr int kKeyTile = 128;      // keys of a prefill tile; spans are cut at its multiples
inline constexpr int kQueryTile = 128;    // new tokens of a request that one prefill tile serves
inline constexpr int kDecodeSplit = 256;  // keys of a decode split, at absolute multiples
inline constexpr int kDecodeGroup = 8;    // splits that are folded before the next ones join

// Pages that hold so many tokens.
constexpr int64_t pages_of(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

// A cached row of token position p of a request lives in slot
//   page_table[table_begin + p / kPageTokens] * kPageTokens + p % kPageTokens.

// The prompt tokens of one request in this step: rows [row_begin, row_begin + q_len) of the step
// are its positions [context, context + q_len). Its keys are positions [0, context + q_len).
struct PrefillSpan {
  int32_t row_begin;
  int32_t q_len;        // >= 1
  int32_t context;      // C
  int32_t table_begin;  // into StepPlan::page_table
};

// One row that attends by the absorbed path: a generated token. Decode row d of a step is its row
// prefill_rows + d.
struct DecodeRow {
  int32_t key_len;  // its position + 1: itself is its last key; 0 for padding, whose output is 0
  int32_t table_begin;  // into StepPlan::page_table
  int32_t
      split_begin;  // of its splits in StepPlan::decode_splits, which has decode_splits(key_len)
};

// Splits of a decode row; padding has one, which writes its zeros.
constexpr int32_t decode_splits(int32_t key_len) {
  return key_len <= kDecodeSplit ? 1 : (key_len + kDecodeSplit - 1) / kDecodeSplit;
}

// Work of decode attention, as small or as large pieces: one split of a row, keys
// [split·kDecodeSplit, (split+1)·kDecodeSplit), or the group of kDecodeGroup splits that begins
// with `split`.
struct DecodeSplit {
  int32_t row;  // decode row d
  int32_t split;
};

// A piece of a request's keys inside one pass: positions [key_begin, key_end) are recomputed into
// workspace rows [workspace_row, workspace_row + key_end - key_begin). key_begin is a multiple of
// kKeyTile; key_end is one too, or the request's last key.
struct KeySpan {
  int32_t prefill;  // index into StepPlan::prefill
  int32_t key_begin;
  int32_t key_end;
  int32_t workspace_row;
};

// A unit of work of a pass. Of keys: positions [begin, begin + kKeyTile) of the span's request are
// recomputed. Of queries: new tokens [begin, begin + kQueryTile) of the span's request attend to
// it.
struct WorkTile {
  int32_t span;   // index into the spans of the pass
  int32_t begin;  // a multiple of kKeyTile, or of kQueryTile
};

// One pass over the workspace: spans [span_begin, span_end) of StepPlan::key_spans. In every pass a
// request has at most one span. `rows` (<= W) is what they take together. Its work as tiles:
// [key_tile_begin, key_tile_end) and [query_tile_begin, query_tile_end) of StepPlan::tiles; query
// tiles with the most keys come first.
struct Pass {
  int32_t span_begin;
  int32_t span_end;
  int32_t rows;
  int32_t key_tile_begin = 0, key_tile_end = 0;
  int32_t query_tile_begin = 0, query_tile_end = 0;
};

}  // namespace mla
