// Command-line options, shared by the subcommands.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "apps/mla_run/device.h"
#include "lib/batch/request.h"
#include "lib/engine/memory_plan.h"

namespace CLI {
class App;
}

namespace mla {

// Exit codes of the program.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFatal = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitSomeFailed = 3;
inline constexpr int kExitThreshold = 4;

// Options that say how the engine is laid out; `run`, `eval`, `bench` and `plan` have them.
struct EngineFlags {
  std::string model;
  std::string chunked = "off";  // on, off, both
  std::optional<int32_t> max_batched_tokens, max_model_len, workspace_tokens;
  std::optional<int32_t> max_seqs;
  std::string kv_cache_bytes;  // "": the device's default
  double gpu_memory_utilization = 0.92;
  std::string device = "auto";
  std::string dtype = "auto";
  std::string load_format = "auto";
  bool enforce_eager = false;
  bool prefix_caching = false;
  int32_t tensor_parallel = 1;  // ranks that share a model
  bool no_custom_all_reduce = false;
  double rank_timeout = 300;  // seconds without a sign of life from a rank
  int32_t data_parallel = 1;  // models, each with its ranks and an engine
  int threads = 0;            // 0: all that the process may use
  std::string trace;          // where a run's steps are written; "": nowhere

  void add_to(CLI::App& app);
  // The modes in the order they run: off, on, or both.
  std::vector<bool> modes() const;
  // Of each mode. With both, --max-num-batched-tokens is for on, and off keeps its default.
  // `device_bytes`: of a GPU.
  std::vector<EngineOptions> engine_options(DeviceKind kind, uint64_t device_bytes,
                                            DType run_dtype) const;
  // --dtype, with auto resolved by the checkpoint's dtype. Throws UsageError: float16 with the
  // reason.
  DType run_dtype(const ModelConfig& config) const;
  // What can be said without a model. Throws UsageError.
  void check() const;
  int run_threads() const;
  bool dummy() const { return load_format == "dummy"; }
  // Devices in all.
  int32_t devices() const { return tensor_parallel * data_parallel; }
  // CPU threads of each.
  int threads_of_each() const { return std::max(1, run_threads() / devices()); }
  static int32_t default_max_seqs(DeviceKind kind);
};

// Defaults for lines that do not set them.
struct SamplingFlags {
  float temperature = 0, top_p = 1, min_p = 0;
  float presence_penalty = 0, frequency_penalty = 0, repetition_penalty = 1;
  int32_t top_k = 0, min_tokens = 0;
  std::optional<int32_t> max_tokens, logprobs, prompt_logprobs;
  int64_t seed = 0;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  bool return_token_ids = false;
  std::string add_bos = "auto", generation_config = "none";

  void add_to(CLI::App& app);
  // With --generation-config auto: what the model's generation_config.json says becomes the value
  // of the options that were not given. Call it after parsing.
  void take_generation_config(const std::string& model_dir);
  // Only how a token is drawn: temperature, top-p, top-k, min-p, penalties, seed.
  void add_draw_to(CLI::App& app, const char* group);
  // Throws UsageError on a value out of range, naming the option. Token ids lie in [0, vocab_size).
  SamplingParams params(int32_t vocab_size) const;

 private:
  void check_draw() const;
  void check(int32_t vocab_size) const;

  CLI::App* app_ = nullptr;
};

// "4096", "4G", "512MiB": bytes, K = 1024. Throws UsageError that names the option.
uint64_t parse_size(const std::string& text, const char* option);

// A line for people, on standard error. A log that cannot be written never ends a run.
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  std::fputs(fmt::format(format, std::forward<Args>(args)...).c_str(), stderr);
}

// `--chunked-prefill` takes the next word only if it is on, off or both;
// `--[no-]enable-chunked-prefill` are the same option; `-tp` is `--tensor-parallel-size`, `-dp`
// `--data-parallel-size`; without a subcommand it is `run`.
std::vector<std::string> normalize_arguments(std::vector<std::string> arguments);

}  // namespace mla
