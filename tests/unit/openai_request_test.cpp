// Lines of the OpenAI batch form, alone and beside lines of the simple form.
#include <sstream>

#include "lib/batch/request.h"
#include "tests/support/requests.h"

namespace mla::openai_request_test {
namespace {

using test::bad;
using test::good;
using test::read_all;
using test::reader_options;

std::string line_of(const std::string& url, const std::string& body) {
  return R"({"custom_id":"c","method":"POST","url":")" + url + R"(","body":{)" + body + "}}";
}
std::string completion(const std::string& body) { return line_of("/v1/completions", body); }
std::string chat(const std::string& fields) {
  return line_of("/v1/chat/completions", R"("messages":[{"role":"user","content":"Hi"}])" + fields);
}

TEST_CASE("an OpenAI completion line is a request under its custom_id") {
  const Request r = good(completion(
      R"("model":"Lite","prompt":"Hello","max_tokens":5,"temperature":0.5,"top_p":0.9,"seed":3,)"
      R"("stop":"x","logprobs":2,"min_tokens":1,"ignore_eos":true,"top_k":4,"stop_token_ids":[7],)"
      R"("answer":"3","n":1,"best_of":1,"presence_penalty":0,"frequency_penalty":0.0,)"
      R"("logit_bias":{},"stream":false,"echo":false,"suffix":null,"user":"me")"));
  CHECK(r.form == Form::completion);
  CHECK(r.id == "c");
  CHECK(r.model == "Lite");
  CHECK(std::get<std::string>(r.prompt) == "Hello");
  CHECK(r.sampling.max_tokens == 5);
  CHECK(r.sampling.temperature == 0.5f);
  CHECK(r.sampling.top_p == 0.9f);
  CHECK(r.sampling.seed == 3);
  CHECK(r.sampling.stop == std::vector<std::string>{"x"});
  CHECK(r.sampling.logprobs == 2);
  CHECK(r.sampling.min_tokens == 1);
  CHECK(r.sampling.ignore_eos);
  CHECK(r.sampling.top_k == 4);
  CHECK(r.sampling.stop_token_ids == std::vector<int32_t>{7});
  CHECK(r.answer == "3");
}

TEST_CASE("an OpenAI line that does not say takes the defaults") {
  ReaderOptions o = reader_options();
  o.defaults.temperature = 0.25f;
  o.defaults.logprobs = 1;
  const Request text = good(completion(R"("prompt":"x")"), o);
  CHECK(text.sampling.temperature == 0.25f);
  CHECK(text.sampling.logprobs == 1);
  CHECK(text.sampling.max_tokens == 16);
  const Request messages = good(chat(""), o);
  CHECK(messages.sampling.logprobs == 1);
  CHECK_FALSE(messages.sampling.max_tokens);
}

TEST_CASE("an OpenAI prompt is text or token ids or a list of one of them") {
  const std::vector<int32_t> ids = {5, 6};
  CHECK(std::get<std::string>(good(completion(R"("prompt":["Hello"])")).prompt) == "Hello");
  CHECK(std::get<std::vector<int32_t>>(good(completion(R"("prompt":[5,6])")).prompt) == ids);
  CHECK(std::get<std::vector<int32_t>>(good(completion(R"("prompt":[[5,6]])")).prompt) == ids);
  const BadLine two = bad(completion(R"("prompt":["a","b"])"));
  CHECK(two.code == "unsupported");
  CHECK(two.message == "line 1: body: field 'prompt': expected one prompt, found a list of 2");
  for (const char* prompt : {"[]", "[[]]", "\"\"", "[\"\"]"})
    CHECK(bad(completion(R"("prompt":)" + std::string(prompt))).message ==
          "line 1: body: field 'prompt': expected at least one token, found an empty prompt");
  CHECK(bad(completion(R"("prompt":[[1,1000]])")).message.find("1000") != std::string::npos);
  CHECK(bad(completion(R"("prompt":[{}])")).message.find("an object") != std::string::npos);
}

TEST_CASE("a message is a string or a list of text parts") {
  const auto messages = [](const std::string& content) {
    return line_of("/v1/chat/completions",
                   R"("messages":[{"role":"user","content":)" + content + "}]");
  };
  const Request r = good(messages(R"([{"type":"text","text":"a"},{"type":"text","text":"b"}])"));
  CHECK(r.form == Form::chat);
  CHECK(std::get<std::vector<ChatMessage>>(r.prompt).at(0).content == "a\nb");
  const BadLine image = bad(messages(R"([{"type":"image_url","image_url":{"url":"x"}}])"));
  CHECK(image.code == "unsupported");
  CHECK(image.message ==
        "line 1: body: message 0: field 'content': part 0: expected the type \"text\", found "
        "\"image_url\"");
  CHECK(bad(messages("[]")).code == "invalid_request");
  CHECK(bad(messages("null")).code == "invalid_request");
  CHECK(bad(messages("[3]")).code == "invalid_request");
}

TEST_CASE("a chat says with a boolean and a number which logprobs it wants") {
  CHECK(good(chat(R"(,"logprobs":true,"top_logprobs":5)")).sampling.logprobs == 5);
  CHECK(good(chat(R"(,"logprobs":true)")).sampling.logprobs == 0);
  ReaderOptions o = reader_options();
  o.defaults.logprobs = 4;
  CHECK_FALSE(good(chat(R"(,"logprobs":false)"), o).sampling.logprobs);
  CHECK(bad(chat(R"(,"top_logprobs":5)")).message ==
        "line 1: body: field 'top_logprobs': expected logprobs to be true with it, found no such "
        "field");
  CHECK(bad(chat(R"(,"logprobs":true,"top_logprobs":21)")).message.find("0 to 20") !=
        std::string::npos);
  CHECK(bad(chat(R"(,"logprobs":3)")).message.find("true or false") != std::string::npos);
  CHECK(bad(completion(R"("prompt":"x","logprobs":true)")).message.find("an integer") !=
        std::string::npos);
  CHECK(bad(completion(R"("prompt":"x","logprobs":1,"top_logprobs":1)")).code == "unsupported");
}

TEST_CASE("what is wrong with the envelope of an OpenAI line is said") {
  struct Case {
    const char* line;
    const char* message;
  };
  for (
      const Case& c : std::vector<Case>{
          {R"({"method":"POST","url":"/v1/completions","body":{"prompt":"x"}})",
           "line 1: field 'custom_id': expected a string, found nothing"},
          {R"({"custom_id":3,"method":"POST","url":"/v1/completions","body":{"prompt":"x"}})",
           "line 1: field 'custom_id': expected a string, found the number 3"},
          {R"({"custom_id":"c","url":"/v1/completions","body":{"prompt":"x"}})",
           "line 1: field 'method': expected a string, found nothing"},
          {R"({"custom_id":"c","method":"GET","url":"/v1/completions","body":{"prompt":"x"}})",
           "line 1: field 'method': expected \"POST\", found \"GET\""},
          {R"({"custom_id":"c","method":"POST","url":"/v1/embeddings","body":{"prompt":"x"}})",
           "line 1: field 'url': expected \"/v1/completions\" or \"/v1/chat/completions\", found "
           "\"/v1/embeddings\""},
          {R"({"custom_id":"c","method":"POST","url":"/v1/completions"})",
           "line 1: field 'body': expected an object, found nothing"},
          {R"({"custom_id":"c","method":"POST","url":"/v1/completions","body":[]})",
           "line 1: field 'body': expected an object, found a list"},
          {R"({"custom_id":"c","method":"POST","url":"/v1/completions","body":{}})",
           "line 1: body: field 'prompt': expected it and no 'messages', found neither"},
          {R"({"custom_id":"c","method":"POST","url":"/v1/chat/completions","body":{"prompt":"x"}})",
           "line 1: body: field 'messages': expected it and no 'prompt', found 'prompt'"},
      }) {
    const BadLine b = bad(c.line);
    CHECK(b.openai);
    CHECK(b.code == "invalid_request");
    CHECK(b.message == c.message);
  }
}

TEST_CASE("parameters that would change the answer of an OpenAI line are refused") {
  for (const char* field :
       {R"("best_of":2)", R"("stream":true)", R"("use_beam_search":true)", R"("suffix":"x")"}) {
    const BadLine b = bad(completion(R"("prompt":"x",)" + std::string(field)));
    INFO(field);
    CHECK(b.code == "unsupported");
    CHECK(b.id == "c");
    CHECK(b.openai);
  }
  for (const char* field : {R"("tools":[{}])", R"("response_format":{"type":"json_object"})"})
    CHECK(bad(chat("," + std::string(field))).code == "unsupported");
  good(chat(R"(,"tools":[],"response_format":{"type":"text"})"));
}

TEST_CASE("what clients write by default is no error") {
  for (const char* fields :
       {R"(,"tool_choice":"none")", R"(,"tool_choice":"auto")", R"(,"function_call":"none")",
        R"(,"top_logprobs":0)", R"(,"logprobs":false,"top_logprobs":0)", R"(,"tools":[])",
        R"(,"response_format":{"type":"text"})", R"(,"modalities":["text"])",
        R"(,"add_special_tokens":false)"})
    CHECK_FALSE(good(chat(fields)).sampling.logprobs);
  const auto refused = [](const char* fields) { return bad(chat(fields)).message; };
  CHECK(refused(R"(,"tool_choice":"required")") ==
        "line 1: body: field 'tool_choice': the string \"required\" is not supported, expected "
        "\"none\" or \"auto\"");
  CHECK(refused(R"(,"response_format":{"type":"json_object"})") ==
        "line 1: body: field 'response_format': an object is not supported, expected "
        "{\"type\":\"text\"}");
  CHECK(refused(R"(,"modalities":["audio"])") ==
        "line 1: body: field 'modalities': a list is not supported, expected [\"text\"]");
  CHECK(refused(R"(,"add_special_tokens":true)") ==
        "line 1: body: field 'add_special_tokens': true is not supported, expected false");
}

TEST_CASE("choices and penalties and logit biases are taken of both kinds of OpenAI lines") {
  const std::string fields =
      R"("n":2,"best_of":2,"min_p":0.5,"presence_penalty":0.5,"frequency_penalty":-1,)"
      R"("repetition_penalty":1.5,"logit_bias":{"5":1})";
  for (const std::string& line : {completion(R"("prompt":"x",)" + fields), chat("," + fields)}) {
    const SamplingParams s = good(line).sampling;
    CHECK(s.n == 2);
    CHECK(s.min_p == 0.5f);
    CHECK(s.presence_penalty == 0.5f);
    CHECK(s.frequency_penalty == -1);
    CHECK(s.repetition_penalty == 1.5f);
    CHECK(s.logit_bias == std::vector<std::pair<int32_t, float>>{{5, 1.0f}});
  }
  CHECK(bad(chat(R"(,"n":129)")).message ==
        "line 1: body: field 'n': expected an integer from 1 to 128, found the number 129");
}

TEST_CASE("echo is a completion's and token ids may be asked for by every line") {
  CHECK(good(completion(R"("prompt":"x","echo":true)")).sampling.echo);
  CHECK(bad(chat(R"(,"echo":true)")).code == "unsupported");
  CHECK(bad(R"({"prompt":"x","echo":true})").code == "unsupported");
  CHECK(bad(completion(R"("prompt":"x","echo":1)")).message ==
        "line 1: body: field 'echo': expected true or false, found the number 1");
  CHECK(good(completion(R"("prompt":"x","echo":true,"logprobs":1)")).sampling.logprobs == 1);
  CHECK(good(chat(R"(,"return_token_ids":true)")).sampling.return_token_ids);
  CHECK(good(R"({"prompt":"x","return_token_ids":true})").sampling.return_token_ids);
  const Request scored = good(completion(R"("prompt":"x","echo":true,"max_tokens":0)"));
  CHECK(scored.sampling.max_tokens == 0);
  CHECK(bad(completion(R"("prompt":"x","max_tokens":0)")).message ==
        "line 1: body: field 'max_tokens': expected an integer of at least 1, found the number 0");
  ReaderOptions o = reader_options();
  o.defaults.return_token_ids = true;
  CHECK(good(completion(R"("prompt":"x")"), o).sampling.return_token_ids);
  CHECK_FALSE(
      good(completion(R"("prompt":"x","return_token_ids":false)"), o).sampling.return_token_ids);
}

TEST_CASE("forms may be mixed and their ids are of one kind") {
  const auto records = read_all("{\"id\":\"c\",\"prompt\":\"a\"}\n" +
                                completion(R"("prompt":"x")") + "\n{\"prompt\":\"b\"}\n");
  REQUIRE(records.size() == 3);
  CHECK(std::get<Request>(records[0]).form == Form::simple);
  CHECK(std::get<BadLine>(records[1]).code == "duplicate_id");
  CHECK(std::get<BadLine>(records[1]).openai);
  CHECK(std::get<Request>(records[2]).form == Form::simple);
}

TEST_CASE("a line that cannot be read is answered in the form it seems to have") {
  CHECK(bad(R"({"custom_id":"c","method":)").openai);
  CHECK_FALSE(bad(R"({"id":"c",)").openai);
  const auto records = read_all(completion(R"("prompt":"x")") + "\nnonsense\n[1]\n{}\nnonsense\n");
  REQUIRE(records.size() == 5);
  CHECK(std::get<BadLine>(records[1]).openai);
  CHECK(std::get<BadLine>(records[2]).openai);
  CHECK_FALSE(std::get<BadLine>(records[3]).openai);  // an object without a field of the form
  CHECK_FALSE(std::get<BadLine>(records[4]).openai);
}

TEST_CASE("unknown fields and other models of OpenAI lines are counted") {
  std::istringstream in(
      completion(R"("prompt":"a","color":1,"model":"/elsewhere/Lite")") + "\n" +
      R"({"custom_id":"d","method":"POST","url":"/v1/chat/completions","x":1,)"
      R"("body":{"model":"gpt","messages":[{"role":"user","content":"","name":"n"}]}})");
  RequestReader reader(in, "test.jsonl", reader_options());
  while (reader.next()) {
  }
  const auto& unknown = reader.unknown_fields();
  CHECK(unknown.size() == 3);
  CHECK(unknown.count("body.color") == 1);
  CHECK(unknown.count("x") == 1);
  CHECK(unknown.count("body.messages[].name") == 1);
  REQUIRE(reader.other_models().size() == 1);
  CHECK(reader.other_models().at("gpt").first_line == 2);
}

}  // namespace
}  // namespace mla::openai_request_test
