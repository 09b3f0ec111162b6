// tokenizer.json, tokenizer_config.json and the chat template in it. The input is, up to a zero
// byte, the first; then the second; then a text to encode. Where it begins with "+", the first is a
// patch (RFC 7396) of a small tokenizer, to which a patch of the vocabulary adds tokens.
#include <algorithm>

#include "lib/text/chat_template.h"
#include "lib/text/tokenizer.h"
#include "lib/text/utf8.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/tokenizer_fixture.h"

namespace mla {
namespace {

std::string next_part(std::string_view& rest) {
  const size_t zero = std::min(rest.find('\0'), rest.size());
  const std::string part(rest.substr(0, zero));
  rest.remove_prefix(std::min(zero + 1, rest.size()));
  return part;
}

void check(const Tokenizer& tokenizer, std::string_view text) {
  const int32_t size = tokenizer.vocab_size();
  FUZZ_CHECK(size >= 243);  // the bytes that UTF-8 has
  FUZZ_CHECK(tokenizer.bos_id() >= -1 && tokenizer.bos_id() < size);
  FUZZ_CHECK(tokenizer.eos_id() >= -1 && tokenizer.eos_id() < size);
  std::vector<int32_t> ids;
  if (!fuzz::parses([&] { ids = tokenizer.encode(text); })) return;
  std::string bytes;
  for (const int32_t id : ids) {
    FUZZ_CHECK(id >= 0 && id < size);
    bytes += tokenizer.token_bytes(id, false);
  }
  // An added token of letters of the byte alphabet stands for those bytes, as Hugging Face has it.
  const bool ascii = std::all_of(text.begin(), text.end(), [](char c) { return c > 0; });
  if (ascii) FUZZ_CHECK(bytes == text);
  const std::string decoded = tokenizer.decode(ids, false);
  FUZZ_CHECK(find_invalid_utf8(decoded) == std::string_view::npos);
  FUZZ_CHECK(find_invalid_utf8(tokenizer.decode(ids)) == std::string_view::npos);
}

void check_chat(const Tokenizer& tokenizer) {
  const ChatTemplate chat = ChatTemplate::load("/nowhere", tokenizer.chat_template(),
                                               tokenizer.bos_text(), tokenizer.eos_text());
  std::string text;
  const bool rendered = fuzz::parses([&] { text = chat.render({{"user", "a"}}); });
  FUZZ_CHECK(rendered == chat.usable());
  if (rendered) FUZZ_CHECK(text == tokenizer.bos_text() + "User: a\n\nAssistant:");
}

}  // namespace
}  // namespace mla

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla;
  static const Json base = test::small_tokenizer({"a b", "ab c", "Ġ a", "1 2", "Ã ©"});
  std::string_view rest = fuzz::as_text(data, size);
  std::string json = next_part(rest);
  const std::string config = next_part(rest);
  if (json.starts_with('+')) {
    const Json patch = Json::parse(json.begin() + 1, json.end(), nullptr, false);
    if (!patch.is_object()) return 0;
    Json patched = base;
    patched.merge_patch(patch);
    json = patched.dump();
  }
  fuzz::parses([&] {
    const Tokenizer tokenizer = Tokenizer::parse(json, config, "t.json");
    check(tokenizer, rest);
    check_chat(tokenizer);
  });
  return 0;
}
