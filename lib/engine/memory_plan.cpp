#include "lib/engine/memory_plan.h"

#include <algorithm>
#include <limits>

#include "lib/model/graph_sizes.h"

namespace mla {
namespace {

constexpr int32_t kDefaultChunkedBudget = 8192;
constexpr int32_t kDefaultWholeBudget = 16384;
constexpr int32_t kMaxDefaultWorkspace = 131072;
constexpr int64_t kMinDecodeSplits = 16384;  // work for any GPU
constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max() / kPageTokens;
constexpr int32_t kMaxSize = 1 << 28;  // of rows, sequences and workspace: sums stay in 32 bits

void check_size(const char* option, int32_t value) {
  if (value < 1 || value > kMaxSize)
    usage_fail("{}: expected 1 to {}, found {}", option, kMaxSize, value);
}

int32_t round_up(int64_t value, int64_t multiple) {
  return static_cast<int32_t>((value + multiple - 1) / multiple * multiple);
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

void raise(StepLimits& limits, const StepLimits& other) {
  limits.max_rows = std::max(limits.max_rows, other.max_rows);
  limits.max_seqs = std::max(limits.max_seqs, other.max_seqs);
  limits.max_model_len = std::max(limits.max_model_len, other.max_model_len);
  limits.workspace_rows = std::max(limits.workspace_rows, other.workspace_rows);
  limits.num_pages = std::max(limits.num_pages, other.num_pages);
  limits.max_decode_splits = std::max(limits.max_decode_splits, other.max_decode_splits);
  limits.graphs |= other.graphs;
  limits.stamps |= other.stamps;
  limits.ranks = std::max(limits.ranks, other.ranks);
}

// The sizes of one run with a pool of `pages`.
StepLimits choose_limits(const EngineOptions& options, int32_t max_model_len, int64_t pages) {
  StepLimits limits;
  limits.max_model_len = max_model_len;
  limits.max_rows = options.max_batched_tokens.value_or(
      options.chunked ? kDefaultChunkedBudget : std::max(max_model_len, kDefaultWholeBudget));
  limits.max_seqs = std::min(options.max_seqs, limits.max_rows);
  limits.workspace_rows =
      round_up(options.workspace_tokens.value_or(
                   std::max(limits.max_rows, std::min(max_model_len, kMaxDefaultWorkspace))),
               kKeyTile);
  // More pages than the sequences can fill, and the one to spare with which the last of them is
  // admitted, are never used.
  int64_t useful =
      int64_t{limits.max_seqs} * pages_of(max_model_len) + (limits.max_seqs > 1 ? 1 : 0);
  if (options.prefix_caching) useful = kMaxPages;
  limits.num_pages = static_cast<int32_t>(std::min({pages, useful, kMaxPages}));
  limits.max_decode_splits = choose_decode_splits(limits);
  limits.graphs = options.graphs;
  limits.stamps = options.stamps;
  limits.ranks = options.ranks;
  return limits;
}

// Whole prompts need a budget that holds the longest.
void check_budget(const EngineOptions& options, const StepLimits& limits) {
  if (!options.chunked && limits.max_rows < limits.max_model_len)
    usage_fail(
        "--chunked-prefill off runs whole prompts: expected --max-num-batched-tokens of at least "
        "max_model_len {}, found {} (max_num_seqs {}); raise it, lower --max-model-len, or use "
        "--chunked-prefill on",
        limits.max_model_len, limits.max_rows, options.max_seqs);
}

class Planner {
 public:
  Planner(const ModelConfig& config, const std::vector<EngineOptions>& options,
          const Backend& backend, uint64_t weight_bytes)
      : config_(config),
        options_(options),
        first_(options.front()),
        backend_(backend),
        weight_bytes_(weight_bytes),
        page_bytes_(cache_bytes_per_token(config, first_.dtype) * kPageTokens),
        usable_(static_cast<uint64_t>(static_cast<double>(first_.device_bytes) *
                                      first_.gpu_memory_utilization)) {}

  std::vector<MemoryPlan> make() {
    for (const EngineOptions& options : options_) check(options);
    check_wanted_len();
    const auto [len, pages] = pool_is_given() ? given_pool() : pool_that_fits();
    std::vector<MemoryPlan> plans;
    for (const EngineOptions& options : options_) {
      MemoryPlan plan;
      plan.chunked = options.chunked;
      plan.prefix_caching = options.prefix_caching;
      plan.limits = choose_limits(options, len, pages);
      check_budget(options, plan.limits);
      plan.entries = entries(plan.limits);
      plan.note = note_;
      plans.push_back(std::move(plan));
    }
    const StepLimits all = largest(plans);
    backend_.check(model_shape(config_, all));
    const uint64_t total = bytes(all, true);
    if (first_.device_bytes > 0 && total > first_.device_bytes)
      usage_fail("the plan takes {} bytes, {} of them weights and {} KV blocks; the GPU has {}",
                 total, weight_bytes_, static_cast<uint64_t>(all.num_pages) * page_bytes_,
                 first_.device_bytes);
    return plans;
  }

 private:
  struct Pool {
    int32_t max_model_len;
    int64_t pages;
  };

  bool pool_is_given() const { return first_.device_bytes == 0 || first_.kv_cache_bytes; }

  int64_t limit() const {
    return std::min<int64_t>(config_.max_position_embeddings, int64_t{kMaxSize});
  }

  void check_wanted_len() const {
    if (!first_.max_model_len) return;
    const int64_t wanted = *first_.max_model_len;
    if (wanted > config_.max_position_embeddings)
      usage_fail(
          "--max-model-len: expected at most the model's max_position_embeddings {}, found {}",
          config_.max_position_embeddings, wanted);
  }

  Pool given_pool() {
    const uint64_t cache = first_.kv_cache_bytes.value_or(kDefaultCpuCache);
    if (cache < page_bytes_)
      usage_fail("--kv-cache-memory-bytes: expected at least one page of {} bytes, found {}",
                 page_bytes_, cache);
    // Page numbers are 32-bit.
    const auto pages =
        static_cast<int64_t>(std::min<uint64_t>(cache / page_bytes_, uint64_t{kMaxPages}));
    const int64_t tokens = pages * kPageTokens;
    if (first_.max_model_len && *first_.max_model_len > tokens)
      usage_fail(
          "--max-model-len {} does not fit the KV cache, which holds {} tokens; raise "
          "--kv-cache-memory-bytes",
          *first_.max_model_len, tokens);
    if (first_.max_model_len) return {*first_.max_model_len, pages};
    if (config_.max_position_embeddings > tokens)
      note_ = fmt::format("max_model_len lowered from {} to {}: the KV cache holds {} tokens",
                          config_.max_position_embeddings, tokens, tokens);
    return {static_cast<int32_t>(std::min(limit(), tokens)), pages};
  }

  // More the GPU cannot hold.
  int64_t most_pages() const {
    return std::max<int64_t>(1, static_cast<int64_t>(usable_ / page_bytes_));
  }

  // What the rest of the GPU leaves for pages.
  int64_t pages_left(int32_t max_model_len) const {
    StepLimits all;
    for (const EngineOptions& options : options_)
      raise(all, choose_limits(options, max_model_len, most_pages()));
    const uint64_t rest = bytes(all, false);
    return rest >= usable_ ? 0 : static_cast<int64_t>((usable_ - rest) / page_bytes_);
  }
  bool fits(int32_t max_model_len) const {
    return pages_left(max_model_len) >= pages_of(max_model_len);
  }

  Pool pool_that_fits() {
    if (first_.max_model_len) {
      const int32_t wanted = *first_.max_model_len;
      if (!fits(wanted)) fail_to_fit("--max-model-len", wanted);
      return {wanted, pages_left(wanted)};
    }
    auto len = static_cast<int32_t>(limit());
    if (!fits(len)) {
      // The longest that fits, of whole pages: a longer one needs more of everything.
      int64_t good = 0, bad = pages_of(len);
      while (bad - good > 1) {
        const int64_t middle = (good + bad) / 2;
        (fits(static_cast<int32_t>(middle * kPageTokens)) ? good : bad) = middle;
      }
      if (good == 0) fail_to_fit("a max_model_len of", std::min(kPageTokens, len));
      len = static_cast<int32_t>(good * kPageTokens);
      note_ =
          fmt::format("max_model_len lowered from {} to {}: of the GPU's {} bytes {} may be used",
                      config_.max_position_embeddings, len, first_.device_bytes, usable_);
    }
    return {len, pages_left(len)};
  }

  [[noreturn]] void fail_to_fit(const char* what, int32_t len) const {
    StepLimits all;
    for (const EngineOptions& options : options_)
      raise(all, choose_limits(options, len, most_pages()));
    usage_fail(
        "{} {} does not fit the GPU: of its {} bytes {} may be used (--gpu-memory-utilization {}); "
        "weights take {}, the buffers of a step and CUDA {}, and the KV cache needs at least {}; "
        "lower --max-model-len, --max-num-batched-tokens or --max-num-seqs",
        what, len, first_.device_bytes, usable_, first_.gpu_memory_utilization, weight_bytes_,
        bytes(all, false) - weight_bytes_, static_cast<uint64_t>(pages_of(len)) * page_bytes_);
  }

  std::vector<MemoryPlan::Entry> entries(const StepLimits& limits) const {
    Arena step_plan;
    PlanBuffers::carve(step_plan, config_, limits);
    std::vector<MemoryPlan::Entry> all = {
        {"weights", weight_bytes_},
        {kKvBlocks, static_cast<uint64_t>(limits.num_pages) * page_bytes_},
        {"MHA workspace", count_bytes<WorkspaceBuffers>(config_, limits, first_.dtype)},
        {"activations", count_bytes<ActivationBuffers>(config_, limits, first_.dtype)},
        {"step plan", step_plan.used()},
        {"RoPE table", static_cast<uint64_t>(limits.max_model_len) *
                           static_cast<uint64_t>(config_.qk_rope_head_dim) * sizeof(float)},
    };
    const auto add = [&](const char* name, uint64_t size) {
      if (size > 0) all.push_back({name, size});
    };
    add("backend scratch", backend_.scratch_bytes(model_shape(config_, limits)));
    if (first_.device_bytes > 0) {
      const size_t graphs =
          limits.graphs ? graph_sizes(std::min(limits.max_seqs, limits.max_rows)).size() : 0;
      add("graphs", graphs * kGraphReserve);
      add("CUDA context reserve", kContextReserve);
      add("NCCL reserve", limits.ranks > 1 ? kCommReserve : 0);
    }
    return all;
  }

  uint64_t bytes(const StepLimits& limits, bool with_cache) const {
    uint64_t sum = 0;
    for (const MemoryPlan::Entry& entry : entries(limits))
      if (with_cache || entry.name != kKvBlocks) sum += entry.bytes;
    return sum;
  }

  static constexpr const char* kKvBlocks = "KV blocks";

  const ModelConfig& config_;
  const std::vector<EngineOptions>& options_;
  const EngineOptions& first_;
  const Backend& backend_;
  const uint64_t weight_bytes_;
  const uint64_t page_bytes_;
  const uint64_t usable_;
  std::string note_;
};

}  // namespace

void check(const EngineOptions& options) {
  check_size("--max-num-seqs", options.max_seqs);
  if (options.max_batched_tokens)
    check_size("--max-num-batched-tokens", *options.max_batched_tokens);
  if (options.workspace_tokens) check_size("--mla-workspace-tokens", *options.workspace_tokens);
  if (options.max_model_len && *options.max_model_len < 2)
    usage_fail("--max-model-len: expected at least 2, found {}", *options.max_model_len);
  if (!(options.gpu_memory_utilization > 0 && options.gpu_memory_utilization <= 1))
    usage_fail("--gpu-memory-utilization: expected a number in (0, 1], found {}",
               options.gpu_memory_utilization);
}

StepLimits largest(const std::vector<MemoryPlan>& plans) {
  StepLimits limits;
  for (const MemoryPlan& plan : plans) raise(limits, plan.limits);
  return limits;
}

std::vector<MemoryPlan> make_memory_plans(const ModelConfig& config,
                                          const std::vector<EngineOptions>& options,
                                          const Backend& backend, uint64_t weight_bytes) {
  if (options.empty()) fail("memory plan: expected at least one run, found none");
  return Planner(config, options, backend, weight_bytes).make();
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
          .max_decode_splits = limits.max_decode_splits,
          .prefix_caching = prefix_caching};
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
          {"tensor_parallel_size", plan.limits.ranks},
          {"note", plan.note}};
}

std::string to_text(const MemoryPlan& plan) {
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  std::string text = fmt::format(
      "memory plan{}, chunked prefill {}\n",
      plan.limits.ranks > 1 ? fmt::format(" of each of {} ranks", plan.limits.ranks) : "",
      mode_name(plan.chunked));
  const auto line = [&](const std::string& name, uint64_t bytes) {
    text += fmt::format("  {:<20} {:>15} bytes {:>9.3f} GiB\n", name, bytes,
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
