#include "lib/batch/prompt_tokens.h"

#include "lib/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/unit/tokenizer_fixture.h"

namespace mla::test::prompt_tokens_test {
namespace {

using Ids = std::vector<int32_t>;

Tokenizer with_bos(const std::string& config) {
  Json json = small_tokenizer({});
  json["added_tokens"] = {small_added(300, "<s>", true)};
  return make_tokenizer(json, config);
}

TEST_CASE("A text gets a BOS as it is asked for, and never a second one") {
  const Tokenizer adds = with_bos(R"({"add_bos_token": true, "bos_token": "<s>"})");
  const Tokenizer plain = with_bos(R"({"bos_token": "<s>"})");
  const Tokenizer none = with_bos("{}");
  const auto ids = [](const std::string& text, AddBos how, const Tokenizer& tokenizer) {
    return prompt_tokens(text, how, &tokenizer, nullptr);
  };
  CHECK(ids("ab", AddBos::automatic, adds) == Ids{300, 'a', 'b'});
  CHECK(ids("<s>ab", AddBos::automatic, adds) == Ids{300, 'a', 'b'});
  CHECK(ids("ab", AddBos::never, adds) == Ids{'a', 'b'});
  CHECK(ids("ab", AddBos::automatic, plain) == Ids{'a', 'b'});
  CHECK(ids("ab", AddBos::always, plain) == Ids{300, 'a', 'b'});
  CHECK(ids("ab", AddBos::automatic, none) == Ids{'a', 'b'});
  CHECK_THROWS_AS(ids("ab", AddBos::always, none), Error);
}

TEST_CASE("Token ids stay as they are and a chat has the BOS of its template") {
  const Tokenizer adds = with_bos(R"({"add_bos_token": true, "bos_token": "<s>"})");
  CHECK(prompt_tokens(Ids{5, 6}, AddBos::always, &adds, nullptr) == Ids{5, 6});
  CHECK(prompt_tokens(Ids{5, 6}, AddBos::always, nullptr, nullptr) == Ids{5, 6});
  const std::vector<ChatMessage> chat = {{"user", "x"}};
  CHECK(error_text([&] { prompt_tokens(chat, AddBos::automatic, &adds, nullptr); }) ==
        "messages need a chat template, and the checkpoint has none");
  CHECK(error_text([&] { prompt_tokens("x", AddBos::automatic, nullptr, nullptr); }) ==
        "a text prompt needs a tokenizer.json, and the checkpoint has none");
}

}  // namespace
}  // namespace mla::test::prompt_tokens_test
