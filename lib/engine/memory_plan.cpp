#include "lib/engine/memory_plan.h"

#include <algorithm>
#include <limits>

namespace mla {
namespace {

constexpr int32_t kDefaultChunkedBudget = 8192;
constexpr int32_t kDefaultWholeBudget = 16384;
constexpr int32_t kMaxDefaultWorkspace = 131072;
constexpr int64_t kMinDecodeSplits = 16384;  // work for any GPU
constexpr int32_t kMaxSize = 1 << 28;  // of rows, sequences and workspace: sums stay in 32 bits

void check_size(const char* option, int32_t value) {
  if (value < 1 || value > kMaxSize)
    usage_fail("{}: expected 1 to {}, found {}", option, kMaxSize, value);
}

int32_t round_up(int64_t value, int64_t multiple) {
  return static_cast<int32_t>((value + multiple - 1) / multiple * multiple);
}

int32_t choose_max_model_len(const ModelConfig& config, const EngineOptions& options,
                             int64_t kv_tokens, std::string& note) {
  const int64_t limit = config.max_position_embeddings;
  if (options.max_model_len) {
    const int64_t wanted = *options.max_model_len;
    if (wanted < 2) usage_fail("--max-model-len: expected at least 2, found {}", wanted);
    if (wanted > limit)
      usage_fail(
          "--max-model-len: expected at most the model's max_position_embeddings {}, found {}",
          limit, wanted);
    if (wanted > kv_tokens)
      usage_fail(
          "--max-model-len {} does not fit the KV cache, which holds {} tokens; raise "
          "--kv-cache-memory-bytes",
          wanted, kv_tokens);
    return static_cast<int32_t>(wanted);
  }
  if (limit > kv_tokens)
    note = fmt::format("max_model_len lowered from {} to {}: the KV cache holds {} tokens", limit,
                       kv_tokens, kv_tokens);
  return static_cast<int32_t>(std::min({limit, kv_tokens, int64_t{kMaxSize}}));
}

// At least what the longest row has; no more than rows can have.
int32_t choose_decode_splits(const StepLimits& limits) {
  const int64_t longest = decode_splits(limits.max_model_len);
  const int64_t wanted = std::max({4 * longest, 4 * int64_t{limits.max_seqs}, kMinDecodeSplits});
  return static_cast<int32_t>(std::min(wanted, limits.max_rows * longest));
}

template <class Buffers>
uint64_t count_bytes(const ModelConfig& config, const StepLimits& limits, DType dtype) {
  Arena arena;
  Buffers::carve(arena, config, limits, dtype);
  return arena.used();
}

}  // namespace

MemoryPlan make_memory_plan(const ModelConfig& config, const EngineOptions& options,
                            uint64_t weight_bytes) {
  MemoryPlan plan;
  plan.chunked = options.chunked;
  const uint64_t page_bytes = cache_bytes_per_token(config, options.dtype) * kPageTokens;
  const uint64_t pages = options.kv_cache_bytes / page_bytes;
  if (pages < 1)
    usage_fail("--kv-cache-memory-bytes: expected at least one page of {} bytes, found {}",
               page_bytes, options.kv_cache_bytes);
  check_size("--max-num-seqs", options.max_seqs);
  // Page numbers are 32-bit; more pages than the sequences can fill are never used.
  const int64_t kv_tokens = static_cast<int64_t>(std::min<uint64_t>(
                                pages, std::numeric_limits<int32_t>::max() / kPageTokens)) *
                            kPageTokens;

  StepLimits& limits = plan.limits;
  limits.max_model_len = choose_max_model_len(config, options, kv_tokens, plan.note);
  limits.max_rows = options.max_batched_tokens.value_or(
      options.chunked ? kDefaultChunkedBudget
                      : std::max(limits.max_model_len, kDefaultWholeBudget));
  check_size("--max-num-batched-tokens", limits.max_rows);
  if (!options.chunked && limits.max_rows < limits.max_model_len)
    usage_fail(
        "--chunked-prefill off runs whole prompts: expected --max-num-batched-tokens of at least "
        "max_model_len {}, found {} (max_num_seqs {}); raise it, lower --max-model-len, or use "
        "--chunked-prefill on",
        limits.max_model_len, limits.max_rows, options.max_seqs);
  limits.max_seqs = std::min(options.max_seqs, limits.max_rows);
  if (options.workspace_tokens) check_size("--mla-workspace-tokens", *options.workspace_tokens);
  limits.workspace_rows =
      round_up(options.workspace_tokens.value_or(
                   std::max(limits.max_rows, std::min(limits.max_model_len, kMaxDefaultWorkspace))),
               kKeyTile);
  const int64_t useful_pages =
      int64_t{limits.max_seqs} * ((int64_t{limits.max_model_len} + kPageTokens - 1) / kPageTokens);
  limits.num_pages = static_cast<int32_t>(std::min<int64_t>(kv_tokens / kPageTokens, useful_pages));
  limits.max_decode_splits = choose_decode_splits(limits);

  Arena step_plan;
  PlanBuffers::carve(step_plan, limits);
  plan.entries = {
      {"weights", weight_bytes},
      {"KV blocks", static_cast<uint64_t>(limits.num_pages) * page_bytes},
      {"MHA workspace", count_bytes<WorkspaceBuffers>(config, limits, options.dtype)},
      {"activations", count_bytes<ActivationBuffers>(config, limits, options.dtype)},
      {"step plan", step_plan.used()},
      {"RoPE table", static_cast<uint64_t>(limits.max_model_len) *
                         static_cast<uint64_t>(config.qk_rope_head_dim) * sizeof(float)},
  };
  return plan;
}

uint64_t MemoryPlan::total() const {
  uint64_t sum = 0;
  for (const Entry& entry : entries) sum += entry.bytes;
  return sum;
}

uint64_t MemoryPlan::kv_tokens() const {
  return static_cast<uint64_t>(limits.num_pages) * kPageTokens;
}

SchedulerOptions MemoryPlan::scheduler_options() const {
  return {.chunked = chunked,
          .max_batched_tokens = limits.max_rows,
          .max_seqs = limits.max_seqs,
          .max_model_len = limits.max_model_len,
          .workspace_rows = limits.workspace_rows,
          .max_decode_splits = limits.max_decode_splits};
}

OrderedJson to_json(const MemoryPlan& plan) {
  OrderedJson entries = OrderedJson::object();
  for (const auto& entry : plan.entries) entries[entry.name] = entry.bytes;
  return {{"bytes", std::move(entries)},
          {"total_bytes", plan.total()},
          {"kv_pages", plan.limits.num_pages},
          {"kv_tokens", plan.kv_tokens()},
          {"max_model_len", plan.limits.max_model_len},
          {"max_num_batched_tokens", plan.limits.max_rows},
          {"max_num_seqs", plan.limits.max_seqs},
          {"mla_workspace_tokens", plan.limits.workspace_rows},
          {"note", plan.note}};
}

std::string to_text(const MemoryPlan& plan) {
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  std::string text = fmt::format("memory plan, chunked prefill {}\n", plan.chunked ? "on" : "off");
  const auto line = [&](const std::string& name, uint64_t bytes) {
    text += fmt::format("  {:<16} {:>15} bytes {:>9.3f} GiB\n", name, bytes,
                        static_cast<double>(bytes) / kGiB);
  };
  for (const auto& entry : plan.entries) line(entry.name, entry.bytes);
  line("total", plan.total());
  text += fmt::format(
      "  {} KV pages of {} tokens; max_model_len {}, max_num_batched_tokens {}, "
      "max_num_seqs {}, mla_workspace_tokens {}\n",
      plan.limits.num_pages, kPageTokens, plan.limits.max_model_len, plan.limits.max_rows,
      plan.limits.max_seqs, plan.limits.workspace_rows);
  if (!plan.note.empty()) text += "  " + plan.note + "\n";
  return text;
}

}  // namespace mla
