#include "lib/batch/request.h"

#include <fstream>
#include <limits>
#include <sstream>

#include "lib/base/error.h"
#include "tests/support/requests.h"

namespace mla::request_test {
namespace {

using test::bad;
using test::good;
using test::read_all;
using test::reader_options;

struct BadCase {
  const char* line;
  const char* code;
  const char* message;
};

void check(const std::vector<BadCase>& cases) {
  for (const BadCase& c : cases) {
    const BadLine b = bad(c.line);
    INFO(c.line);
    CHECK(b.code == c.code);
    CHECK(b.message == c.message);
    CHECK(b.line == 1);
  }
}

// {"prompt":"x", FIELDS}
void check_fields(const std::vector<BadCase>& cases) {
  for (const BadCase& c : cases) {
    const BadLine b = bad(R"({"id":"q","prompt":"x",)" + std::string(c.line) + "}");
    INFO(c.line);
    CHECK(b.id == "q");
    CHECK(b.code == c.code);
    CHECK(b.message == c.message);
  }
}

TEST_CASE("a text prompt takes the defaults and the line number as its id") {
  const Request r = good(R"({"prompt":"Hello"})");
  CHECK(r.index == 0);
  CHECK(r.line == 1);
  CHECK(r.id == 1);
  CHECK(std::get<std::string>(r.prompt) == "Hello");
  CHECK(r.sampling.temperature == 0);
  CHECK(r.sampling.top_k == 0);
  CHECK(r.sampling.top_p == 1);
  CHECK(r.sampling.min_p == 0);
  CHECK(r.sampling.presence_penalty == 0);
  CHECK(r.sampling.frequency_penalty == 0);
  CHECK(r.sampling.repetition_penalty == 1);
  CHECK(r.sampling.logit_bias.empty());
  CHECK(r.sampling.n == 1);
  CHECK(r.sampling.max_tokens == 16);
  CHECK(r.sampling.min_tokens == 0);
  CHECK_FALSE(r.sampling.seed);
  CHECK_FALSE(r.sampling.logprobs);
  CHECK_FALSE(r.sampling.ignore_eos);
  CHECK_FALSE(r.answer);
}

TEST_CASE("every sampling field of a line is taken") {
  const Request r =
      good(R"({"id":7,"prompt":[0,999],"temperature":0.5,"top_k":-1,"top_p":0.9,"max_tokens":64,)"
           R"("min_tokens":64,"seed":-9223372036854775808,"stop":["a","b"],"stop_token_ids":[3,0],)"
           R"("ignore_eos":true,"logprobs":20,"min_p":0.25,"presence_penalty":-2,)"
           R"("frequency_penalty":1.5,"repetition_penalty":1.1,"n":128,"best_of":128,)"
           R"("logit_bias":{"10":-100,"9":0.5,"0":100},"answer":"#### 3"})");
  CHECK(r.id == 7);
  CHECK(std::get<std::vector<int32_t>>(r.prompt) == std::vector<int32_t>{0, 999});
  CHECK(r.sampling.temperature == 0.5f);
  CHECK(r.sampling.top_k == -1);
  CHECK(r.sampling.top_p == 0.9f);
  CHECK(r.sampling.max_tokens == 64);
  CHECK(r.sampling.min_tokens == 64);
  CHECK(r.sampling.seed == std::numeric_limits<int64_t>::min());
  CHECK(r.sampling.stop == std::vector<std::string>{"a", "b"});
  CHECK(r.sampling.stop_token_ids == std::vector<int32_t>{3, 0});
  CHECK(r.sampling.ignore_eos);
  CHECK(r.sampling.logprobs == 20);
  CHECK(r.sampling.min_p == 0.25f);
  CHECK(r.sampling.presence_penalty == -2);
  CHECK(r.sampling.frequency_penalty == 1.5f);
  CHECK(r.sampling.repetition_penalty == 1.1f);
  CHECK(r.sampling.n == kMaxChoices);
  CHECK(r.sampling.logit_bias ==
        std::vector<std::pair<int32_t, float>>{{0, 100.0f}, {9, 0.5f}, {10, -100.0f}});
  CHECK(r.answer == "#### 3");
}

TEST_CASE("defaults of the command line hold where a line does not say") {
  ReaderOptions o = reader_options();
  o.defaults.temperature = 0.7f;
  o.defaults.max_tokens = 5;
  o.defaults.stop = {"END"};
  o.defaults.logprobs = 2;
  o.defaults.min_p = 0.5f;
  o.defaults.presence_penalty = 1;
  o.defaults.repetition_penalty = 2;
  const Request silent = good(R"({"prompt":"x","temperature":null})", o);
  CHECK(silent.sampling.temperature == 0.7f);
  CHECK(silent.sampling.max_tokens == 5);
  CHECK(silent.sampling.stop == std::vector<std::string>{"END"});
  CHECK(silent.sampling.logprobs == 2);
  CHECK(silent.sampling.min_p == 0.5f);
  CHECK(silent.sampling.presence_penalty == 1);
  CHECK(silent.sampling.repetition_penalty == 2);
  const Request loud = good(R"({"prompt":"x","temperature":0,"max_tokens":6,"stop":[],"min_p":0,)"
                            R"("presence_penalty":0,"repetition_penalty":1})",
                            o);
  CHECK(loud.sampling.min_p == 0);
  CHECK(loud.sampling.presence_penalty == 0);
  CHECK(loud.sampling.repetition_penalty == 1);
  CHECK(loud.sampling.temperature == 0);
  CHECK(loud.sampling.max_tokens == 6);
  CHECK(loud.sampling.stop.empty());
}

TEST_CASE("a chat line without max_tokens gets the rest of the model length") {
  const std::string chat = R"({"messages":[{"role":"user","content":"Hi"}]})";
  const Request r = good(chat);
  const auto& messages = std::get<std::vector<ChatMessage>>(r.prompt);
  REQUIRE(messages.size() == 1);
  CHECK(messages[0].role == "user");
  CHECK(messages[0].content == "Hi");
  CHECK_FALSE(r.sampling.max_tokens);
  ReaderOptions o = reader_options();
  o.defaults.max_tokens = 9;
  CHECK(good(chat, o).sampling.max_tokens == 9);
}

TEST_CASE("max_completion_tokens means max_tokens") {
  CHECK(good(R"({"prompt":"x","max_completion_tokens":3})").sampling.max_tokens == 3);
  CHECK(good(R"({"prompt":"x","max_completion_tokens":3,"max_tokens":3})").sampling.max_tokens ==
        3);
  check_fields({{R"("max_completion_tokens":3,"max_tokens":4)", "invalid_request",
                 "line 1: expected max_tokens and max_completion_tokens to be one number, found 4 "
                 "and 3"}});
}

TEST_CASE("a stop string may stand alone") {
  CHECK(good(R"({"prompt":"x","stop":"\n"})").sampling.stop == std::vector<std::string>{"\n"});
}

TEST_CASE("blank lines and BOM and CRLF and a missing last newline are fine") {
  const auto records = read_all(
      "\xef\xbb\xbf{\"prompt\":\"a\"}\r\n\r\n  \t\n{\"prompt\":\"b\"}\r\n\n{\"prompt\":\"c\"}");
  REQUIRE(records.size() == 3);
  const int64_t lines[] = {1, 4, 6};
  for (size_t i = 0; i < 3; ++i) {
    const Request& r = std::get<Request>(records[i]);
    CHECK(r.index == static_cast<int64_t>(i));
    CHECK(r.line == lines[i]);
    CHECK(r.id == lines[i]);
  }
  CHECK(read_all("").empty());
  CHECK(read_all("\xef\xbb\xbf\n\n").empty());
}

TEST_CASE("a BOM that is not the first thing of the input is an error of its line") {
  const std::string bom = "\xef\xbb\xbf", line = "{\"prompt\":\"a\"}\n";
  const auto records = read_all(bom + bom + line + bom + line + line + bom + "\n" + line);
  REQUIRE(records.size() == 5);
  for (const size_t i : {0, 1, 3}) {
    const BadLine& bad = std::get<BadLine>(records[i]);
    CHECK(bad.code == "invalid_json");
    CHECK(test::has(bad.message,
                    "line " + std::to_string(i + 1) +
                        ": expected a JSON object, found a byte order mark (U+FEFF): one may "
                        "stand at the start of the input alone"));
  }
  for (const size_t i : {2, 4}) CHECK(std::holds_alternative<Request>(records[i]));
  // In front of the first line that is not blank, but not of the input.
  CHECK(std::holds_alternative<BadLine>(read_all("\n" + bom + line).at(0)));
}

TEST_CASE("a bad line does not stop the lines after it") {
  const auto records = read_all("{\"prompt\":\"a\"}\nnonsense\n{\"prompt\":\"b\"}\n");
  REQUIRE(records.size() == 3);
  CHECK(std::holds_alternative<Request>(records[0]));
  const BadLine& b = std::get<BadLine>(records[1]);
  CHECK(b.index == 1);
  CHECK(b.line == 2);
  CHECK(b.id.is_null());
  CHECK(std::get<Request>(records[2]).index == 2);
}

TEST_CASE("lines that are no JSON object say so") {
  CHECK(bad("{\"prompt\":").code == "invalid_json");
  CHECK(bad("{\"prompt\":\"x\"} {}").code == "invalid_json");
  CHECK(bad(R"({"prompt":"x","seed":NaN})").code == "invalid_json");
  CHECK(bad(R"({"prompt":"x","top_p":1e999})").code == "invalid_json");
  CHECK(bad(R"({"prompt":"\ud800"})").code == "invalid_json");
  check({{R"({"prompt":"x","prompt":"y"})", "invalid_json", "line 1: duplicate key 'prompt'"},
         {"[1]", "invalid_request", "line 1: expected a JSON object, found a list"},
         {"3", "invalid_request", "line 1: expected a JSON object, found the number 3"}});
}

TEST_CASE("bytes that are not UTF-8 are named with their offset") {
  check({{"{\"prompt\":\"\xff\"}", "invalid_utf8",
          "line 1: expected UTF-8, found the byte 0xff at offset 11"},
         {"{\"prompt\":\"\xed\xa0\x80\"}", "invalid_utf8",
          "line 1: expected UTF-8, found the byte 0xed at offset 11"},
         {"{\"prompt\":\"\xc0\x80\"}", "invalid_utf8",
          "line 1: expected UTF-8, found the byte 0xc0 at offset 11"}});
}

TEST_CASE("an error message is UTF-8 and short whatever the line quotes") {
  const BadLine cut = bad("{\"prompt\": \xc3\xa9}");  // the parser stops inside the letter
  CHECK(cut.code == "invalid_json");
  CHECK_NOTHROW(Json(cut.message).dump());
  const BadLine huge = bad("{\"" + std::string(100000, 'k') + "\":1 x");
  CHECK(huge.message.size() < 600);
}

TEST_CASE("a duplicate id fails the later line and text differs from number") {
  const auto records = read_all(
      "{\"id\":\"1\",\"prompt\":\"a\"}\n{\"id\":1,\"prompt\":\"b\"}\n{\"id\":\"1\",\"prompt\":"
      "\"c\"}\n"
      "{\"id\":5,\"prompt\":\"d\"}\n{\"prompt\":\"e\"}\n");
  REQUIRE(records.size() == 5);
  CHECK(std::holds_alternative<Request>(records[0]));
  CHECK(std::holds_alternative<Request>(records[1]));
  const BadLine& again = std::get<BadLine>(records[2]);
  CHECK(again.code == "duplicate_id");
  CHECK(again.id == "1");
  CHECK(again.message == "line 3: duplicate id: expected a new one, found the string \"1\" again");
  CHECK(std::holds_alternative<Request>(records[3]));
  // The line number is an id like any other.
  CHECK(std::get<BadLine>(records[4]).message ==
        "line 5: duplicate id: expected a new one, found the number 5 again");
}

TEST_CASE("the id of a bad line is taken too") {
  const auto records = read_all("{\"id\":\"a\"}\n{\"id\":\"a\",\"prompt\":\"x\"}\n");
  CHECK(std::get<BadLine>(records[0]).id == "a");
  CHECK(std::get<BadLine>(records[1]).code == "duplicate_id");
}

TEST_CASE("a bad line keeps its answer where it could be read") {
  const auto answer = [](const std::string& line) {
    return std::get<BadLine>(read_all(line + "\n").at(0)).answer;
  };
  CHECK(answer(R"({"answer":"7"})") == "7");
  CHECK(answer(
            R"({"custom_id":"c","method":"POST","url":"/v1/completions","body":{"answer":"8"}})") ==
        "8");
  CHECK_FALSE(answer(R"({"custom_id":"c","answer":"8","body":[]})"));
  CHECK_FALSE(answer(R"({"answer":7})"));
  CHECK_FALSE(answer(R"({"answer":"7")"));
}

TEST_CASE("an id is a string or an integer") {
  check({{R"({"id":1.5,"prompt":"x"})", "invalid_request",
          "line 1: field 'id': expected a string or an integer, found the number 1.5"},
         {R"({"id":[1],"prompt":"x"})", "invalid_request",
          "line 1: field 'id': expected a string or an integer, found a list"}});
  CHECK(good(R"({"id":null,"prompt":"x"})").id == 1);
  CHECK(good(R"({"id":18446744073709551615,"prompt":"x"})").id.dump() == "18446744073709551615");
}

TEST_CASE("a prompt is text or token ids or messages and not empty") {
  const char* code = "invalid_request";
  check({
      {"{}", code, "line 1: expected one of the fields 'prompt' and 'messages', found neither"},
      {R"({"prompt":"x","messages":[]})", code,
       "line 1: expected one of the fields 'prompt' and 'messages', found both"},
      {R"({"prompt":""})", code,
       "line 1: field 'prompt': expected at least one token, found an empty prompt"},
      {R"({"prompt":[]})", code,
       "line 1: field 'prompt': expected at least one token, found an empty prompt"},
      {R"({"prompt":3})", code,
       "line 1: field 'prompt': expected a string or a list of token ids, found the number 3"},
      {R"({"prompt":["a"]})", code,
       "line 1: field 'prompt': entry 0: expected a token id from 0 to 999, found the string "
       "\"a\""},
      {R"({"prompt":[1,1000]})", code,
       "line 1: field 'prompt': entry 1: expected a token id from 0 to 999, found the number 1000"},
      {R"({"prompt":[-1]})", code,
       "line 1: field 'prompt': entry 0: expected a token id from 0 to 999, found the number -1"},
      {R"({"prompt":[1.0]})", code,
       "line 1: field 'prompt': entry 0: expected a token id from 0 to 999, found the number 1.0"},
      {R"({"prompt":[18446744073709551615]})", code,
       "line 1: field 'prompt': entry 0: expected a token id from 0 to 999, found the number "
       "18446744073709551615"},
      {R"({"messages":"x"})", code,
       "line 1: field 'messages': expected a list of messages, found the string \"x\""},
      {R"({"messages":[]})", code,
       "line 1: field 'messages': expected at least one message, found none"},
      {R"({"messages":[{"role":"user"}]})", code,
       "line 1: message 0: field 'content': expected a string, found nothing"},
      {R"({"messages":[{"role":1,"content":""}]})", code,
       "line 1: message 0: field 'role': expected a string, found the number 1"},
      {R"({"messages":[{"role":"user","content":[]}]})", code,
       "line 1: message 0: field 'content': expected at least one part, found none"},
      {R"({"messages":["x"]})", code,
       "line 1: message 0: expected an object, found the string \"x\""},
  });
}

TEST_CASE("sampling values out of range or of the wrong type are refused") {
  const char* code = "invalid_request";
  check_fields({
      {R"("temperature":-0.5)", code,
       "line 1: field 'temperature': expected a finite number of at least 0, found the number "
       "-0.5"},
      {R"("temperature":1e39)", code,
       "line 1: field 'temperature': expected a finite number of at least 0, found the number "
       "1e+39"},
      {R"("temperature":"hot")", code,
       "line 1: field 'temperature': expected a number, found the string \"hot\""},
      {R"("top_p":0)", code,
       "line 1: field 'top_p': expected a number above 0 and at most 1, found the number 0.0"},
      {R"("top_p":1.0000000001)", code,
       "line 1: field 'top_p': expected a number above 0 and at most 1, found the number "
       "1.0000000001"},
      {R"("top_k":-2)", code,
       "line 1: field 'top_k': expected an integer of at least -1, found the number -2"},
      {R"("top_k":1.5)", code, "line 1: field 'top_k': expected an integer, found the number 1.5"},
      {R"("max_tokens":0)", code,
       "line 1: field 'max_tokens': expected an integer of at least 1, found the number 0"},
      {R"("max_tokens":4294967297)", code,
       "line 1: field 'max_tokens': expected an integer of at least 1, found the number "
       "4294967297"},
      {R"("max_tokens":true)", code, "line 1: field 'max_tokens': expected an integer, found true"},
      {R"("min_tokens":-1)", code,
       "line 1: field 'min_tokens': expected an integer of at least 0, found the number -1"},
      {R"("min_tokens":17)", code,
       "line 1: field 'min_tokens': expected at most max_tokens, 16, found 17"},
      {R"("logprobs":21)", code,
       "line 1: field 'logprobs': expected an integer from 0 to 20, found the number 21"},
      {R"("logprobs":-1)", code,
       "line 1: field 'logprobs': expected an integer from 0 to 20, found the number -1"},
      {R"("prompt_logprobs":21)", code,
       "line 1: field 'prompt_logprobs': expected an integer from 0 to 20, found the number 21"},
      {R"("seed":"1")", code, "line 1: field 'seed': expected an integer, found the string \"1\""},
      {R"("ignore_eos":1)", code,
       "line 1: field 'ignore_eos': expected true or false, found the number 1"},
      {R"("answer":18)", code, "line 1: field 'answer': expected a string, found the number 18"},
      {R"("stop":"")", code,
       "line 1: field 'stop': expected strings that are not empty, found \"\""},
      {R"("stop":5)", code,
       "line 1: field 'stop': expected a string or a list of strings, found the number 5"},
      {R"("stop":["a",5])", code,
       "line 1: field 'stop': expected a string or a list of strings, each, found the number 5"},
      {R"("stop":["1","2","3","4","5","6","7","8","9","a","b","c","d","e","f","g","h"])", code,
       "line 1: field 'stop': expected at most 16 strings, found 17"},
      {R"("stop_token_ids":4)", code,
       "line 1: field 'stop_token_ids': expected a list of token ids, found the number 4"},
      {R"("stop_token_ids":[1000])", code,
       "line 1: field 'stop_token_ids': entry 0: expected a token id from 0 to 999, found the "
       "number 1000"},
  });
}

TEST_CASE("min_p and penalties out of range or of the wrong type are refused") {
  const char* code = "invalid_request";
  check_fields({
      {R"("min_p":-0.1)", code,
       "line 1: field 'min_p': expected a number from 0 to 1, found the number -0.1"},
      {R"("min_p":1.0000000001)", code,
       "line 1: field 'min_p': expected a number from 0 to 1, found the number 1.0000000001"},
      {R"("min_p":"0")", code, "line 1: field 'min_p': expected a number, found the string \"0\""},
      {R"("presence_penalty":2.5)", code,
       "line 1: field 'presence_penalty': expected a number from -2 to 2, found the number 2.5"},
      {R"("presence_penalty":true)", code,
       "line 1: field 'presence_penalty': expected a number, found true"},
      {R"("frequency_penalty":-2.0000000001)", code,
       "line 1: field 'frequency_penalty': expected a number from -2 to 2, found the number "
       "-2.0000000001"},
      {R"("frequency_penalty":[])", code,
       "line 1: field 'frequency_penalty': expected a number, found a list"},
      {R"("repetition_penalty":0)", code,
       "line 1: field 'repetition_penalty': expected a number above 0 and at most 2, found the "
       "number 0.0"},
      {R"("repetition_penalty":1e-60)", code,
       "line 1: field 'repetition_penalty': expected a number above 0 and at most 2, found the "
       "number 1e-60"},
      {R"("repetition_penalty":2.0000000001)", code,
       "line 1: field 'repetition_penalty': expected a number above 0 and at most 2, found the "
       "number 2.0000000001"},
      {R"("repetition_penalty":{})", code,
       "line 1: field 'repetition_penalty': expected a number, found an object"},
  });
  const Request edges =
      good(R"({"prompt":"x","min_p":1,"presence_penalty":2,"frequency_penalty":-2,)"
           R"("repetition_penalty":2})");
  CHECK(edges.sampling.min_p == 1);
  CHECK(edges.sampling.presence_penalty == 2);
  CHECK(edges.sampling.frequency_penalty == -2);
  CHECK(edges.sampling.repetition_penalty == 2);
}

TEST_CASE("a logit bias has token ids as keys and numbers from -100 to 100") {
  const char* code = "invalid_request";
  check_fields({
      {R"("logit_bias":[1])", code,
       "line 1: field 'logit_bias': expected an object of token ids and numbers, found a list"},
      {R"("logit_bias":{"1000":1})", code,
       "line 1: field 'logit_bias': expected token ids from 0 to 999 as keys, found \"1000\""},
      {R"("logit_bias":{"-1":1})", code,
       "line 1: field 'logit_bias': expected token ids from 0 to 999 as keys, found \"-1\""},
      {R"("logit_bias":{"-0":1})", code,
       "line 1: field 'logit_bias': expected token ids from 0 to 999 as keys, found \"-0\""},
      {R"("logit_bias":{"5":1,"05":1})", code,
       "line 1: field 'logit_bias': expected token ids from 0 to 999 as keys, found \"05\""},
      {R"("logit_bias":{"":1})", code,
       "line 1: field 'logit_bias': expected token ids from 0 to 999 as keys, found \"\""},
      {R"("logit_bias":{"5 ":1})", code,
       "line 1: field 'logit_bias': expected token ids from 0 to 999 as keys, found \"5 \""},
      {R"("logit_bias":{"99999999999999999999":1})", code,
       "line 1: field 'logit_bias': expected token ids from 0 to 999 as keys, found "
       "\"99999999999999999999\""},
      {R"("logit_bias":{"the":1})", code,
       "line 1: field 'logit_bias': expected token ids from 0 to 999 as keys, found \"the\""},
      {R"("logit_bias":{"5":100.5})", code,
       "line 1: field 'logit_bias': token 5: expected a number from -100 to 100, found the number "
       "100.5"},
      {R"("logit_bias":{"5":-101})", code,
       "line 1: field 'logit_bias': token 5: expected a number from -100 to 100, found the number "
       "-101"},
      {R"("logit_bias":{"5":null})", code,
       "line 1: field 'logit_bias': token 5: expected a number from -100 to 100, found null"},
  });
  CHECK(bad(R"({"prompt":"x","logit_bias":{"5":1,"5":1}})").code == "invalid_json");
  CHECK(good(R"({"prompt":"x","logit_bias":{}})").sampling.logit_bias.empty());
  CHECK(good(R"({"prompt":"x","logit_bias":null})").sampling.logit_bias.empty());
}

TEST_CASE("a request may ask for up to 128 choices and for the best of no more than those") {
  const char* code = "invalid_request";
  check_fields({
      {R"("n":0)", code,
       "line 1: field 'n': expected an integer from 1 to 128, found the number 0"},
      {R"("n":129)", code,
       "line 1: field 'n': expected an integer from 1 to 128, found the number 129"},
      {R"("n":1.5)", code, "line 1: field 'n': expected an integer, found the number 1.5"},
      {R"("n":"2")", code, "line 1: field 'n': expected an integer, found the string \"2\""},
      {R"("best_of":2)", "unsupported",
       "line 1: field 'best_of': the number 2 is not supported, expected n, 1"},
      {R"("n":2,"best_of":3)", "unsupported",
       "line 1: field 'best_of': the number 3 is not supported, expected n, 2"},
      {R"("best_of":0)", code,
       "line 1: field 'best_of': expected an integer of at least 1, found the number 0"},
      {R"("best_of":"1")", code,
       "line 1: field 'best_of': expected an integer, found the string \"1\""},
  });
  CHECK(good(R"({"prompt":"x","n":3})").sampling.n == 3);
  CHECK(good(R"({"prompt":"x","n":3,"best_of":3})").sampling.n == 3);
  CHECK(good(R"({"prompt":"x","n":3,"best_of":1})").sampling.n == 3);
  CHECK(good(R"({"prompt":"x","n":null,"best_of":null})").sampling.n == 1);
}

TEST_CASE("fields that would change the answer are refused as not supported") {
  const char* code = "unsupported";
  check_fields({
      {R"("stream":true)", code, "line 1: field 'stream': true is not supported, expected false"},
      {R"("length_penalty":0.5)", code,
       "line 1: field 'length_penalty': the number 0.5 is not supported, expected 1"},
      {R"("length_penalty":"2")", "invalid_request",
       "line 1: field 'length_penalty': expected a number, found the string \"2\""},
      {R"("bad_words":["a"])", code,
       "line 1: field 'bad_words': a list is not supported, expected no such field"},
      {R"("stream":1)", "invalid_request",
       "line 1: field 'stream': expected true or false, found the number 1"},
  });
  good(R"({"prompt":"x","n":1,"stream":false,"presence_penalty":0,"frequency_penalty":0.0,)"
       R"("repetition_penalty":1,"min_p":0,"logit_bias":{},"prompt_logprobs":null,"suffix":"",)"
       R"("skip_special_tokens":true,"top_logprobs":0,"add_special_tokens":true,)"
       R"("return_tokens_as_token_ids":false})");
  check_fields({{R"("return_tokens_as_token_ids":true)", code,
                 "line 1: field 'return_tokens_as_token_ids': true is not supported, expected "
                 "false"},
                {R"("add_special_tokens":false)", code,
                 "line 1: field 'add_special_tokens': false is not supported, expected true"},
                {R"("logprob_token_ids":[1])", code,
                 "line 1: field 'logprob_token_ids': a list is not supported, expected no such "
                 "field"}});
  ReaderOptions without_bos = reader_options();
  without_bos.defaults.add_bos = AddBos::never;
  good(R"({"prompt":"x","add_special_tokens":false})", without_bos);
  CHECK(bad(R"({"prompt":"x","add_special_tokens":true})", without_bos).code == code);
  CHECK_FALSE(good(R"({"prompt":"x","seed":-1})").sampling.seed);
}

TEST_CASE("a checkpoint without a tokenizer serves token ids only") {
  ReaderOptions o = reader_options();
  o.has_tokenizer = false;
  good(R"({"prompt":[1]})", o);
  const std::string reason = "because the checkpoint has no tokenizer.json";
  CHECK(bad(R"({"prompt":"x"})", o).message.find(reason) != std::string::npos);
  CHECK(bad(R"({"messages":[{"role":"user","content":"x"}]})", o).message.find(reason) !=
        std::string::npos);
  CHECK(bad(R"({"prompt":[1],"stop":"a"})", o).message.find(reason) != std::string::npos);
}

TEST_CASE("a line over the limit is bad and the next one is read") {
  ReaderOptions o = reader_options();
  o.max_line_bytes = 10000;
  const auto records =
      read_all("{\"prompt\":\"" + std::string(50000, 'x') + "\"}\n{\"prompt\":\"y\"}\n", o);
  REQUIRE(records.size() == 2);
  const BadLine& b = std::get<BadLine>(records[0]);
  CHECK(b.code == "line_too_long");
  CHECK(b.message == "line 1: expected at most 10000 bytes, found more");
  CHECK(std::get<std::string>(std::get<Request>(records[1]).prompt) == "y");
  // The limit itself is allowed, its newline not counted.
  const std::string frame = R"({"prompt":""})";
  const std::string full = R"({"prompt":")" + std::string(10000 - frame.size(), 'x') + "\"}";
  CHECK(std::holds_alternative<Request>(read_all(full + "\n", o)[0]));
  CHECK(std::holds_alternative<BadLine>(read_all(full + " \n", o)[0]));
  // A long line that begins with blanks is no blank line.
  CHECK(read_all(std::string(20000, ' ') + frame, o).size() == 1);
}

TEST_CASE("unknown fields are counted once a name") {
  std::istringstream in(
      "{\"prompt\":\"a\"}\n{\"prompt\":\"a\",\"color\":1}\n{\"prompt\":\"a\",\"color\":2}\n"
      "{\"messages\":[{\"role\":\"user\",\"content\":\"\",\"name\":\"x\"}]}\n");
  RequestReader reader(in, "test.jsonl", reader_options());
  while (reader.next()) {
  }
  const auto& unknown = reader.unknown_fields();
  REQUIRE(unknown.size() == 2);
  CHECK(unknown.at("color").first_line == 2);
  CHECK(unknown.at("color").lines == 2);
  CHECK(unknown.at("messages[].name").lines == 1);
}

TEST_CASE("the reader knows the hash of the bytes it has read") {
  std::istringstream in("abc");
  RequestReader reader(in, "test.jsonl", reader_options());
  reader.next();
  CHECK(reader.bytes_read() == 3);
  CHECK(reader.input_hash() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST_CASE("a stream that cannot be read is an error and not an empty file") {
  std::ifstream folder("/");
  RequestReader reader(folder, "folder", reader_options());
  CHECK_THROWS_AS(reader.next(), Error);
}

TEST_CASE("a request can become a bad line later") {
  const BadLine b = make_bad_line(good(R"({"id":"q","prompt":"x"})"), error_code::kContextLength,
                                  "expected fewer");
  CHECK(b.id == "q");
  CHECK(b.code == "context_length_exceeded");
  CHECK(b.message == "line 1: expected fewer");
  CHECK_FALSE(b.answer);
  CHECK(make_bad_line(good(R"({"prompt":"x","answer":"3"})"), "c", "m").answer == "3");
}

}  // namespace
}  // namespace mla::request_test
