// Records in OpenAI's form, and the reader that takes both forms.
#include "lib/batch/openai.h"

#include <cmath>
#include <fstream>
#include <limits>

#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "lib/eval/run_reader.h"
#include "lib/text/utf8.h"
#include "tests/support/catch.h"

namespace mla::openai_record_test {
namespace {

Result sample(Form form) {
  Result r;
  r.index = 3;
  r.line = 5;
  r.form = form;
  r.id = "q1";
  r.model = "Lite";
  r.prompt_tokens = 7;
  r.cached_tokens = 2;
  r.created = 1700000000;
  Choice& choice = r.choices.front();
  choice.text = "hé";
  choice.token_ids = {10, 11, 1};
  choice.finish_reason = "stop";
  for (const float x : {-0.5f, -1.25f, -0.75f}) choice.logprob_hash.add(x);
  choice.timing.arrive(100);
  choice.timing.schedule(101);
  for (const double ms : {111, 113, 117}) choice.timing.token(ms);
  choice.timing.prefill_chunks = 2;
  return r;
}

// "h", the two bytes of "é" in two tokens.
void add_logprobs(Result& r) {
  r.choices[0].token_ids = {10, 11, 12};
  r.token_bytes = {{10, "h"}, {11, "\xc3"}, {12, "\xa9"}, {20, "x"}};
  r.choices[0].logprobs =
      std::vector<TokenLogprob>{{.token = 10, .logprob = -0.5f, .top = {{10, -0.5f}, {20, -1.5f}}},
                                {.token = 11, .logprob = -1.25f, .top = {{20, -0.25f}}},
                                {.token = 12, .logprob = -0.75f, .top = {}}};
}

std::string timing() {
  return R"("timing":{"queue":1.0,"prefill":10.0,"ttft":11.0,"tpot":3.0,"e2e":17.0,)"
         R"("itl":{"mean":3.0,"p50":3.0,"p99":3.98,"max":4.0},"prefill_chunks":2})";
}

TEST_CASE("a completion is answered as OpenAI's batch output has it") {
  Result r = sample(Form::completion);
  CHECK(
      dump_line(to_json(r)) ==
      "{\"id\":\"batch_req_3\",\"custom_id\":\"q1\",\"response\":{\"status_code\":200,"
      "\"request_id\":\"req_3\",\"body\":{\"id\":\"cmpl-3\",\"object\":\"text_completion\","
      "\"created\":1700000000,\"model\":\"Lite\",\"choices\":[{\"index\":0,\"text\":\"h\xc3\xa9\","
      "\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":[10,11,1],"
      "\"logprob_hash\":\"" +
          r.choices[0].logprob_hash.hex() +
          "\"}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\"total_tokens\":10,"
          "\"prompt_tokens_details\":{\"cached_tokens\":2}},\"index\":3," +
          timing() + "}},\"error\":null}");
}

TEST_CASE("several choices have their places and times and the usage is their sum") {
  for (const Form form : {Form::completion, Form::chat}) {
    Result r = sample(form);
    r.choices.push_back(r.choices[0]);
    r.choices[1].text = "x";
    r.choices[1].token_ids = {12};
    r.choices[1].finish_reason = "length";
    const OrderedJson record = to_json(r);
    const OrderedJson& body = record["response"]["body"];
    REQUIRE(body["choices"].size() == 2);
    CHECK_FALSE(body.contains("timing"));
    for (size_t i = 0; i < 2; ++i) {
      const OrderedJson& choice = body["choices"][i];
      CHECK(choice["index"] == i);
      CHECK("\"timing\":" + choice["timing"].dump() == timing());
      CHECK(choice["token_ids"].size() == (i == 0 ? 3u : 1u));
      CHECK(choice["finish_reason"] == (i == 0 ? "stop" : "length"));
      CHECK((form == Form::chat ? choice["message"]["content"] : choice["text"]) ==
            (i == 0 ? "hé" : "x"));
    }
    CHECK(body["usage"].dump() == R"({"prompt_tokens":7,"completion_tokens":4,"total_tokens":11,)"
                                  R"("prompt_tokens_details":{"cached_tokens":2}})");
  }
}

TEST_CASE("a chat is answered with a message") {
  Result r = sample(Form::chat);
  r.answer = "4";
  const OrderedJson record = to_json(r);
  const OrderedJson& body = record["response"]["body"];
  CHECK(body["id"] == "chatcmpl-3");
  CHECK(body["object"] == "chat.completion");
  CHECK(body["answer"] == "4");
  CHECK(body["choices"][0]["message"].dump() ==
        "{\"role\":\"assistant\",\"content\":\"h\xc3\xa9\",\"refusal\":null}");
  CHECK(body["choices"][0]["logprobs"].is_null());
}

TEST_CASE("logprobs of a completion are four lists and the chosen token always has its place") {
  Result r = sample(Form::completion);
  add_logprobs(r);
  const OrderedJson record = to_json(r);
  CHECK(record["response"]["body"]["choices"][0]["logprobs"].dump() ==
        R"({"text_offset":[0,1,2],"token_logprobs":[-0.5,-1.25,-0.75],)"
        R"("tokens":["h","bytes:\\xc3","bytes:\\xa9"],"top_logprobs":[{"h":-0.5,"x":-1.5},)"
        R"({"x":-0.25,"bytes:\\xc3":-1.25},{"bytes:\\xa9":-0.75}]})");
  r.token_bytes.clear();  // no tokenizer
  const OrderedJson bare = to_json(r);
  CHECK(bare["response"]["body"]["choices"][0]["logprobs"]["tokens"][1] == "token_id:11");
}

TEST_CASE("with an echo the logprobs of a completion begin with the prompt's") {
  Result r = sample(Form::completion);
  add_logprobs(r);
  r.token_bytes[30] = "<s>";
  r.token_bytes[31] = "äb";
  // A BOS that the text has not, "äb", "x".
  r.echoed = EchoedPrompt{.token_ids = {30, 31, 20},
                          .pieces = {"", "äb", "x"},
                          .logprobs = {{.token = 31, .logprob = -3.0f, .top = {{10, -1.0f}}},
                                       {.token = 20, .logprob = -0.25f, .top = {{20, -0.25f}}}}};
  const OrderedJson record = to_json(r);
  CHECK(record["response"]["body"]["choices"][0]["logprobs"].dump() ==
        R"({"text_offset":[0,0,2,3,4,5],"token_logprobs":[null,-3.0,-0.25,-0.5,-1.25,-0.75],)"
        R"("tokens":["<s>","äb","x","h","bytes:\\xc3","bytes:\\xa9"],)"
        R"("top_logprobs":[null,{"h":-1.0,"äb":-3.0},{"x":-0.25},{"h":-0.5,"x":-1.5},)"
        R"({"x":-0.25,"bytes:\\xc3":-1.25},{"bytes:\\xa9":-0.75}]})");
  CHECK_FALSE(record["response"]["body"].contains("prompt_logprobs"));
  r.echoed->logprobs[0].logprob = std::numeric_limits<float>::quiet_NaN();
  CHECK_FALSE(is_finite(r));
  CHECK_THROWS_AS(to_json(r), Error);
}

TEST_CASE("text_offset is a place in the record's text where bytes are no UTF-8") {
  // Each replaced by U+FFFD: a continuation byte alone, a character cut short in front of another
  // one, two bytes that begin none; then "é" in two tokens, a special token, and "x".
  const std::vector<std::string> pieces = {"h",    "\xa9", "\xe2\x82", "x", "\xf0\x80",
                                           "\xc3", "\xa9", "<s>",      "x"};
  Result r = sample(Form::completion);
  Choice& choice = r.choices[0];
  choice.token_ids.clear();
  choice.logprobs.emplace();
  std::string bytes, text;
  for (const std::string& piece : pieces) {
    const auto token = static_cast<int32_t>(40 + choice.token_ids.size());
    r.token_bytes[token] = piece;
    choice.token_ids.push_back(token);
    choice.logprobs->push_back({.token = token, .logprob = -1, .top = {}});
    if (piece == "<s>") r.without_text.insert(token);
    if (piece != "<s>") bytes += piece;
  }
  append_utf8_lossy(bytes, true, text);
  choice.text = text;
  const OrderedJson record = to_json(r);
  const auto lists = [](const OrderedJson& j) {
    return j["response"]["body"]["choices"][0]["logprobs"]["text_offset"];
  };
  CHECK(lists(record).dump() == "[0,1,2,3,4,6,7,7,7]");
  CHECK(text == "h\xef\xbf\xbd\xef\xbf\xbdx\xef\xbf\xbd\xef\xbf\xbd\xc3\xa9x");
  // The prompt's text, whose last character is cut short, is whole in front of the choice's.
  r.echoed = EchoedPrompt{.token_ids = {40, 42}, .pieces = {"h", "\xe2\x82"}, .logprobs = {{}}};
  CHECK(lists(to_json(r)).dump() == "[0,1,2,3,4,5,6,8,9,9,9]");
}

TEST_CASE("logprobs of a chat have the bytes of each token") {
  Result r = sample(Form::chat);
  add_logprobs(r);
  const OrderedJson record = to_json(r);
  const OrderedJson& logprobs = record["response"]["body"]["choices"][0]["logprobs"];
  CHECK(logprobs["refusal"].is_null());
  CHECK(logprobs["content"][0].dump() ==
        R"({"token":"h","logprob":-0.5,"bytes":[104],"top_logprobs":[{"token":"h","logprob":-0.5,)"
        R"("bytes":[104]},{"token":"x","logprob":-1.5,"bytes":[120]}]})");
  CHECK(logprobs["content"][1]["bytes"].dump() == "[195]");
  CHECK(logprobs["content"][2]["top_logprobs"].dump() == "[]");
}

TEST_CASE("NaN is never printed in OpenAI's form") {
  Result r = sample(Form::completion);
  add_logprobs(r);
  r.choices[0].logprobs->at(1).top[0].second = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_AS(to_json(r), Error);
}

TEST_CASE("a failure has status 400 and OpenAI's error object") {
  const BadLine bad{.index = 2,
                    .line = 4,
                    .openai = true,
                    .id = "c",
                    .code = "invalid_request",
                    .message = "line 4: body: field 'top_p': expected x, found y"};
  CHECK(dump_line(to_json(bad)) ==
        R"({"id":"batch_req_2","custom_id":"c","response":{"status_code":400,"request_id":"req_2",)"
        R"("body":{"error":{"message":"line 4: body: field 'top_p': expected x, found y",)"
        R"("type":"invalid_request_error","param":"top_p","code":"invalid_request"},"index":2,)"
        R"("line":4}},"error":null})");
  const BadLine other{.openai = true, .code = "invalid_json", .message = "line 4: no field"};
  CHECK(to_json(other)["response"]["body"]["error"]["param"].is_null());
}

TEST_CASE("index and success can be read from records of both forms") {
  const auto json = [](const auto& item) { return parse_json(dump_line(to_json(item)), "record"); };
  for (const Form form : {Form::simple, Form::completion, Form::chat}) {
    const Json ok = json(sample(form));
    CHECK(is_openai_record(ok) == (form != Form::simple));
    CHECK(record_index(ok, "record") == 3);
    CHECK(record_ok(ok, "record"));
    const BadLine bad{.index = 8, .openai = form != Form::simple, .code = "c", .message = "m"};
    CHECK(record_index(json(bad), "record") == 8);
    CHECK_FALSE(record_ok(json(bad), "record"));
  }
  CHECK_THROWS_AS(record_ok(Json{{"status", "perhaps"}}, "record"), Error);
  CHECK_THROWS_AS(record_index(Json{{"custom_id", "c"}}, "record"), Error);
}

TEST_CASE("the run reader reads the same from both forms") {
  test::TempDir dir;
  OutputWriter out({.dir = dir / "run", .input_path = ""});
  int64_t index = 0;
  for (const Form form : {Form::simple, Form::completion, Form::chat}) {
    Result r = sample(form);
    add_logprobs(r);
    r.answer = "4";
    r.index = index++;
    r.id = fmt::format("q{}", r.index);
    out.write(r.index, to_json(r));
  }
  BadLine bad{.index = index, .line = 9, .openai = true, .code = "invalid_json", .message = "m"};
  out.write(bad.index, to_json(bad));
  out.finish();

  RunReader reader(dir / "run");
  for (int i = 0; i < 3; ++i) {
    const auto record = reader.next();
    REQUIRE(record);
    CHECK(record->ok);
    CHECK(record->key == fmt::format("\"q{}\"", i));
    REQUIRE(record->choices.size() == 1);
    const OutputChoice& choice = record->choices[0];
    CHECK(choice.text == "hé");
    CHECK(choice.token_ids == std::vector<int32_t>{10, 11, 12});
    CHECK(choice.logprob_hash == sample(Form::simple).choices[0].logprob_hash.hex());
    CHECK(record->answer == "4");
    CHECK(record->prompt_tokens == 7);
    CHECK(choice.prefill_chunks == 2);
    CHECK(choice.logprobs == std::vector<float>{-0.5f, -1.25f, -0.75f});
    REQUIRE(choice.margins.size() == 3);
    CHECK(choice.margins[0] == 1.0);
    CHECK_FALSE(choice.margins[1]);  // one best token and the chosen one
    CHECK_FALSE(choice.margins[2]);
  }
  const auto error = reader.next();
  REQUIRE(error);
  CHECK_FALSE(error->ok);
  CHECK(error->error_code == "invalid_json");
  CHECK(error->key == "line 9");
  CHECK_FALSE(reader.next());
}

TEST_CASE("the run reader reads every choice of each form") {
  test::TempDir dir;
  OutputWriter out({.dir = dir / "run", .input_path = ""});
  int64_t index = 0;
  for (const Form form : {Form::simple, Form::completion, Form::chat}) {
    Result r = sample(form);
    add_logprobs(r);
    r.answer = "4";
    r.index = index++;
    r.id = r.index;
    r.choices.push_back(r.choices[0]);
    r.choices[1].text = "other";
    r.choices[1].token_ids = {11};
    r.choices[1].logprobs->erase(r.choices[1].logprobs->begin());
    r.choices[1].logprobs->pop_back();
    r.choices[1].timing.prefill_chunks = 3;
    out.write(r.index, to_json(r));
  }
  out.finish();
  RunReader reader(dir / "run");
  while (const auto record = reader.next()) {
    INFO(record->id.dump());
    CHECK(record->prompt_tokens == 7);
    CHECK(record->answer == "4");
    REQUIRE(record->choices.size() == 2);
    CHECK(record->choices[0].text == "hé");
    CHECK(record->choices[0].logprobs.size() == 3);
    CHECK(record->choices[0].prefill_chunks == 2);
    CHECK(record->choices[1].text == "other");
    CHECK(record->choices[1].token_ids == std::vector<int32_t>{11});
    CHECK(record->choices[1].logprobs == std::vector<float>{-1.25f});
    CHECK(record->choices[1].prefill_chunks == 3);
    --index;
  }
  CHECK(index == 0);
}

TEST_CASE("the run reader leaves the echoed prompt's logprobs out") {
  test::TempDir dir;
  Result r = sample(Form::completion);
  add_logprobs(r);
  r.prompt_tokens = 2;
  r.echoed = EchoedPrompt{.token_ids = {30, 31},
                          .pieces = {"h", "x"},
                          .logprobs = {{.token = 31, .logprob = -3.0f, .top = {{10, -1.0f}}}}};
  std::ofstream(dir / "o.jsonl") << dump_line(to_json(r)) << "\n";
  const auto record = RunReader(dir / "o.jsonl").next();
  REQUIRE(record);
  CHECK(record->choices.at(0).logprobs == std::vector<float>{-0.5f, -1.25f, -0.75f});
  CHECK(record->choices.at(0).margins.at(0) == 1.0);
  Json other = parse_json(dump_line(to_json(r)), "record");
  other["response"]["body"]["usage"]["prompt_tokens"] = 3;
  std::ofstream(dir / "p.jsonl") << other.dump() << "\n";
  CHECK_THROWS_AS(RunReader(dir / "p.jsonl").next(), Error);
}

TEST_CASE("a list of choices that is none or out of order is refused") {
  test::TempDir dir;
  const auto error = [&](const std::string& choices) {
    std::ofstream(dir / "o.jsonl")
        << (R"({"id":1,"index":0,"status":"ok","prompt_tokens":1,"choices":)" + choices + "}\n");
    try {
      RunReader(dir / "o.jsonl").next();
    } catch (const Error& e) {
      return std::string(e.what()).substr(dir.path().size());
    }
    return std::string("no error");
  };
  const std::string choice = R"("token_ids":[5],"logprob_hash":"00","text":"x"})";
  CHECK(error("["
              R"({"index":0,)" +
              choice + "]") == "no error");
  CHECK(error("[]") == "/o.jsonl:1: field 'choices': expected a list of at least one choice");
  CHECK(error("3") == "/o.jsonl:1: field 'choices': expected a list of at least one choice");
  CHECK(error("[3]") == "/o.jsonl:1: choice 0: expected an object, found the number 3");
  CHECK(error("["
              R"({"index":1,)" +
              choice + "]") == "/o.jsonl:1: choice 0: field 'index': expected 0, found 1");
  CHECK(error("["
              R"({"index":0,)" +
              choice + R"(,{"index":1,"token_ids":[-1]}])") ==
        "/o.jsonl:1: choice 1: field 'token_ids': expected token ids, found the number -1");
}

}  // namespace
}  // namespace mla::openai_record_test
