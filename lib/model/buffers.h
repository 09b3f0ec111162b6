// Every device buffer of a step, sized for the worst case that the limits allow.
//
// Symbols are those of kernels/ops.h (D decode rows of a step, E routed and S shared experts, K
// routed experts a token, I expert width, W workspace rows), and: B rows of a step; A columns of
// qkv_a in front of the latent, q_lora_rank or, without it, q_dim.
#pragma once

#include <cstdint>

#include "kernels/ops.h"
#include "lib/model/arena.h"
#include "lib/model/config.h"

namespace mla {

// The largest step that will ever run.
struct StepLimits {
  int32_t max_rows = 0;  // B, rows of a step
  int32_t max_seqs = 0;  // sequences of a step, and rows sampled at once
  int32_t max_model_len = 0;
  int32_t workspace_rows = 0;     // W, a multiple of kKeyTile
  int32_t num_pages = 0;          // of the KV pool
  int32_t max_decode_splits = 0;  // of the decode rows of a step
  int32_t ranks = 1;              // tensor parallelism: each has these limits
  bool graphs = false;  // steps of decode rows alone are padded to graph_sizes and replayed
  bool stamps = false;  // steps say when they were computed
};

// Decode splits of a step, those of padding rows included.
int64_t split_capacity(const StepLimits& limits);
// D, decode rows of a step: each has a split.
int64_t decode_capacity(const StepLimits& limits);

inline constexpr int32_t kMaxTop = 20;        // logprobs of a token, at most
inline constexpr int32_t kEditsPerRow = 256;  // logit edits on the device at once, a sequence
inline constexpr int32_t kMlpSlice = 32768;   // rows of the feed-forward at once
inline constexpr int32_t kGatherRows = 128;   // rows of logits that ranks exchange at once

// The step plan on the device; see StepPlan.
struct PlanBuffers {
  int32_t* token_ids;          // [B]
  int32_t* positions;          // [B]
  int64_t* slots;              // [B]
  int32_t* page_table;         // [max_seqs · pages of max_model_len]
  PrefillSpan* prefill;        // [max_seqs]
  KeySpan* key_spans;          // [max_key_spans]
  WorkTile* tiles;             // [max_tiles]
  DecodeRow* decode;           // [D]
  DecodeSplit* decode_splits;  // [max_splits]
  DecodeSplit* decode_groups;  // [max_splits]
  int32_t* num_splits;         // [2] splits, groups
  int32_t* sample_rows;        // [max_seqs]
  SampleSpec* specs;           // [max_seqs]
  LogitEdit* edits;            // [max_edits], at least one row's
  int64_t page_table_size, max_key_spans, max_tiles, max_decode, max_splits, max_edits;

  static PlanBuffers carve(Arena& arena, const ModelConfig& config, const StepLimits& limits);
};

// Recomputed K and V, and the running softmax state of requests that need several passes.
struct WorkspaceBuffers {
  void* kv;          // [W + kKeyTile, N·(P+V)]
  float* state_max;  // [B, N]
  float* state_sum;  // [B, N]
  float* state_out;  // [B, N, V]

  static WorkspaceBuffers carve(Arena& arena, const ModelConfig& config, const StepLimits& limits,
                                DType dtype);
};

// Of a rank, whose config is rank_config's.
struct ActivationBuffers {
  void* residual;   // [B, H]
  void* hidden;     // [B, H] after a norm
  void* qkv_a;      // [B, A + L+R]
  void* q_a;        // [B, q_lora_rank] after its norm
  void* q;          // [B, q_dim]; with q_lora only, else q lives in qkv_a
  void* attention;  // [B, N·V]
  float* delta;     // [B, H] fp32 output of o_proj or the dense down_proj; of a single rank
  void* q_lat;      // [D, N, L]
  void* o_lat;      // [D, N, L]
  // One slice of the feed-forward, s = min(B, kMlpSlice) rows:
  void* inner;            // [s, intermediate] or [s·(K+S), I]
  void* expert_out;       // [s, K+S, H]
  float* router_logits;   // [s, E]
  int32_t* expert_ids;    // [s, K]
  float* expert_weights;  // [s, K]
  // Sampling:
  void* sampled_hidden;  // [max_seqs, H]
  float* logits;         // [max_seqs, vocab]
  std::byte* output;     // of SampledOutput
  int32_t* sampled;      // [max_seqs] token slots
  // With several ranks, else null:
  void* partial;         // [B, H] what attention and feed-forward add, of this rank, then of all
  void* reduce_scratch;  // run dtype, see kernels/comm/comm.h
  float* rank_logits;    // [max_seqs, rank_extent(vocab)]
  float* all_logits;     // [ranks, min(max_seqs, kGatherRows), rank_extent(vocab)]

  static ActivationBuffers carve(Arena& arena, const ModelConfig& config, const StepLimits& limits,
                                 DType dtype);
};

// What sampling gives in one block, so that one transfer reads it: the first `bytes(rows, 0)` of it
// where no top logprobs are wanted.
struct SampledOutput {
  static constexpr int64_t kStamps = 3;
  uint64_t* stamps;     // [kStamps] by the device's clock: the step's begin, its logits, its tokens
  int32_t* tokens;      // [rows]
  float* logprobs;      // [rows]
  int32_t* top_ids;     // [rows, top]
  float* top_logprobs;  // [rows, top]

  static size_t bytes(int64_t rows, int64_t top) {
    return static_cast<size_t>(kStamps + rows * (1 + top)) * 8;
  }
  static SampledOutput at(std::byte* block, int64_t rows, int64_t top);
};

// Of a rank's config.
ModelShape model_shape(const ModelConfig& config, const StepLimits& limits);

// Bytes of one token's cache rows in all layers.
size_t cache_bytes_per_token(const ModelConfig& config, DType dtype);

}  // namespace mla
