// Prefix caching: the same bits with it and without, in every way to run, and the tokens it saves.
#include <random>

#include "tests/e2e/process.h"
#include "tests/support/devices.h"
#include "tests/support/runner.h"
#include "tests/support/synthetic.h"

namespace mla::test::prefix_caching_test {
namespace {

std::vector<BackendKind> kinds() {
  if (!cuda_absence().empty()) return {BackendKind::cpu};
  return {BackendKind::cpu, BackendKind::cuda};
}

// Prompts of 1 to 330 tokens that part from one of three stories after so many tokens.
std::vector<BatchRequest> alike_requests(const ModelConfig& config) {
  std::mt19937 random(23);
  const auto token = [&] {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size));
  };
  std::vector<std::vector<int32_t>> stories(3);
  for (auto& story : stories)
    for (int t = 0; t < 330; ++t) story.push_back(token());
  std::vector<BatchRequest> requests;
  for (size_t i = 0; i < 21; ++i) {
    BatchRequest request;
    const auto part = std::vector<size_t>{0, 63, 64, 65, 128, 200, 256, 257, 330}[i % 9];
    const std::vector<int32_t>& story = stories[i % 3];
    request.prompt.assign(story.begin(), story.begin() + static_cast<std::ptrdiff_t>(part));
    for (size_t t = 0; t < (i * 11) % 60; ++t) request.prompt.push_back(token());
    if (request.prompt.empty()) request.prompt.push_back(token());
    request.sampling.max_tokens = i % 3 ? 70 : 5;
    request.sampling.ignore_eos = true;
    if (i % 2) request.sampling.temperature = 1.0f;
    requests.push_back(std::move(request));
  }
  return requests;
}

// Whole pages that an earlier prompt begins with too, the last token always left out.
int32_t saved_by_hand(const std::vector<BatchRequest>& requests, size_t i) {
  const std::vector<int32_t>& own = requests[i].prompt;
  size_t best = 0;
  for (size_t j = 0; j < i; ++j) {
    const std::vector<int32_t>& other = requests[j].prompt;
    size_t same = 0;
    while (same < own.size() && same < other.size() && own[same] == other[same]) ++same;
    best = std::max(best, std::min(same, own.size() - 1) / kPageTokens * kPageTokens);
  }
  return static_cast<int32_t>(best);
}

TEST_CASE("Prefix caching changes no bit in any way to run and saves the tokens counted by hand") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir / "m");
  for (const BackendKind kind : kinds()) {
    LoadedModel loaded(dir / "m", DType::bf16, 2, kind);
    const std::vector<BatchRequest> requests = alike_requests(loaded.config);
    const BatchRun reference = run_requests(loaded, {.max_seqs = 1, .seed = 3}, requests);
    const auto same = [&](const BatchRun& run, const std::string& name) {
      for (size_t i = 0; i < requests.size(); ++i) {
        INFO("backend " << static_cast<int>(kind) << " " << name << " request " << i);
        CHECK(run.results[i].tokens == reference.results[i].tokens);
        CHECK(run.results[i].logprob_hash == reference.results[i].logprob_hash);
      }
    };
    RunOptions alone{.max_seqs = 1, .seed = 3};
    alone.prefix_caching = true;
    const BatchRun one_by_one = run_requests(loaded, alone, requests);
    same(one_by_one, "one by one");
    int64_t saved = 0, prompt_tokens = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      INFO("request " << i);
      CHECK(one_by_one.results[i].cached_tokens == saved_by_hand(requests, i));
      saved += one_by_one.results[i].cached_tokens;
      prompt_tokens += static_cast<int64_t>(requests[i].prompt.size());
    }
    CHECK(saved > 500);
    CHECK(one_by_one.stats.cached_tokens == saved);
    CHECK(one_by_one.stats.prefill_tokens == prompt_tokens - saved);

    int64_t preempted = 0;
    for (const bool chunked : {false, true})
      for (const bool pipelined : {false, true})
        for (const int32_t pages : {0, 9}) {
          RunOptions options{.chunked = chunked, .kv_pages = pages, .seed = 3};
          options.prefix_caching = true;
          options.pipelined = options.graphs = pipelined;
          if (chunked) options.budget = 100;
          if (pages) options.max_model_len = 9 * kPageTokens;
          const BatchRun run = run_requests(loaded, options, requests);
          same(run, "chunked " + std::to_string(chunked) + " pipelined " +
                        std::to_string(pipelined) + " pages " + std::to_string(pages));
          CHECK(run.stats.cached_tokens > 300);
          preempted += run.stats.preemptions;
        }
    CHECK(preempted > 0);
  }
}

TEST_CASE(
    "The program says how many tokens of a prompt were cached, and prompt logprobs take none") {
  TempDir dir;
  std::string text;
  for (int i = 0; i < 4; ++i) {
    Json ids = Json::array();
    for (int t = 0; t < 200; ++t) ids.push_back(t < 150 ? 5 + t : i);
    Json line = {{"prompt", ids}, {"max_tokens", 3}};
    if (i == 2) line["prompt_logprobs"] = 0;
    if (i == 3)
      line["n"] = 2;  // the second choice takes the first one's pages and counts no prompt
    text += line.dump() + "\n";
  }
  write_text(dir / "p.jsonl", text);
  const auto run = [&](const std::string& options, const std::string& name) {
    const ProcessResult result =
        run_program(dir, "-m " + source_path("tests/data/tiny-random") + " --device cpu --quiet " +
                             options + " -o " + (dir / name) + " " + (dir / "p.jsonl"));
    INFO(result.err);
    REQUIRE(result.exit_code == 0);
    return read_lines(dir / name + "/outputs.jsonl");
  };
  const auto with = run("--enable-prefix-caching --chunked-prefill on", "with");
  const auto without = run("--no-enable-prefix-caching", "without");
  for (size_t i = 0; i < 4; ++i) {
    CHECK(with[i].at("cached_tokens") == (i == 0 || i == 2 ? 0 : 128));
    CHECK(without[i].at("cached_tokens") == 0);
    const auto same = [&](const Json& a, const Json& b) {
      CHECK(a.at("token_ids") == b.at("token_ids"));
      CHECK(a.at("logprob_hash") == b.at("logprob_hash"));
    };
    if (i < 3) {
      same(with[i], without[i]);
    } else {
      for (size_t c = 0; c < 2; ++c) same(with[i].at("choices")[c], without[i].at("choices")[c]);
    }
  }
  const Json record = read_json(dir / "with/run.json");
  CHECK(record.at("counts").at("cached_tokens") == 256);
  CHECK(read_json(dir / "without/run.json").at("counts").at("cached_tokens") == 0);
  CHECK(record.at("options").at("enable_prefix_caching") == true);
}

}  // namespace
}  // namespace mla::test::prefix_caching_test
