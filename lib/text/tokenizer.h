// Byte-level BPE tokenizer, read from a Hugging Face tokenizer.json of DeepSeek-V2's form.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace mla {

// Immutable after load; encode and decode may be called from several threads at once.
class Tokenizer {
 public:
  // Reads DIR/tokenizer.json and, where it is there, DIR/tokenizer_config.json. Throws Error that
  // names the file and the field, with what was expected and found, on everything that would change
  // ids or texts and that this reader does not have: another model type, a normalizer, an unknown
  // pre-tokenizer or behaviour, byte_fallback, single_word, lstrip or rstrip of an added token, a
  // merge that names an unknown token, an id out of range, two tokens with one id, a byte without a
  // token, add_eos_token, clean_up_tokenization_spaces, a bos_token that is no token …
  static Tokenizer load(const std::string& model_dir);
  // From the texts of the files; `config_json` may be empty. `what` names the source in messages.
  static Tokenizer parse(std::string_view tokenizer_json, std::string_view config_json,
                         std::string_view what);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Token ids of UTF-8 text, without BOS; the text of an added token becomes that token. Time grows
  // with n log n. Throws Error on bytes that are not UTF-8 (offset named), and where PCRE2 gives up
  // on a pattern that is more than character classes.
  std::vector<int32_t> encode(std::string_view text) const;

  // The bytes of one token; empty for an id that has none, and for a special token when
  // skip_special. Bytes need not be whole UTF-8. The view lives as long as the tokenizer.
  std::string_view token_bytes(int32_t id, bool skip_special = true) const;

  // Concatenated token bytes, bytes that are not UTF-8 replaced by U+FFFD as Hugging Face does.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special = true) const;

  int32_t vocab_size() const;  // one past the largest id that has a token
  bool is_special(int32_t id) const;
  int32_t bos_id() const;  // of tokenizer_config.json's bos_token, or -1
  int32_t eos_id() const;  // likewise
  bool add_bos() const;    // tokenizer_config.json's add_bos_token, false where absent
  const std::string& bos_text() const;
  const std::string& eos_text() const;
  const std::string& chat_template() const;  // tokenizer_config.json's, or ""

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mla
