// Penalties, biases and min-p through the engine: by their formulas, and in every way to run them.
#include <cmath>
#include <map>
#include <random>

#include "tests/support/catch.h"
#include "tests/support/devices.h"
#include "tests/support/runner.h"
#include "tests/support/synthetic.h"

namespace mla::test::penalties_test {
namespace {

std::vector<BackendKind> kinds() {
  if (!cuda_absence().empty()) return {BackendKind::cpu};
  return {BackendKind::cpu, BackendKind::cuda};
}

std::vector<BatchRequest> penalised_requests(const ModelConfig& config) {
  std::mt19937 random(17);
  const auto token = [&] {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size));
  };
  std::vector<BatchRequest> requests;
  for (int32_t i = 0; i < 16; ++i) {
    BatchRequest request;
    const int32_t length = i % 4 ? 45 + i : 1 + i * 7;  // most grow into a second page
    for (int32_t t = 0; t < length; ++t) request.prompt.push_back(token());
    SamplingParams& s = request.sampling;
    s.max_tokens = 10 + 2 * i;
    s.ignore_eos = true;
    if (i % 7 == 6) s.n = 2;
    if (i % 2) s.repetition_penalty = 1.0f + 0.05f * static_cast<float>(i);
    if (i % 3) s.frequency_penalty = 0.3f * static_cast<float>(i % 5) - 0.3f;
    if (i % 4) s.presence_penalty = 0.2f * static_cast<float>(i % 3);
    std::map<int32_t, float> bias;
    for (int32_t b = 0; b < i % 6; ++b) bias[token()] = 0.7f * static_cast<float>(b + 1);
    s.logit_bias.assign(bias.begin(), bias.end());
    if (i % 5 == 0) {
      s.min_tokens = 5;
      s.stop_token_ids = {token(), token()};
    }
    if (i % 8 >= 4) {
      s.temperature = 0.8f;
      s.min_p = i % 8 >= 6 ? 0.05f : 0.0f;
      s.top_p = i % 8 == 7 ? 0.9f : 1.0f;
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

// The best token of raw logits by vLLM's documented order: bias and bans, repetition, frequency,
// presence.
int32_t best_by_hand(std::vector<float> logits, const std::vector<int32_t>& prompt,
                     const std::vector<int32_t>& answer, const SamplingParams& s) {
  for (const auto& [token, bias] : s.logit_bias) logits[static_cast<size_t>(token)] += bias;
  if (static_cast<int32_t>(answer.size()) < s.min_tokens)
    for (const int32_t token : s.stop_token_ids) logits[static_cast<size_t>(token)] = -INFINITY;
  std::map<int32_t, int> count, context;
  for (const int32_t token : answer) ++count[token], ++context[token];
  for (const int32_t token : prompt) ++context[token];
  for (const auto& [token, times] : context) {
    float& x = logits[static_cast<size_t>(token)];
    x = x > 0 ? x / s.repetition_penalty : x * s.repetition_penalty;
  }
  for (const auto& [token, times] : count) {
    float& x = logits[static_cast<size_t>(token)];
    x -= s.frequency_penalty * static_cast<float>(times);
    x -= s.presence_penalty;
  }
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

TEST_CASE("Greedy tokens under penalties and biases are the best by the formulas") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir / "m");
  for (const BackendKind kind : kinds()) {
    LoadedModel loaded(dir / "m", DType::bf16, 2, kind);
    const std::vector<BatchRequest> requests = penalised_requests(loaded.config);
    const BatchRun run = run_requests(loaded, {.pipelined = true}, requests);
    const auto vocab = static_cast<size_t>(loaded.config.vocab_size);
    int64_t changed = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto& [prompt, sampling, arrival] = requests[i];
      const std::vector<int32_t>& answer = run.results[i].tokens;
      if (sampling.temperature > 0) continue;
      std::vector<int32_t> ids = prompt;
      ids.insert(ids.end(), answer.begin(), answer.end() - 1);
      const auto length = static_cast<int32_t>(prompt.size());
      LogitsRunner(loaded, {})
          .run(
              ids,
              [&](int32_t position, const float* row) {
                const int32_t at = position - length + 1;
                if (at < 0) return;
                const std::vector<float> logits(row, row + vocab);
                const std::vector<int32_t> before(answer.begin(), answer.begin() + at);
                const int32_t token = answer[static_cast<size_t>(at)];
                INFO("backend " << static_cast<int>(kind) << " request " << i << " token " << at);
                CHECK(token == best_by_hand(logits, prompt, before, sampling));
                changed += token != std::max_element(logits.begin(), logits.end()) - logits.begin();
              },
              length);
    }
    CHECK(changed > 20);
  }
}

TEST_CASE("Requests with penalties are the same in every way to run them") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir / "m");
  for (const BackendKind kind : kinds()) {
    LoadedModel loaded(dir / "m", DType::bf16, 2, kind);
    std::vector<BatchRequest> requests = penalised_requests(loaded.config);
    const BatchRun reference = run_requests(loaded, {.max_seqs = 1, .seed = 3}, requests);
    int64_t preempted = 0;
    for (const bool chunked : {false, true})
      for (const bool pipelined : {false, true})
        for (const int32_t pages : {0, 3}) {
          RunOptions options{.chunked = chunked, .kv_pages = pages, .seed = 3};
          options.pipelined = options.graphs = pipelined;
          if (chunked) options.budget = 33;
          if (pages) options.max_model_len = 192;
          const BatchRun run = run_requests(loaded, options, requests);
          for (size_t i = 0; i < requests.size(); ++i) {
            INFO("backend " << static_cast<int>(kind) << " chunked " << chunked << " pipelined "
                            << pipelined << " pages " << pages << " request " << i);
            CHECK(run.choices[i] == reference.choices[i]);
          }
          preempted += run.stats.preemptions;
        }
    CHECK(preempted > 0);
  }
}

TEST_CASE("A request with penalties that comes while others run is the same as alone") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir / "m");
  LoadedModel loaded(dir / "m", DType::bf16, 2);
  std::vector<BatchRequest> requests = penalised_requests(loaded.config);
  // The first has none; a step of it is on its way when the others come.
  requests[0].sampling = {};
  requests[0].sampling.max_tokens = 60;
  requests[0].sampling.ignore_eos = true;
  const BatchRun reference = run_requests(loaded, {.max_seqs = 1, .seed = 3}, requests);
  for (size_t i = 1; i < requests.size(); ++i) requests[i].arrival = 2 + static_cast<int64_t>(i);
  for (const bool chunked : {false, true}) {
    const RunOptions options{.chunked = chunked, .seed = 3, .pipelined = true};
    const BatchRun run = run_requests(loaded, options, requests);
    for (size_t i = 0; i < requests.size(); ++i) {
      INFO("chunked " << chunked << " request " << i);
      CHECK(run.results[i] == reference.results[i]);
    }
  }
}

// The device has room for the edits of 1,024 tokens here, the whole vocabulary: of three sequences
// that change all of it, one is sampled at a time.
TEST_CASE("More edits than there is room for are sampled in groups") {
  for (const BackendKind kind : kinds()) {
    LoadedModel loaded(source_path("tests/data/tiny-random"), DType::bf16, 2, kind);
    std::vector<BatchRequest> requests;
    for (int32_t i = 0; i < 7; ++i) {
      BatchRequest request;
      for (int32_t t = 0; t <= i; ++t) request.prompt.push_back(t * 5 + i);
      SamplingParams& s = request.sampling;
      s.max_tokens = 9, s.ignore_eos = true, s.logprobs = i % 3;
      for (int32_t id = 0; i % 3 && id < loaded.config.vocab_size; ++id)
        s.logit_bias.emplace_back(id, static_cast<float>((id * 7 + i) % 11) * 0.3f);
      requests.push_back(std::move(request));
    }
    const BatchRun reference = run_requests(loaded, {.max_seqs = 1}, requests);
    for (const bool graphs : {false, true}) {
      const RunOptions options{.max_seqs = 3, .pipelined = graphs, .graphs = graphs};
      const BatchRun run = run_requests(loaded, options, requests);
      for (size_t i = 0; i < requests.size(); ++i) CHECK(run.results[i] == reference.results[i]);
    }
  }
}

}  // namespace
}  // namespace mla::test::penalties_test
