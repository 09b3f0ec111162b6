// Runs a checkpoint in-process for tests: logits of prompts, and whole batches of token-id
// requests.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "lib/engine/engine.h"
#include "lib/model/model.h"
#include "lib/model/tensor_parallel.h"
#include "lib/model/weights.h"
#include "weights_loader/checkpoint.h"

namespace mla::test {

enum class BackendKind : uint8_t { cpu, cuda };

// A checkpoint on a backend; `threads` are those of a rank's CPU backend.
struct LoadedModel {
  LoadedModel(const std::string& dir, DType run_dtype, int threads,
              BackendKind kind = BackendKind::cpu, int32_t ranks = 1);

  // A model of these weights. Several ranks load their weights for each model.
  std::unique_ptr<ModelRunner> make_model(const StepLimits& limits);
  // What it makes several ranks of.
  TensorParallelModel::Options rank_options() const;
  TensorParallelModel::Load rank_load() const;

  ModelConfig config;
  DType dtype;
  int threads;
  BackendKind kind;
  int32_t ranks;
  std::shared_ptr<Checkpoint>
      checkpoint;                    // before the backend, whose threads read it while loading
  std::unique_ptr<Backend> backend;  // of one rank
  ModelWeights weights;              // of a single rank
};

inline constexpr int64_t kMostTokens = 4096;  // of a request where a test does not say

struct RunOptions {
  bool chunked = false;
  int32_t budget = 0;            // 0: the mode's default
  int32_t workspace_tokens = 0;  // 0: default
  int32_t max_seqs = 32;
  int32_t max_model_len = 0;  // 0: kMostTokens, or what the model takes
  int32_t kv_pages = 0;       // 0: plenty
  uint64_t seed = 0;
  bool pipelined = false;
  bool graphs = false;
  bool prefix_caching = false;
};

MemoryPlan plan_for(const LoadedModel& loaded, const RunOptions& options);

// Logits of all positions of one prompt at a time.
class LogitsRunner {
 public:
  LogitsRunner(LoadedModel& loaded, const RunOptions& options);
  // Calls row(position, logits [vocab]) in order. The first `prompt_tokens` ids (0: all) run by the
  // prefill path, the others one a step by the decode path, as if they had been generated.
  void run(const std::vector<int32_t>& ids, const std::function<void(int32_t, const float*)>& row,
           int32_t prompt_tokens = 0);

 private:
  LoadedModel& loaded_;
  MemoryPlan plan_;
  Model model_;
};

// Log-softmax of the logits of all positions of a prompt, [ids.size(), vocab], through the engine's
// view of a model: for one rank and several.
std::vector<float> prompt_logprobs(LoadedModel& loaded, const RunOptions& options,
                                   const std::vector<int32_t>& ids);

struct BatchRequest {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  int64_t arrival = 0;  // in steps; never before those in front of it
};

struct BatchResult {
  std::vector<int32_t> tokens;
  std::string logprob_hash;
  std::string finish_reason;
  std::vector<std::pair<int32_t, float>> top;  // of all tokens, one after the other
  int32_t cached_tokens = 0;
  bool operator==(const BatchResult&) const = default;
};

struct BatchRun {
  std::vector<BatchResult> results;               // by request: of its first choice
  std::vector<std::vector<BatchResult>> choices;  // [requests][n]
  SchedulerStats stats;
};

// Runs the requests through the engine in the given order (all of them when empty). Request i has
// the id i wherever it stands. Throws Error where a request fails.
BatchRun run_requests(LoadedModel& loaded, const RunOptions& options,
                      const std::vector<BatchRequest>& requests,
                      const std::vector<size_t>& order = {});

}  // namespace mla::test
