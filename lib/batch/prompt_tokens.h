// From the prompt of a request to token ids.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/batch/request.h"
#include "lib/text/chat_template.h"
#include "lib/text/tokenizer.h"

namespace mla {

// Token ids as they are; text encoded, with a BOS in front as `add_bos` says; a chat rendered,
// whose BOS is the template's. The pointers may be null. Throws Error: text or a chat without a
// tokenizer, a chat without a template that is known, a BOS asked for that the tokenizer lacks.
std::vector<int32_t> prompt_tokens(const Prompt& prompt, AddBos add_bos, const Tokenizer* tokenizer,
                                   const ChatTemplate* chat_template);

}  // namespace mla
