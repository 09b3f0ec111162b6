#include "lib/batch/prompt_tokens.h"

#include "lib/base/error.h"

namespace mla {
namespace {

void add_bos_to(std::vector<int32_t>& ids, AddBos how, const Tokenizer& tokenizer) {
  if (how == AddBos::never) return;
  if (how == AddBos::automatic && !tokenizer.add_bos()) return;
  const int32_t bos = tokenizer.bos_id();
  if (bos < 0 && how == AddBos::always) fail("a BOS is asked for, and the tokenizer has none");
  if (bos >= 0 && (ids.empty() || ids.front() != bos)) ids.insert(ids.begin(), bos);
}

}  // namespace

std::vector<int32_t> prompt_tokens(const Prompt& prompt, AddBos add_bos, const Tokenizer* tokenizer,
                                   const ChatTemplate* chat_template) {
  if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt)) return *ids;
  if (!tokenizer) fail("a text prompt needs a tokenizer.json, and the checkpoint has none");
  if (const auto* messages = std::get_if<std::vector<ChatMessage>>(&prompt)) {
    if (!chat_template) fail("messages need a chat template, and the checkpoint has none");
    return tokenizer->encode(chat_template->render(*messages));
  }
  std::vector<int32_t> ids = tokenizer->encode(std::get<std::string>(prompt));
  add_bos_to(ids, add_bos, *tokenizer);
  return ids;
}

}  // namespace mla
