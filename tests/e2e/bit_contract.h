// The promise: the tokens and logprob bits of a request do not depend on the mode, the budget, the
// batch, the workspace, the order, preemption, the number of threads, nor on steps that are planned
// ahead or padded.
#pragma once

#include <algorithm>
#include <random>

#include "tests/support/catch.h"
#include "tests/support/runner.h"
#include "tests/support/synthetic.h"

namespace mla::test {

// Prompt lengths around budgets, pages, tiles and the workspace, on both sides.
inline const std::vector<int32_t> kLengths = {1,   2,   3,   15,  16,  17,  18,  31,  32,  33,  34,
                                              63,  64,  65,  66,  95,  96,  97,  127, 128, 129, 130,
                                              191, 192, 193, 250, 251, 252, 255, 256, 257, 300};

// Those of kLengths that the model's positions allow.
inline std::vector<BatchRequest> ragged_requests(const ModelConfig& config) {
  std::mt19937 random(7);
  std::vector<BatchRequest> requests;
  for (size_t i = 0; i < kLengths.size(); ++i) {
    if (kLengths[i] + 12 > config.max_position_embeddings) continue;
    BatchRequest request;
    for (int32_t t = 0; t < kLengths[i]; ++t)
      request.prompt.push_back(
          static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size)));
    SamplingParams& s = request.sampling;
    s.max_tokens = 3 + static_cast<int32_t>(i % 9);
    s.ignore_eos = true;
    if (i % 8 == 7) s.n = 3;
    if (i % 3 == 1) {
      s.temperature = 0.9f;
      s.seed = static_cast<int64_t>(i);
    }
    if (i % 3 == 2) {  // its seed is a hash of its id
      s.temperature = 1.1f;
      s.top_k = 20;
      s.top_p = 0.9f;
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

struct Variant {
  std::string name;
  RunOptions options;
  bool shuffled = false;
};

inline std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const int32_t budget : {16, 17, 64, 251, 4096})
    all.push_back({"on " + std::to_string(budget), {.chunked = true, .budget = budget}});
  all.push_back({"off", {}});
  all.push_back({"off workspace of one tile", {.workspace_tokens = kKeyTile}});
  all.push_back({"on 64 workspace of one tile",
                 {.chunked = true, .budget = 64, .workspace_tokens = kKeyTile}});
  all.push_back({"on 251 batch of 1", {.chunked = true, .budget = 251, .max_seqs = 1}});
  all.push_back({"off shuffled", {}, true});
  all.push_back({"on 17 shuffled", {.chunked = true, .budget = 17}, true});
  // 12 pages: the longest request takes 5.
  all.push_back({"on 64 tiny pool", {.chunked = true, .budget = 64, .kv_pages = 12}, true});
  all.push_back({"off tiny pool", {.kv_pages = 12}, true});
  return all;
}

inline void check_contract(const std::string& checkpoint, DType dtype,
                           BackendKind kind = BackendKind::cpu, int32_t ranks = 1) {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/" + checkpoint), dir.path() + "/m");
  LoadedModel one(dir / "m", dtype, 1, kind, ranks);
  const std::vector<BatchRequest> requests = ragged_requests(one.config);
  std::vector<size_t> shuffled(requests.size());
  for (size_t i = 0; i < shuffled.size(); ++i) shuffled[i] = i;
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(3));

  // Whole prompts, one request at a time, one thread.
  const BatchRun reference = run_requests(one, {.max_seqs = 1, .seed = 5}, requests);
  const auto same = [&](const BatchRun& run, const std::string& name) {
    for (size_t i = 0; i < requests.size(); ++i) {
      INFO(checkpoint << " " << name_of(dtype) << " " << name << " request " << i << " of "
                      << requests[i].prompt.size() << " tokens");
      CHECK(run.choices[i] == reference.choices[i]);
    }
  };
  int64_t preempted = 0;
  bool graphs = false;
  for (Variant& variant : variants()) {
    variant.options.seed = 5;
    // The tiny pool needs a model length that fits it.
    if (variant.options.kv_pages)
      variant.options.max_model_len = static_cast<int32_t>(
          std::min<int64_t>(12 * kPageTokens, one.config.max_position_embeddings));
    const std::vector<size_t> order = variant.shuffled ? shuffled : std::vector<size_t>{};
    const BatchRun run = run_requests(one, variant.options, requests, order);
    same(run, variant.name);
    variant.options.pipelined = true;
    variant.options.graphs = graphs = !graphs;
    // Ranks on a CPU wait for each other a hundred times a step: every other way once more.
    if (graphs || ranks == 1 || kind != BackendKind::cpu)
      same(run_requests(one, variant.options, requests, order),
           variant.name + (graphs ? " pipelined, padded" : " pipelined"));
    if (variant.options.kv_pages) preempted += run.stats.preemptions;
    if (variant.options.chunked && variant.options.budget == 64)
      CHECK(run.stats.prompts_split > 10);
  }
  CHECK(preempted > 0);
  if (kind != BackendKind::cpu) return;
  for (const int threads : {2, 3}) {
    LoadedModel more(dir / "m", dtype, threads, kind, ranks);
    same(run_requests(more, {.chunked = true, .budget = 251, .seed = 5}, requests),
         std::to_string(threads) + " threads on 251");
    same(run_requests(more, {.seed = 5}, requests), std::to_string(threads) + " threads off");
  }
}

}  // namespace mla::test
