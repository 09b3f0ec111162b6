// Requests with several choices: each is a sequence of its own, with the bits it has anywhere.
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <set>

#include "tests/e2e/child.h"
#include "tests/support/runner.h"
#include "tests/support/synthetic.h"

namespace mla::test::choices_test {
namespace {

std::vector<BatchRequest> requests_of(const ModelConfig& config, int32_t count, int32_t n) {
  std::mt19937 random(5);
  std::vector<BatchRequest> requests;
  for (int32_t i = 0; i < count; ++i) {
    BatchRequest request;
    const auto length = static_cast<int32_t>(20 + random() % 60);
    for (int32_t t = 0; t < length; ++t)
      request.prompt.push_back(
          static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size)));
    SamplingParams& s = request.sampling;
    s.n = n;
    s.temperature = 1;
    s.max_tokens = 12 + i % 7;
    s.ignore_eos = true;
    if (i % 2) s.seed = i;
    if (i % 3 == 0) s.logprobs = 2;
    requests.push_back(std::move(request));
  }
  return requests;
}

struct Fixture {
  TempDir dir;
  std::unique_ptr<LoadedModel> loaded;
  Fixture() {
    write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir / "m");
    loaded = std::make_unique<LoadedModel>(dir / "m", DType::bf16, 2);
  }
};

TEST_CASE("The first of four choices is that of a request for one, and the others are others") {
  Fixture f;
  const auto four = run_requests(*f.loaded, {.seed = 9}, requests_of(f.loaded->config, 10, 4));
  const auto one = run_requests(*f.loaded, {.seed = 9}, requests_of(f.loaded->config, 10, 1));
  for (size_t i = 0; i < four.choices.size(); ++i) {
    INFO("request " << i);
    REQUIRE(four.choices[i].size() == 4);
    REQUIRE(one.choices[i].size() == 1);
    CHECK(four.choices[i][0] == one.choices[i][0]);
    std::set<std::vector<int32_t>> different;
    for (const BatchResult& choice : four.choices[i]) different.insert(choice.tokens);
    CHECK(different.size() == 4);
  }
}

TEST_CASE("Choices have the same bits alone, in a batch, in any order, mode and pool") {
  Fixture f;
  const auto requests = requests_of(f.loaded->config, 12, 5);
  const BatchRun alone = run_requests(*f.loaded, {.max_seqs = 1, .seed = 9}, requests);
  std::vector<size_t> order(requests.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
  int64_t preempted = 0, shared = 0;
  for (const bool chunked : {false, true})
    for (const bool pipelined : {false, true})
      for (const int32_t pages : {0, 5}) {
        RunOptions options{.chunked = chunked, .max_seqs = 23, .kv_pages = pages, .seed = 9};
        options.pipelined = pipelined;
        options.graphs = pipelined;
        options.prefix_caching = chunked != pipelined;
        if (chunked) options.budget = 33;
        if (pages) options.max_model_len = 128;
        for (const auto& places : {std::vector<size_t>{}, order}) {
          const BatchRun run = run_requests(*f.loaded, options, requests, places);
          INFO("chunked " << chunked << " pipelined " << pipelined << " pages " << pages
                          << " in order " << places.empty());
          CHECK(run.choices == alone.choices);
          preempted += run.stats.preemptions;
          if (!options.prefix_caching) shared += run.stats.cached_tokens;
        }
      }
  CHECK(preempted > 0);
  CHECK(shared > 0);  // the prompt of one request is computed once
}

TEST_CASE("Two greedy choices are equal") {
  Fixture f;
  auto requests = requests_of(f.loaded->config, 3, 2);
  for (BatchRequest& request : requests) request.sampling.temperature = 0;
  const BatchRun run = run_requests(*f.loaded, {}, requests);
  for (const auto& choices : run.choices) {
    REQUIRE(choices.size() == 2);
    CHECK(choices[0] == choices[1]);
  }
}

// Makes the embeddings of tokens from `first` on NaN.
void spoil_embeddings(const std::string& path, int32_t first) {
  std::string text = read_file(path);
  uint64_t size = 0;
  std::memcpy(&size, text.data(), sizeof size);
  const Json header = parse_json(std::string_view(text).substr(8, size), "header");
  const Json& tensor = header.at("model.embed_tokens.weight");
  const size_t begin = 8 + size + tensor.at("data_offsets")[0].get<size_t>();
  const size_t end = 8 + size + tensor.at("data_offsets")[1].get<size_t>();
  const size_t row = tensor.at("shape")[1].get<size_t>() * 2;
  const uint16_t nan = 0x7fc0;
  for (size_t at = begin + static_cast<size_t>(first) * row; at < end; at += 2)
    std::memcpy(text.data() + at, &nan, 2);
  write_text(path, text);
}

TEST_CASE("One choice that is not finite makes its request an error and no other") {
  TempDir dir;
  const auto files =
      write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir / "m");
  LoadedModel good(dir / "m", DType::bf16, 1);
  const int32_t bad_from = good.config.vocab_size * 15 / 16;
  spoil_embeddings(dir / "m/" + files.at(0), bad_from);
  LoadedModel loaded(dir / "m", DType::bf16, 1);
  const MemoryPlan plan = plan_for(loaded, {.max_seqs = 7});
  int64_t errors = 0, answers = 0;
  for (const bool pipelined : {false, true}) {
    Model model(loaded.config, loaded.weights, *loaded.backend, plan.limits);
    Engine engine(loaded.config, model, {}, plan, 3, pipelined);
    std::vector<int> records(12);
    const Engine::Sink sink = [&](const Engine::Finished& item) {
      if (const auto* bad = std::get_if<BadLine>(&item)) {
        ++errors;
        ++records.at(static_cast<size_t>(bad->index));
        CHECK(bad->code == error_code::kNotFinite);
        CHECK(bad->message.find(" of choice ") != std::string::npos);
        return;
      }
      const Result& result = std::get<Result>(item);
      ++answers;
      ++records.at(static_cast<size_t>(result.index));
      CHECK(is_finite(result));
      REQUIRE(result.choices.size() == 3);
      for (const Choice& choice : result.choices) {
        CHECK(choice.tokens() == 4);
        for (int i = 0; i < 3; ++i) CHECK(choice.token_ids[static_cast<size_t>(i)] < bad_from);
      }
    };
    for (int i = 0; i < 12; ++i) {
      Request request;
      request.index = i;
      request.id = i;
      request.prompt = std::vector<int32_t>{1, 2, 3 + i};
      request.sampling.n = 3;
      request.sampling.temperature = 1;
      request.sampling.max_tokens = 4;
      request.sampling.ignore_eos = true;
      engine.add(std::move(request), sink);
    }
    while (engine.has_work()) engine.step(sink);
    CHECK(records == std::vector<int>(12, 1));
  }
  CHECK(errors > 2);
  CHECK(answers > 2);
}

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu --quiet ";

std::string lines(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    Json body = {{"prompt", "Bread " + std::to_string(i)},
                 {"n", 1 + i % 4},
                 {"temperature", 1},
                 {"logprobs", i % 3},
                 {"answer", "3"},
                 {"max_tokens", 6}};
    if (i % 5 == 4) {
      body = Json{{"custom_id", "c" + std::to_string(i)},
                  {"method", "POST"},
                  {"url", "/v1/completions"},
                  {"body", body}};
    }
    text += body.dump() + "\n";
  }
  return text;
}

TEST_CASE("Records of several choices are compared, merged and resumed as others are") {
  TempDir dir;
  write_text(dir / "p.jsonl", lines(24));
  const std::string prompts = " " + (dir / "p.jsonl");
  const ProcessResult both =
      run_program(dir, kModel + "--chunked-prefill both --max-num-batched-tokens 8 -o " +
                           (dir / "ab") + prompts);
  INFO(both.err << both.out);
  REQUIRE(both.exit_code == 0);
  CHECK(both.out.find("identical: 24 of 24 requests") != std::string::npos);
  const Json report = read_json(dir / "ab/compare.json");
  CHECK(report.at("a").at("answered") == 24);

  REQUIRE(run_program(dir, kModel + "-o " + (dir / "whole") + prompts).exit_code == 0);
  const std::string whole = without_timing(dir / "whole/outputs.jsonl");
  const auto records = read_lines(dir / "whole/outputs.jsonl");
  int64_t tokens = 0;
  for (size_t i = 0; i < records.size(); ++i) {
    const bool openai = records[i].contains("custom_id");
    const Json& body = openai ? records[i].at("response").at("body") : records[i];
    const size_t n = 1 + i % 4;
    CHECK(body.contains("choices") == (openai || n > 1));
    if (body.contains("choices")) CHECK(body.at("choices").size() == n);
    tokens += openai ? body.at("usage").at("completion_tokens").get<int64_t>()
                     : body.at("completion_tokens").get<int64_t>();
  }
  CHECK(run_json(dir / "whole").at("summary").at("total_output_tokens") == tokens);

  for (const std::string i : {"0", "1", "2"})
    REQUIRE(run_program(dir, kModel + "--shard " + i + "/3 -o " + (dir / ("s" + i)) + prompts)
                .exit_code == 0);
  REQUIRE(run_program(dir, "merge -o " + (dir / "merged") + " " + (dir / "s0") + " " +
                               (dir / "s1") + " " + (dir / "s2"))
              .exit_code == 0);
  CHECK(without_timing(dir / "merged/outputs.jsonl") == whole);

  // What a run leaves that was ended in the middle of a record with choices.
  const std::string all = read_file(dir / "whole/outputs.jsonl");
  size_t at = 0;
  for (int i = 0; i < 6; ++i) at = all.find('\n', at) + 1;
  std::filesystem::rename(dir / "whole/outputs.jsonl", dir / "whole/outputs.jsonl.partial");
  std::filesystem::resize_file(dir / "whole/outputs.jsonl.partial", at + 100);
  REQUIRE(run_program(dir, kModel + "--resume -o " + (dir / "whole") + prompts).exit_code == 0);
  CHECK(without_timing(dir / "whole/outputs.jsonl") == whole);
  CHECK(run_json(dir / "whole").at("counts").at("kept") == 6);
}

TEST_CASE("Prompt logprobs and an echo are the same whatever the number of choices") {
  TempDir dir;
  const auto line = [](const char* id, int n, bool greedy) {
    const Json body = {{"prompt", "A baker has"},
                       {"max_tokens", 4},
                       {"n", n},
                       {"echo", true},
                       {"prompt_logprobs", 2},
                       {"temperature", greedy ? 0 : 1}};
    return Json{{"custom_id", id}, {"method", "POST"}, {"url", "/v1/completions"}, {"body", body}}
               .dump() +
           "\n";
  };
  write_text(dir / "p.jsonl", line("a", 1, true) + line("b", 3, false));
  REQUIRE(run_program(dir, kModel + "-o " + (dir / "o") + " " + (dir / "p.jsonl")).exit_code == 0);
  const auto records = read_lines(dir / "o/outputs.jsonl");
  const Json& one = records[0].at("response").at("body");
  const Json& three = records[1].at("response").at("body");
  CHECK(three.at("prompt_logprobs") == one.at("prompt_logprobs"));
  CHECK(three.at("usage").at("prompt_tokens") == one.at("usage").at("prompt_tokens"));
  CHECK(three.at("usage").at("completion_tokens") == 12);
  for (const Json& choice : three.at("choices"))
    CHECK(choice.at("text").get<std::string>().starts_with("A baker has"));
}

}  // namespace
}  // namespace mla::test::choices_test
