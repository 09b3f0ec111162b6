#include "lib/batch/result.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "tests/support/catch.h"

namespace mla::result_test {
namespace {

Result sample() {
  Result r;
  r.index = 3;
  r.line = 5;
  r.id = "q1";
  r.prompt_tokens = 7;
  Choice& choice = r.choices.front();
  choice.text = "hé";
  choice.token_ids = {10, 11, 1};
  choice.finish_reason = "stop";
  for (const float x : {-0.5f, -1.25f, -0.0f}) choice.logprob_hash.add(x);
  choice.timing.arrive(100);
  choice.timing.schedule(101);
  choice.timing.schedule(150);
  choice.timing.token(111);
  choice.timing.token(113);
  choice.timing.token(117);
  choice.timing.prefill_chunks = 2;
  return r;
}

TEST_CASE("a record has the fields of the interface in their order") {
  Result r = sample();
  CHECK(dump_line(to_json(r)) ==
        "{\"id\":\"q1\",\"index\":3,\"status\":\"ok\",\"text\":\"h\xc3\xa9\","
        "\"token_ids\":[10,11,1],\"finish_reason\":\"stop\",\"stop_reason\":null,"
        "\"prompt_tokens\":7,\"completion_tokens\":3,\"cached_tokens\":0,"
        "\"logprob_hash\":\"" +
            r.choices[0].logprob_hash.hex() +
            "\","
            "\"timing\":{\"queue\":1.0,\"prefill\":10.0,\"ttft\":11.0,\"tpot\":3.0,\"e2e\":17.0,"
            "\"itl\":{\"mean\":3.0,\"p50\":3.0,\"p99\":3.98,\"max\":4.0},\"prefill_chunks\":2}}");
}

TEST_CASE("optional fields stand where they were asked for") {
  Result r = sample();
  r.id = 4;
  Choice& choice = r.choices.front();
  choice.text.reset();
  choice.stop_reason = 11;
  r.answer = "#### 2";
  r.prompt_token_ids = std::vector<int32_t>{1, 2};
  choice.logprobs = std::vector<TokenLogprob>{{.token = 10, .logprob = -0.5f, .top = {{10, -0.5f}}},
                                              {.token = 11, .logprob = -1.25f}};
  const OrderedJson j = to_json(r);
  CHECK(j["id"] == 4);
  CHECK(j["text"].is_null());
  CHECK(j["stop_reason"] == 11);
  CHECK(j["answer"] == "#### 2");
  CHECK(j["prompt_token_ids"].dump() == "[1,2]");
  CHECK(j["logprobs"].dump() == R"([{"token_id":10,"logprob":-0.5,"top":[[10,-0.5]]},)"
                                R"({"token_id":11,"logprob":-1.25,"top":[]}])");
}

TEST_CASE("several choices stand in a list and what they share beside it") {
  Result r = sample();
  r.answer = "4";
  r.prompt_token_ids = std::vector<int32_t>{1, 2};
  r.choices.push_back(r.choices[0]);
  Choice& second = r.choices[1];
  second.text = "x";
  second.token_ids = {12};
  second.finish_reason = "length";
  second.logprob_hash = {};
  second.logprob_hash.add(-2);
  second.logprobs = std::vector<TokenLogprob>{{.token = 12, .logprob = -2, .top = {}}};
  second.timing = {};
  second.timing.token(3);
  const std::string timing =
      R"("timing":{"queue":1.0,"prefill":10.0,"ttft":11.0,"tpot":3.0,"e2e":17.0,)"
      R"("itl":{"mean":3.0,"p50":3.0,"p99":3.98,"max":4.0},"prefill_chunks":2})";
  CHECK(r.completion_tokens() == 4);
  CHECK(dump_line(to_json(r)) ==
        R"({"id":"q1","index":3,"status":"ok","choices":[{"index":0,"text":"hé",)"
        R"("token_ids":[10,11,1],"finish_reason":"stop","stop_reason":null,"completion_tokens":3,)"
        R"("logprob_hash":")" +
            r.choices[0].logprob_hash.hex() + "\"," + timing +
            R"(},{"index":1,"text":"x","token_ids":[12],"finish_reason":"length",)"
            R"("stop_reason":null,"completion_tokens":1,"logprob_hash":")" +
            second.logprob_hash.hex() +
            R"(","logprobs":[{"token_id":12,"logprob":-2.0,"top":[]}],)"
            R"("timing":{"queue":0.0,"prefill":3.0,"ttft":3.0,"tpot":null,"e2e":3.0,"itl":null,)"
            R"("prefill_chunks":0}}],"prompt_tokens":7,"completion_tokens":4,"cached_tokens":0,)"
            R"("answer":"4","prompt_token_ids":[1,2]})");
}

TEST_CASE("one token has no time between tokens") {
  Result r;
  r.id = 1;
  r.choices[0].token_ids = {5};
  r.choices[0].timing.token(3);
  const OrderedJson timing = to_json(r)["timing"];
  CHECK(timing["tpot"].is_null());
  CHECK(timing["itl"].is_null());
}

TEST_CASE("logprobs read back to the same fp32 bits") {
  std::mt19937 random(7);
  Result r;
  r.id = 1;
  auto& logprobs = r.choices[0].logprobs.emplace();
  std::vector<float> values = {-0.0f, 0.0f, -1e-45f, -0.1f, -3.4028235e38f};
  while (values.size() < 5000) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) values.push_back(x);
  }
  for (const float x : values) logprobs.push_back({.token = 0, .logprob = x, .top = {{0, x}}});
  const Json back = parse_json(dump_line(to_json(r)), "record");
  for (size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const Json& entry = back["logprobs"][i];
    REQUIRE(std::bit_cast<uint32_t>(entry["logprob"].get<float>()) == bits);
    REQUIRE(std::bit_cast<uint32_t>(entry["top"][0][1].get<float>()) == bits);
  }
}

TEST_CASE("NaN and infinity are never printed") {
  for (const float x :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    Result hashed = sample();
    CHECK(is_finite(hashed));
    hashed.choices[0].logprob_hash.add(x);
    CHECK_FALSE(is_finite(hashed));
    CHECK_THROWS_AS(to_json(hashed), Error);
    Result listed = sample();
    listed.choices[0].logprobs =
        std::vector<TokenLogprob>{{.token = 1, .logprob = -1, .top = {{2, x}}}};
    CHECK_FALSE(is_finite(listed));
    CHECK_THROWS_AS(to_json(listed), Error);
    Result timed = sample();
    timed.choices[0].timing.token(x);
    CHECK_THROWS_AS(to_json(timed), Error);
    Result second = sample();
    second.choices.push_back(second.choices[0]);
    CHECK(is_finite(second));
    second.choices[1].logprob_hash.add(x);
    CHECK_FALSE(is_finite(second));
    CHECK_THROWS_AS(to_json(second), Error);
  }
}

TEST_CASE("logprob_hash is FNV-1a 64 of the little-endian fp32 bits") {
  CHECK(LogprobHash().hex() == "cbf29ce484222325");
  LogprobHash one;
  one.add(-0.5f);  // bytes 00 00 00 bf
  uint64_t expected = 0xcbf29ce484222325u;
  for (const uint64_t byte : {0x00, 0x00, 0x00, 0xbf})
    expected = (expected ^ byte) * 0x100000001b3u;
  CHECK(one.hex() == fmt::format("{:016x}", expected));
  // Published FNV-1a 64 value of "foob".
  LogprobHash foob;
  foob.add(std::bit_cast<float>(0x626f6f66u));
  CHECK(foob.hex() == "dd120e790c2512af");
  LogprobHash plus, minus;
  plus.add(0.0f);
  minus.add(-0.0f);
  CHECK(plus.hex() != minus.hex());
}

TEST_CASE("an error record names the line and the reason") {
  BadLine bad{.index = 2, .line = 4, .id = nullptr, .code = "invalid_json", .message = "line 4: x"};
  CHECK(dump_line(to_json(bad)) == R"({"id":null,"index":2,"line":4,"status":"error",)"
                                   R"("error":{"code":"invalid_json","message":"line 4: x"}})");
}

TEST_CASE("a result starts from its request") {
  Request request;
  request.index = 1;
  request.line = 2;
  request.id = "x";
  request.answer = "5";
  request.sampling.n = 3;
  const Result r = make_result(request);
  CHECK(r.index == 1);
  CHECK(r.line == 2);
  CHECK(r.id == "x");
  CHECK(r.answer == "5");
  CHECK(r.choices.size() == 3);
  CHECK(Result().choices.size() == 1);
}

TEST_CASE("SHA-256 gives the published values") {
  Sha256 hash;
  CHECK(hash.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  hash.update("abcdbcdecdefdefgefghfghighijhijk");
  hash.update("ijkljklmklmnlmnomnopnopq");
  CHECK(hash.hex() == "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  Sha256 million;
  for (int i = 0; i < 1000; ++i) million.update(std::string(1000, 'a'));
  CHECK(million.hex() == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

}  // namespace
}  // namespace mla::result_test
