// Log-probabilities of the prompt's tokens.
#include <cmath>

#include "tests/e2e/process.h"
#include "tests/support/forwarding_runner.h"
#include "tests/support/runner.h"
#include "tests/support/synthetic.h"

namespace mla::test::prompt_logprobs_test {
namespace {

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu --quiet ";

std::vector<Json> outputs(const TempDir& dir, const std::string& options, const std::string& name) {
  const ProcessResult result =
      run_program(dir, kModel + options + " -o " + (dir / name) + " " + (dir / "p.jsonl"));
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  return read_lines(dir / name + "/outputs.jsonl");
}

// Prompts of 1 to 254 tokens.
std::string prompts() {
  std::string text;
  for (int i = 0; i < 12; ++i) {
    Json ids = Json::array();
    for (int t = 0; t < 1 + i * i * 2 + i; ++t) ids.push_back((t * 37 + i * 11) % 900);
    text += Json{{"prompt", ids}, {"max_tokens", 40}, {"ignore_eos", true}}.dump() + "\n";
  }
  return text;
}

TEST_CASE("Prompt logprobs are the same bits in every chunk and mode and after preemptions") {
  TempDir dir;
  write_text(dir / "p.jsonl", prompts());
  const auto whole = outputs(dir, "--prompt-logprobs 3", "whole");
  const std::string chunked = "--prompt-logprobs 3 --chunked-prefill on ";
  const auto cut = outputs(dir, chunked + "--max-num-batched-tokens 50", "cut");
  const Json run = read_json(dir / "cut/run.json");
  const int64_t cache_bytes = run.at("memory_plan").at("bytes").at("KV blocks");
  const int64_t page = cache_bytes / run.at("memory_plan").at("kv_pages").get<int64_t>();
  const auto preempted = outputs(
      dir,
      chunked + "--max-num-batched-tokens 100 --max-model-len 320 --kv-cache-memory-bytes " +
          std::to_string(page * 7),
      "preempted");
  const Json counts = read_json(dir / "preempted/run.json").at("counts");
  CHECK(counts.at("preemptions").get<int>() > 0);
  const auto plain = outputs(dir, "", "plain");
  REQUIRE(whole.size() == 12);
  for (size_t i = 0; i < whole.size(); ++i) {
    const Json& list = whole[i].at("prompt_logprobs");
    CHECK(list.size() == whole[i].at("prompt_tokens").get<size_t>());
    CHECK(list[0].is_null());
    for (size_t t = 1; t < list.size(); ++t) {
      CHECK(list[t].at("top").size() == 3);
      CHECK(list[t].at("logprob").get<float>() <= list[t].at("top")[0][1].get<float>());
    }
    CHECK(cut[i].at("prompt_logprobs") == list);
    CHECK(preempted[i].at("prompt_logprobs") == list);
    // Asking for them changes nothing else.
    CHECK_FALSE(plain[i].contains("prompt_logprobs"));
    CHECK(plain[i].at("token_ids") == whole[i].at("token_ids"));
    CHECK(plain[i].at("logprob_hash") == whole[i].at("logprob_hash"));
  }
}

TEST_CASE("A prompt's logprobs are near those of the same tokens when they were generated") {
  TempDir dir;
  const Json prompt = {5, 6, 7, 8, 9};
  const Json line = {{"prompt", prompt}, {"max_tokens", 6}, {"logprobs", 0}};
  write_text(dir / "p.jsonl", line.dump() + "\n");
  const Json generated = outputs(dir, "--ignore-eos", "a")[0].at("logprobs");
  Json longer = prompt;
  for (const Json& entry : generated) longer.push_back(entry.at("token_id"));
  const Json body = {{"prompt", longer}, {"prompt_logprobs", 0}, {"max_tokens", 1}};
  const Json openai = {
      {"custom_id", "c"}, {"method", "POST"}, {"url", "/v1/completions"}, {"body", body}};
  write_text(dir / "p.jsonl", openai.dump() + "\n");
  const Json record = outputs(dir, "", "b")[0];
  const Json& list = record.at("response").at("body").at("prompt_logprobs");
  REQUIRE(list.size() == 11);
  for (size_t i = 0; i < 6; ++i) {
    const Json& entry = list[5 + i];
    CHECK(entry.at("token_id") == generated[i].at("token_id"));
    CHECK(entry.at("top").empty());
    const double found = entry.at("logprob"), expected = generated[i].at("logprob");
    CHECK(std::fabs(found - expected) < 0.05);
  }
}

Json completion(const std::string& id, const Json& prompt, Json fields) {
  fields["prompt"] = prompt;
  if (!fields.contains("max_tokens")) fields["max_tokens"] = 4;
  fields["ignore_eos"] = true;
  return {{"custom_id", id}, {"method", "POST"}, {"url", "/v1/completions"}, {"body", fields}};
}

// That tokens begin in the text where text_offset says, but for those that have no text of their
// own: special ones and parts of characters.
void check_offsets(const Json& choice) {
  const auto text = choice.at("text").get<std::string>();
  std::vector<size_t> starts;  // of characters, in bytes
  for (size_t at = 0; at < text.size(); ++at)
    if ((static_cast<uint8_t>(text[at]) & 0xc0) != 0x80) starts.push_back(at);
  starts.push_back(text.size());
  const Json& tokens = choice.at("logprobs").at("tokens");
  const Json& offsets = choice.at("logprobs").at("text_offset");
  REQUIRE(offsets.size() == tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto token = tokens[i].get<std::string>();
    if (token.starts_with("bytes:") || token.starts_with("<｜")) continue;
    INFO("token " << i << " of " << choice.dump());
    CHECK(text.compare(starts.at(offsets[i].get<size_t>()), token.size(), token) == 0);
  }
}

TEST_CASE("text_offset is a place in the text where generated bytes are no UTF-8") {
  TempDir dir;
  // The bytes a9, e2, 82, f0, 80 and c3, each a token of its own, an x and a special token.
  Json bias = Json::object();
  for (const int token : {102, 158, 224, 172, 222, 127, 87, 1000})
    bias[std::to_string(token)] = 100;
  std::string lines;
  for (int i = 0; i < 6; ++i)
    lines += completion(std::to_string(i), {70 + i, 102, 87},
                        {{"max_tokens", 80},
                         {"logprobs", 0},
                         {"temperature", 5},
                         {"logit_bias", bias},
                         {"echo", i > 2}})
                 .dump() +
             "\n";
  write_text(dir / "p.jsonl", lines);
  size_t broken = 0;
  for (const Json& record : outputs(dir, "", "o")) {
    const Json& choice = record.at("response").at("body").at("choices")[0];
    broken += has(choice.at("text").get<std::string>(), "\xef\xbf\xbd");
    check_offsets(choice);
  }
  CHECK(broken == 6);
}

TEST_CASE("An echo with logprobs puts the prompt's in front, as prompt_logprobs says them") {
  TempDir dir;
  const Json ids = {70, 71, 72};
  const std::vector<std::pair<Json, Json>> requests = {
      {"A baker has 3 trays.", {{"echo", true}, {"logprobs", 2}, {"n", 2}, {"temperature", 1}}},
      {"A baker has 3 trays.", {{"prompt_logprobs", 4}, {"echo", true}, {"logprobs", 2}}},
      {"A baker has 3 trays.", {{"prompt_logprobs", 4}, {"logprobs", 2}}},
      {ids, {{"echo", true}, {"logprobs", 0}, {"prompt_logprobs", 1}}},
      {{70}, {{"echo", true}, {"logprobs", 1}}},
      {"A baker has 3 trays.", {{"echo", true}, {"logprobs", 2}, {"max_tokens", 0}}}};
  std::string text;
  for (const auto& [prompt, fields] : requests)
    text += completion(std::to_string(text.size()), prompt, fields).dump() + "\n";
  write_text(dir / "p.jsonl", text);
  for (const std::string options :
       {"", "--add-bos always ", "--chunked-prefill on --max-num-batched-tokens 3 ",
        "--enable-prefix-caching "}) {
    const auto records = outputs(dir, options + "--overwrite", "o");
    const auto body = [&](size_t i) { return records[i].at("response").at("body"); };
    const Json list = body(2).at("prompt_logprobs");
    const size_t prompt_tokens = list.size();
    CHECK(body(1).at("prompt_logprobs") == list);
    CHECK_FALSE(body(0).contains("prompt_logprobs"));
    const Json plain = body(2).at("choices")[0].at("logprobs");
    for (const auto& [record, choice] : {std::pair{0, 0}, {0, 1}, {1, 0}}) {
      const Json found =
          body(static_cast<size_t>(record)).at("choices")[static_cast<size_t>(choice)];
      INFO(options << record << " " << choice << ": " << found.dump());
      const Json& logprobs = found.at("logprobs");
      for (const char* key : {"tokens", "token_logprobs", "top_logprobs", "text_offset"})
        REQUIRE(logprobs.at(key).size() == prompt_tokens + 4);
      CHECK(logprobs.at("token_logprobs")[0].is_null());
      CHECK(logprobs.at("top_logprobs")[0].is_null());
      CHECK(logprobs.at("text_offset")[0] == 0);
      for (size_t t = 1; t < prompt_tokens; ++t) {
        CHECK(logprobs.at("token_logprobs")[t] == list[t].at("logprob"));
        CHECK(logprobs.at("top_logprobs")[t].size() <= 3);
        CHECK(logprobs.at("top_logprobs")[t].size() >= 2);
      }
      check_offsets(found);
      if (record == 0) continue;
      for (size_t t = 0; t < 4; ++t)
        CHECK(logprobs.at("token_logprobs")[prompt_tokens + t] == plain.at("token_logprobs")[t]);
    }
    const Json of_ids = body(3).at("choices")[0];
    CHECK(of_ids.at("logprobs").at("tokens").size() == 7);
    CHECK(of_ids.at("logprobs").at("top_logprobs")[1].size() == 1);
    CHECK(body(3).at("prompt_logprobs")[1].at("top").size() == 1);
    check_offsets(of_ids);
    CHECK(body(4).at("choices")[0].at("logprobs").at("tokens").size() == 5);
    // Nothing is generated: the prompt is scored.
    const Json scored = body(5).at("choices")[0], whole = body(1).at("choices")[0];
    CHECK(scored.at("text") == "A baker has 3 trays.");
    CHECK(scored.at("finish_reason") == "length");
    CHECK(scored.at("token_ids").empty());
    CHECK(body(5).at("usage").at("completion_tokens") == 0);
    const Json& scores = scored.at("logprobs").at("token_logprobs");
    REQUIRE(scores.size() == prompt_tokens);
    for (size_t t = 0; t < prompt_tokens; ++t)
      CHECK(scores[t] == whole.at("logprobs").at("token_logprobs")[t]);
  }
}

class NeverFinite : public ForwardingRunner {
 public:
  using ForwardingRunner::ForwardingRunner;
  StepOutput collect() override {
    StepOutput out = ForwardingRunner::collect();
    for (int32_t& token : out.tokens) token = -1;
    return out;
  }
};

TEST_CASE("A prompt that is only scored does not need the logits of the token behind it") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_plain"), dir.path() + "/m");
  LoadedModel loaded(dir / "m", DType::f32, 1);
  const MemoryPlan plan = plan_for(loaded, {.max_seqs = 4});
  Model model(loaded.config, loaded.weights, *loaded.backend, plan.limits);
  NeverFinite never(model);
  for (const bool pipelined : {false, true}) {
    Engine engine(loaded.config, never, {}, plan, 0, pipelined);
    int scored = 0, failed = 0;
    const Engine::Sink sink = [&](const Engine::Finished& item) {
      if (const auto* bad = std::get_if<BadLine>(&item)) {
        CHECK(bad->index == 1);
        CHECK(bad->code == error_code::kNotFinite);
        ++failed;
        return;
      }
      const Result& result = std::get<Result>(item);
      CHECK(result.index == 0);
      CHECK(result.choices.front().tokens() == 0);
      REQUIRE(result.echoed);
      CHECK(result.echoed->logprobs.size() == 2);
      CHECK(is_finite(result));
      ++scored;
    };
    for (const int32_t max_tokens : {0, 1}) {
      Request request;
      request.index = max_tokens;
      request.id = max_tokens;
      request.prompt = std::vector<int32_t>{5, 6, 7};
      request.sampling.echo = true;
      request.sampling.logprobs = 1;
      request.sampling.max_tokens = max_tokens;
      engine.add(std::move(request), sink);
    }
    while (engine.has_work()) engine.step(sink);
    CHECK(scored == 1);
    CHECK(failed == 1);
  }
}

}  // namespace
}  // namespace mla::test::prompt_logprobs_test
