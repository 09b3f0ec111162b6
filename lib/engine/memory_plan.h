// Where the device's memory goes: a pure function of config, options and the bytes that a backend
// counts, printed at start, written to run.json and shown by `mla-run plan`.
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

// Of --chunked-prefill.
constexpr const char* mode_name(bool chunked) { return chunked ? "on" : "off"; }

// What the user asks of one run. Absent: the default of the mode and device.
struct EngineOptions {
  bool chunked = false;
  std::optional<int32_t> max_batched_tokens;  // on: 8192; off: max(max_model_len, 16384)
  std::optional<int32_t> max_model_len;       // the config's, lowered to what the KV pool holds
  std::optional<int32_t> workspace_tokens;    // W: max(B, min(max_model_len, 131072)), up to 128
  int32_t max_seqs = 64;
  std::optional<uint64_t> kv_cache_bytes;  // CPU: kDefaultCpuCache; GPU: all that is left
  uint64_t device_bytes = 0;               // of the GPU; 0: a CPU
  double gpu_memory_utilization = 0.92;    // the share of device_bytes that may be used
  bool graphs = false;
  bool stamps = false;  // steps say when they were computed, for a trace
  bool prefix_caching = false;
  int32_t ranks = 1;  // tensor parallelism
  DType dtype = DType::bf16;
};

inline constexpr uint64_t kDefaultCpuCache = uint64_t{4} << 30;
// What CUDA takes beside our allocations: its context with the kernels, and each recorded step.
inline constexpr uint64_t kContextReserve = uint64_t{768} << 20;
inline constexpr uint64_t kGraphReserve = uint64_t{2} << 20;
inline constexpr uint64_t kCommReserve = uint64_t{1} << 30;  // of NCCL, with several ranks

struct MemoryPlan {
  struct Entry {
    std::string name;
    uint64_t bytes;
  };
  std::vector<Entry>
      entries;  // weights, KV blocks, MHA workspace, activations, step plan, RoPE table, and where
                // they are not 0: backend scratch, graphs, CUDA context reserve, NCCL reserve
  StepLimits limits;
  bool chunked = false;
  bool prefix_caching = false;
  std::string note;  // what was lowered and why, or ""

  uint64_t total() const;
  uint64_t kv_tokens() const;  // that the pool holds
  SchedulerOptions scheduler_options() const;
};

// What can be said of the options without a model. Throws UsageError as make_memory_plans() does.
void check(const EngineOptions& options);

// Of runs that share a model, one each: max_model_len and the pool are such that the buffers of
// largest() fit. Device and KV cache are those of the first options. `config`, `weight_bytes` and
// the plans are of one rank, where there are several (rank_config): all have the same.
// `weight_bytes` as the backend stores them. The backend only counts and checks.
// Throws UsageError, naming the numbers: a KV cache too small for one page, a GPU too small, a
// max_model_len beyond the config's or beyond the pool, a size below 1, B below max_model_len in
// off mode; and what the backend's check throws.
std::vector<MemoryPlan> make_memory_plans(const ModelConfig& config,
                                          const std::vector<EngineOptions>& options,
                                          const Backend& backend, uint64_t weight_bytes);

// The limits of a model that serves each plan: the larger of each size.
StepLimits largest(const std::vector<MemoryPlan>& plans);

OrderedJson to_json(const MemoryPlan& plan);
std::string to_text(const MemoryPlan& plan);

}  // namespace mla
