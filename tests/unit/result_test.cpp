#include "lib/batch/result.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "lib/base/error.h"
#include "lib/batch/output.h"
#include "tests/support/catch.h"

namespace mla {
namespace {

Result sample() {
  Result r;
  r.index = 3;
  r.line = 5;
  r.id = "q1";
  r.text = "hé";
  r.token_ids = {10, 11, 1};
  r.finish_reason = "stop";
  r.prompt_tokens = 7;
  for (const float x : {-0.5f, -1.25f, -0.0f}) r.logprob_hash.add(x);
  r.timing.arrive(100);
  r.timing.schedule(101);
  r.timing.schedule(150);
  r.timing.token(111);
  r.timing.token(113);
  r.timing.token(117);
  r.timing.prefill_chunks = 2;
  return r;
}

TEST_CASE("a record has the fields of the interface in their order") {
  Result r = sample();
  CHECK(dump_line(to_json(r)) ==
        "{\"id\":\"q1\",\"index\":3,\"status\":\"ok\",\"text\":\"h\xc3\xa9\","
        "\"token_ids\":[10,11,1],\"finish_reason\":\"stop\",\"stop_reason\":null,"
        "\"prompt_tokens\":7,\"completion_tokens\":3,\"cached_tokens\":0,"
        "\"logprob_hash\":\"" +
            r.logprob_hash.hex() +
            "\","
            "\"timing\":{\"queue\":1.0,\"prefill\":10.0,\"ttft\":11.0,\"tpot\":3.0,\"e2e\":17.0,"
            "\"itl\":{\"mean\":3.0,\"p50\":3.0,\"p99\":3.98,\"max\":4.0},\"prefill_chunks\":2}}");
}

TEST_CASE("optional fields stand where they were asked for") {
  Result r = sample();
  r.id = 4;
  r.text.reset();
  r.stop_reason = 11;
  r.answer = "#### 2";
  r.prompt_token_ids = std::vector<int32_t>{1, 2};
  r.logprobs = std::vector<TokenLogprob>{{.token = 10, .logprob = -0.5f, .top = {{10, -0.5f}}},
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

TEST_CASE("one token has no time between tokens") {
  Result r;
  r.id = 1;
  r.token_ids = {5};
  r.timing.token(3);
  const OrderedJson timing = to_json(r)["timing"];
  CHECK(timing["tpot"].is_null());
  CHECK(timing["itl"].is_null());
}

TEST_CASE("logprobs read back to the same fp32 bits") {
  std::mt19937 random(7);
  Result r;
  r.id = 1;
  r.logprobs.emplace();
  std::vector<float> values = {-0.0f, 0.0f, -1e-45f, -0.1f, -3.4028235e38f};
  while (values.size() < 5000) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) values.push_back(x);
  }
  for (const float x : values) r.logprobs->push_back({.token = 0, .logprob = x, .top = {{0, x}}});
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
    hashed.logprob_hash.add(x);
    CHECK_FALSE(is_finite(hashed));
    CHECK_THROWS_AS(to_json(hashed), Error);
    Result listed = sample();
    listed.logprobs = std::vector<TokenLogprob>{{.token = 1, .logprob = -1, .top = {{2, x}}}};
    CHECK_FALSE(is_finite(listed));
    CHECK_THROWS_AS(to_json(listed), Error);
    Result timed = sample();
    timed.timing.token(x);
    CHECK_THROWS_AS(to_json(timed), Error);
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
  const Result r = make_result(request);
  CHECK(r.index == 1);
  CHECK(r.line == 2);
  CHECK(r.id == "x");
  CHECK(r.answer == "5");
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
}  // namespace mla
