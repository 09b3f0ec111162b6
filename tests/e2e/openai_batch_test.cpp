// The OpenAI batch form from outside: mixed with the simple one, good lines and bad ones.
#include <set>

#include "tests/e2e/process.h"

namespace mla::test::openai_batch_test {
namespace {

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu --quiet ";

std::set<std::string> keys(const Json& object) {
  std::set<std::string> names;
  for (const auto& [name, value] : object.items()) names.insert(name);
  return names;
}

// A line of an output file as readers of OpenAI's batch output take it, with nothing of ours.
struct Answer {
  Json custom_id;
  int status = 0;
  std::string text, finish_reason;  // of status 200
  std::string message, type, code;  // of any other
  std::optional<std::string> param;
  Json logprobs, usage;
};

Answer read_openai_line(const Json& line) {
  INFO(line.dump());
  REQUIRE(keys(line) == std::set<std::string>{"id", "custom_id", "response", "error"});
  CHECK(line.at("id").is_string());
  CHECK(line.at("error").is_null());
  const Json& response = line.at("response");
  REQUIRE(keys(response) == std::set<std::string>{"status_code", "request_id", "body"});
  Answer answer{.custom_id = line.at("custom_id"), .status = response.at("status_code")};
  const Json& body = response.at("body");
  if (answer.status != 200) {
    const Json& error = body.at("error");
    REQUIRE(keys(error) == std::set<std::string>{"message", "type", "param", "code"});
    answer.message = error.at("message");
    answer.type = error.at("type");
    answer.code = error.at("code");
    if (!error.at("param").is_null()) answer.param = error.at("param").get<std::string>();
    return answer;
  }
  CHECK(body.at("id").is_string());
  CHECK(body.at("created").get<int64_t>() > 1600000000);
  CHECK(body.at("model") == "tiny-random");
  REQUIRE(body.at("choices").size() == 1);
  const Json& choice = body.at("choices")[0];
  CHECK(choice.at("index") == 0);
  if (body.at("object") == "chat.completion") {
    CHECK(choice.at("message").at("role") == "assistant");
    answer.text = choice.at("message").at("content");
  } else {
    CHECK(body.at("object") == "text_completion");
    answer.text = choice.at("text");
  }
  answer.finish_reason = choice.at("finish_reason");
  answer.logprobs = choice.at("logprobs");
  answer.usage = body.at("usage");
  return answer;
}

std::string envelope(const std::string& id, const std::string& url, const std::string& body) {
  return R"({"custom_id":")" + id + R"(","method":"POST","url":")" + url + R"(","body":)" + body +
         "}";
}

struct BadKind {
  std::string line;     // ID stands for a new id
  std::string message;  // part of it
  std::string code = "invalid_request";
};

std::vector<BadKind> bad_kinds() {
  const auto both = [](std::vector<BadKind>& kinds, const std::string& fields,
                       const std::string& message, const std::string& code = "invalid_request") {
    const std::string prompt = R"("prompt":"x",)" + fields + "}";
    kinds.push_back({R"({"id":"ID",)" + prompt, message, code});
    kinds.push_back({envelope("ID", "/v1/completions", "{" + prompt), message, code});
  };
  const std::string chat = "/v1/chat/completions", text = "/v1/completions";
  std::vector<BadKind> kinds = {
      {"{not json", "not valid JSON", "invalid_json"},
      {R"({"custom_id":"ID","method":"POST",)", "not valid JSON", "invalid_json"},
      {"[1, 2]", "expected a JSON object"},
      {"{\"prompt\": \"\xff\xfe\"}", "UTF-8", "invalid_utf8"},
      {R"({"prompt":"x","prompt":"y"})", "duplicate key 'prompt'", "invalid_json"},
      {R"({"id":"good 0","prompt":"again"})", "duplicate id", "duplicate_id"},
      {envelope("good 0", text, R"({"prompt":"again"})"), "duplicate id", "duplicate_id"},
      {R"({"id":"ID","max_tokens":3})", "prompt"},
      {R"({"id":"ID","prompt":[1,1024]})", "1024"},
      {R"({"id":"ID","messages":[]})", "messages"},
      {R"({"id":"ID","messages":[{"role":"wizard","content":"x"}]})", "wizard"},
      {envelope("ID", text, R"({"prompt":""})"), "empty"},
      {envelope("ID", text, R"({"prompt":["a","b"]})"), "one prompt", "unsupported"},
      {envelope("ID", text, R"({"prompt":[[1,-1]]})"), "-1"},
      {envelope("ID", text, R"({"messages":[{"role":"user","content":"x"}]})"), "prompt"},
      {envelope("ID", text, "3"), "body"},
      {envelope("ID", "/v1/embeddings", R"({"input":"x"})"), "url"},
      {envelope("ID", chat, R"({"prompt":"x"})"), "messages"},
      {envelope("ID", chat, R"({"messages":[{"role":"tool","content":"x"}]})"), "tool"},
      {envelope("ID", chat, R"({"messages":[{"role":"user","content":[{"type":"audio"}]}]})"),
       "audio", "unsupported"},
      {envelope("ID", chat, R"({"messages":[{"role":"user","content":"x"}],"top_logprobs":2})"),
       "top_logprobs"},
      {R"({"custom_id":"ID","method":"GET","url":"/v1/completions","body":{"prompt":"x"}})",
       "method"},
      {R"({"method":"POST","url":"/v1/completions","body":{"prompt":"x"}})", "custom_id"},
      {R"({"custom_id":"ID","method":"POST","url":"/v1/completions"})", "body"},
  };
  both(kinds, R"("temperature":-1)", "temperature");
  both(kinds, R"("top_p":1.5)", "top_p");
  both(kinds, R"("max_tokens":0)", "max_tokens");
  both(kinds, R"("max_tokens":2,"min_tokens":3)", "min_tokens");
  both(kinds, R"("seed":"one")", "seed");
  both(kinds, R"("stop":[""])", "stop");
  both(kinds, R"("logprobs":21)", "logprobs");
  both(kinds, R"("stream":true)", "stream", "unsupported");
  both(kinds, R"("min_p":2)", "min_p");
  both(kinds, R"("presence_penalty":3)", "presence_penalty");
  both(kinds, R"("frequency_penalty":"high")", "frequency_penalty");
  both(kinds, R"("repetition_penalty":0)", "repetition_penalty");
  both(kinds, R"("logit_bias":{"1024":1})", "logit_bias");
  both(kinds, R"("suffix":"y")", "suffix", "unsupported");
  both(kinds, R"("n":0)", "'n'");
  both(kinds, R"("best_of":3)", "best_of", "unsupported");
  both(kinds, R"("logit_bias":{"5":101})", "logit_bias");
  return kinds;
}

std::string good_line(int i) {
  const std::string id = "good " + std::to_string(i), number = std::to_string(i);
  const std::string sampling = i % 2 ? R"(,"temperature":0.8,"top_p":0.9})"
                                     : R"(,"frequency_penalty":0.5,"logit_bias":{"7":2}})";
  if (i % 3 == 0)
    return R"({"id":")" + id + R"(","max_tokens":2,"prompt":"Bread )" + number + "\"" + sampling;
  if (i % 3 == 1)
    return envelope(id, "/v1/completions",
                    R"({"max_tokens":2,"logprobs":1,"prompt":[5,)" + number + "]" + sampling);
  return envelope(id, "/v1/chat/completions",
                  R"({"max_tokens":2,"logprobs":true,"messages":[{"role":"user","content":")" +
                      number + "\"}]" + sampling);
}

// What does not depend on time, place or neighbours.
Json lasting(Json record) {
  record.erase("index");
  record.erase("timing");
  if (record.contains("custom_id")) {
    Json body = record.at("response").at("body");
    for (const char* key : {"id", "created", "index", "timing"}) body.erase(key);
    return {record.at("custom_id"), body};
  }
  return record;
}

TEST_CASE(
    "A thousand lines of both forms, good and bad, give a thousand records and the good ones are "
    "answered as alone") {
  TempDir dir;
  const std::vector<BadKind> kinds = bad_kinds();
  std::string text, good_text;
  std::vector<const BadKind*> bad_at(1000);  // null: a good line
  int good = 0;
  for (size_t i = 0; i < 1000; ++i) {
    if (i % 5 < 2 || i == 2) {
      const std::string line = good_line(good++) + "\n";
      text += line;
      good_text += line;
      continue;
    }
    bad_at[i] = &kinds[i % kinds.size()];
    std::string line = bad_at[i]->line;
    if (const size_t at = line.find("ID"); at != std::string::npos)
      line.replace(at, 2, "bad " + std::to_string(i));
    text += line + "\n";
  }
  write_text(dir / "p.jsonl", text);
  write_text(dir / "good.jsonl", good_text);
  const ProcessResult result =
      run_program(dir, kModel + "--chunked-prefill --max-num-batched-tokens 32 -o " +
                           (dir / "out") + " " + (dir / "p.jsonl"));
  INFO(result.err);
  CHECK(result.exit_code == 3);
  REQUIRE(run_program(
              dir, kModel + "--max-num-seqs 1 -o " + (dir / "alone") + " " + (dir / "good.jsonl"))
              .exit_code == 0);
  const std::vector<Json> records = read_lines(dir / "out/outputs.jsonl");
  const std::vector<Json> alone = read_lines(dir / "alone/outputs.jsonl");
  REQUIRE(records.size() == 1000);
  REQUIRE(alone.size() == static_cast<size_t>(good));
  size_t next_good = 0, openai_errors = 0;
  for (size_t i = 0; i < records.size(); ++i) {
    const bool openai = records[i].contains("custom_id");
    if (!bad_at[i]) {
      if (openai) CHECK(read_openai_line(records[i]).status == 200);
      CHECK(lasting(records[i]) == lasting(alone[next_good++]));
      continue;
    }
    INFO(bad_at[i]->line << " gave " << records[i].dump());
    const std::string line = "line " + std::to_string(i + 1) + ": ";
    if (has(bad_at[i]->line, "\"custom_id\"")) REQUIRE(openai);
    if (openai) {
      const Answer answer = read_openai_line(records[i]);
      CHECK(answer.status == 400);
      CHECK(answer.type == "invalid_request_error");
      CHECK(answer.code == bad_at[i]->code);
      CHECK(has(answer.message, bad_at[i]->message));
      CHECK(answer.message.starts_with(line));
      ++openai_errors;
    } else {
      CHECK(records[i].at("status") == "error");
      CHECK(records[i].at("error").at("code") == bad_at[i]->code);
      CHECK(has(records[i].at("error").at("message").get<std::string>(), bad_at[i]->message));
      CHECK(records[i].at("line").get<size_t>() == i + 1);
    }
  }
  CHECK(next_good == alone.size());
  CHECK(openai_errors > 200);
  CHECK(openai_errors < 550);
}

TEST_CASE("An OpenAI line is answered with the tokens of the simple form and OpenAI's logprobs") {
  TempDir dir;
  write_text(
      dir / "p.jsonl",
      R"({"id":"s","prompt":"A baker has","max_tokens":6,"logprobs":2})"
      "\n" +
          envelope("t", "/v1/completions",
                   R"({"model":"other","prompt":"A baker has","max_tokens":6,"logprobs":2})") +
          "\n" + R"({"id":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":4})" + "\n" +
          envelope("c", "/v1/chat/completions",
                   R"({"messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]}],)"
                   R"("max_completion_tokens":4,"logprobs":true,"top_logprobs":3})") +
          "\n");
  const ProcessResult result =
      run_program(dir, kModel + "-o " + (dir / "out") + " " + (dir / "p.jsonl"));
  REQUIRE(result.exit_code == 0);
  CHECK(has(result.err, "this model answers for the model 'other' in 1 lines, first in line 2"));
  const std::vector<Json> records = read_lines(dir / "out/outputs.jsonl");
  const auto choice = [&](size_t i) {
    return records[i].at("response").at("body").at("choices")[0];
  };
  CHECK(choice(1).at("token_ids") == records[0].at("token_ids"));
  CHECK(choice(1).at("logprob_hash") == records[0].at("logprob_hash"));
  CHECK(choice(3).at("token_ids") == records[2].at("token_ids"));

  const Answer text = read_openai_line(records[1]);
  CHECK(records[0].at("text") == text.text);
  CHECK(text.finish_reason == "length");
  CHECK(text.usage.at("prompt_tokens") == records[0].at("prompt_tokens"));
  CHECK(text.usage.at("completion_tokens") == 6);
  CHECK(text.usage.at("prompt_tokens_details").at("cached_tokens") == 0);
  for (size_t i = 0; i < 6; ++i) {
    const Json& simple = records[0].at("logprobs")[i];
    CHECK(text.logprobs.at("token_logprobs")[i] == simple.at("logprob"));
    const Json& top = text.logprobs.at("top_logprobs")[i];
    CHECK(top.at(text.logprobs.at("tokens")[i].get<std::string>()) == simple.at("logprob"));
    CHECK(top.size() == 2);
  }
  const Answer chat = read_openai_line(records[3]);
  CHECK(records[2].at("text") == chat.text);
  REQUIRE(chat.logprobs.at("content").size() == 4);
  for (const Json& entry : chat.logprobs.at("content")) {
    CHECK(entry.at("top_logprobs").size() == 3);
    CHECK(entry.at("top_logprobs")[0].at("bytes") == entry.at("bytes"));  // greedy
  }
}

TEST_CASE("Runs of OpenAI lines are compared as others are") {
  TempDir dir;
  std::string text;
  for (int i = 0; i < 12; ++i) text += good_line(i) + "\n";
  write_text(dir / "p.jsonl", text);
  const ProcessResult result =
      run_program(dir, kModel + "--chunked-prefill both --max-num-batched-tokens 8 -o " +
                           (dir / "ab") + " " + (dir / "p.jsonl"));
  CHECK(result.exit_code == 0);
  CHECK(has(result.out, "identical: 12 of 12 requests"));
  const Json report = read_json(dir / "ab/compare.json");
  CHECK(report.at("logprob_identical") == 1.0);
}

}  // namespace
}  // namespace mla::test::openai_batch_test
