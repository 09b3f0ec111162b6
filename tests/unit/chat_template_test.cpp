#include "lib/text/chat_template.h"

#include <fstream>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "lib/text/tokenizer.h"
#include "tests/support/catch.h"

namespace mla::test::chat_template_test {

using mla::ChatTemplate;

namespace {

// The line ends within quotes are line ends in the template too.
const std::string kTemplate =
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif "
    "%}"
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";

std::string error_of(const ChatTemplate& chat, const std::vector<mla::ChatMessage>& messages) {
  try {
    chat.render(messages);
  } catch (const mla::Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("A conversation is rendered as DeepSeek-V2's template has it") {
  const ChatTemplate chat = ChatTemplate::load("/nonexistent", kTemplate, "<B>", "<E>");
  REQUIRE(chat.usable());
  const std::vector<mla::ChatMessage> messages = {
      {"system", "Be brief."}, {"user", "Hi"}, {"assistant", " Hello "}, {"user", "Bye"}};
  CHECK(chat.render(messages) ==
        "<B>Be brief.\n\nUser: Hi\n\nAssistant:  Hello <E>User: Bye\n\nAssistant:");
  CHECK(chat.render(messages, false) ==
        "<B>Be brief.\n\nUser: Hi\n\nAssistant:  Hello <E>User: Bye\n\n");
  CHECK(chat.render({{"user", ""}}) == "<B>User: \n\nAssistant:");
}

TEST_CASE("A template file goes before the template of the configuration") {
  const mla::test::TempDir dir;
  std::ofstream(dir / "chat_template.jinja") << kTemplate;
  CHECK(ChatTemplate::load(dir.path(), "{{ other }}", "", "").usable());
  std::ofstream(dir / "chat_template.jinja") << "{{ other }}";
  CHECK_FALSE(ChatTemplate::load(dir.path(), kTemplate, "", "").usable());
}

TEST_CASE("What cannot be rendered is refused with the reason") {
  const ChatTemplate none = ChatTemplate::load("/m", "", "", "");
  CHECK_FALSE(none.usable());
  CHECK(error_of(none, {{"user", "x"}}) ==
        "/m/tokenizer_config.json: no chat template; send rendered prompts instead of messages");

  CHECK(ChatTemplate::load("/m", kTemplate + "\n", "", "").usable());  // Jinja drops it
  const ChatTemplate other = ChatTemplate::load("/m", kTemplate + "\n\n", "", "");
  CHECK_FALSE(other.usable());
  CHECK(
      error_of(other, {{"user", "x"}}) ==
      "/m/tokenizer_config.json: expected the chat template of DeepSeek-V2, found another one, \"" +
          kTemplate.substr(0, 60) + "…\"; send rendered prompts instead of messages");

  const ChatTemplate chat = ChatTemplate::load("/m", kTemplate, "", "");
  CHECK(error_of(chat, {}) == "messages: expected at least one, found none");
  CHECK(error_of(chat, {{"tool", "x"}}) ==
        "messages: expected the role system, user or assistant, found \"tool\"");
}

TEST_CASE("The released chat template renders its vectors") {
  const std::string assets = mla::test::assets();
  if (assets.empty()) MLA_SKIP("no test assets");
  const std::string dir = assets + "/tokenizer/deepseek-v2-lite";
  const mla::Tokenizer tokenizer = mla::Tokenizer::load(dir);
  const ChatTemplate chat = ChatTemplate::load(dir, tokenizer.chat_template(), tokenizer.bos_text(),
                                               tokenizer.eos_text());
  REQUIRE(chat.usable());
  const mla::Json vectors =
      mla::parse_json(mla::read_file(dir + "/chat_template_vectors.json"), "vectors");
  REQUIRE(!vectors.empty());
  for (const mla::Json& vector : vectors) {
    std::vector<mla::ChatMessage> messages;
    for (const mla::Json& m : vector["messages"]) messages.push_back({m["role"], m["content"]});
    const std::string text = chat.render(messages, vector["add_generation_prompt"]);
    CHECK(text == vector["expected"].get<std::string>());
    // Rendered prompts begin with BOS as a token and not as its text.
    const std::vector<int32_t> ids = tokenizer.encode(text);
    CHECK(ids[0] == tokenizer.bos_id());
    CHECK(ids[1] != tokenizer.bos_id());
    CHECK(tokenizer.decode(ids, false) == text);
  }
}

}  // namespace mla::test::chat_template_test
