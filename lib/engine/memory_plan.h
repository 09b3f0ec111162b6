// Where the device's memory goes: a pure function of config, options and sizes, printed at start,
// written to run.json and shown by `mla-run plan`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/model/buffers.h"
#include "lib/model/config.h"
#include "lib/schedule/scheduler.h"

namespace mla {

// What the user asks of one run. Absent: the default of the mode and device.
struct EngineOptions {
  bool chunked = false;
  std::optional<int32_t> max_batched_tokens;  // on: 8192; off: max(max_model_len, 16384)
  std::optional<int32_t> max_model_len;       // the config's, lowered to what the KV pool holds
  std::optional<int32_t> workspace_tokens;    // W: max(B, min(max_model_len, 131072)), up to 128
  int32_t max_seqs = 64;
  uint64_t kv_cache_bytes = uint64_t{4} << 30;
  DType dtype = DType::bf16;
};

struct MemoryPlan {
  struct Entry {
    std::string name;
    uint64_t bytes;
  };
  std::vector<Entry>
      entries;  // weights, KV blocks, MHA workspace, activations, step plan, RoPE table
  StepLimits limits;
  bool chunked = false;
  std::string note;  // what was lowered and why, or ""

  uint64_t total() const;
  uint64_t kv_tokens() const;  // that the pool holds
  SchedulerOptions scheduler_options() const;
};

// `weight_bytes` as the backend stores them. Throws UsageError, naming the numbers: a KV cache too
// small for one page, a max_model_len beyond the config's or beyond the pool, a size below 1, B
// below max_model_len in off mode.
MemoryPlan make_memory_plan(const ModelConfig& config, const EngineOptions& options,
                            uint64_t weight_bytes);

OrderedJson to_json(const MemoryPlan& plan);
std::string to_text(const MemoryPlan& plan);

}  // namespace mla
