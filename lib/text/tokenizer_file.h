// What a tokenizer.json and a tokenizer_config.json say, checked.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lib/text/bpe.h"
#include "lib/text/pattern.h"

namespace mla {

struct AddedToken {
  int32_t id;
  std::string content;
  bool special;
  bool normalized;
};

struct TokenizerFile {
  std::vector<std::string> tokens;    // the bytes of each id of the model; empty: no token
  std::array<int32_t, 256> byte_ids;  // -1 for bytes that UTF-8 never has
  std::vector<BpeMerge> merges;
  std::vector<AddedToken> added;
  std::vector<Pattern> splits;  // in order; each isolates its matches in every piece
};

struct TokenizerConfig {
  std::string bos_text, eos_text, chat_template;
  bool add_bos = false;
};

// Both throw Error as Tokenizer::parse() says.
TokenizerFile read_tokenizer_file(std::string_view json, std::string_view what);
TokenizerConfig read_tokenizer_config(std::string_view json, std::string_view what);

// The bytes that Hugging Face's ByteLevel decoder makes of a token's text: those for which the
// characters stand, or the text itself where one of them stands for none.
std::string byte_level_bytes(std::string_view token);

}  // namespace mla
