#include "lib/text/tokenizer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "lib/text/tokenizer_file.h"
#include "lib/text/utf8.h"

namespace mla {
namespace {

// Finds added tokens in a text: the leftmost, of those that begin at one place the longest.
class AddedTokenFinder {
 public:
  struct Match {
    const char* begin;
    const char* end;
    int32_t id;
  };

  void add(const AddedToken& token) {
    auto& list = by_first_byte_[static_cast<unsigned char>(token.content[0])];
    if (list.empty()) first_bytes_.push_back(token.content[0]);
    const auto shorter = [](const AddedToken& a, const AddedToken& b) {
      return a.content.size() > b.content.size();
    };
    list.insert(std::upper_bound(list.begin(), list.end(), token, shorter), token);
  }

  bool find(const char* from, const char* end, Match& match) const {
    for (const char* p = from; (p = next_candidate(p, end)) != nullptr; ++p) {
      const auto left = static_cast<size_t>(end - p);
      for (const AddedToken& token : by_first_byte_[static_cast<unsigned char>(*p)]) {
        const size_t size = token.content.size();
        if (size > left || std::memcmp(p, token.content.data(), size) != 0) continue;
        match = {p, p + size, token.id};
        return true;
      }
    }
    return false;
  }

 private:
  const char* next_candidate(const char* p, const char* end) const {
    if (first_bytes_.empty() || p == end) return nullptr;
    if (first_bytes_.size() == 1) {
      return static_cast<const char*>(
          std::memchr(p, first_bytes_[0], static_cast<size_t>(end - p)));
    }
    while (p < end && by_first_byte_[static_cast<unsigned char>(*p)].empty()) ++p;
    return p < end ? p : nullptr;
  }

  std::array<std::vector<AddedToken>, 256> by_first_byte_;  // longest first
  std::vector<char> first_bytes_;
};

struct EncodeState {
  std::vector<int32_t> ids;
  Pattern::Scratch pattern;
  Bpe::Scratch bpe;
};

}  // namespace

struct Tokenizer::Impl {
  Bpe bpe;
  std::vector<Pattern> splits;
  // Hugging Face looks for those that are not normalized first, in the whole text.
  std::array<AddedTokenFinder, 2> finders;
  std::vector<std::string> bytes;  // of every id, added ones too
  std::vector<bool> special;
  TokenizerConfig config;
  int32_t bos = -1, eos = -1;

  Impl(TokenizerFile file, TokenizerConfig given)
      : bpe(file.tokens, file.byte_ids, file.merges),
        splits(std::move(file.splits)),
        bytes(std::move(file.tokens)),
        config(std::move(given)) {
    for (const AddedToken& token : file.added) {
      finders[token.normalized].add(token);
      if (static_cast<size_t>(token.id) >= bytes.size())
        bytes.resize(static_cast<size_t>(token.id) + 1);
      bytes[static_cast<size_t>(token.id)] = byte_level_bytes(token.content);
    }
    special.resize(bytes.size());
    for (const AddedToken& token : file.added)
      special[static_cast<size_t>(token.id)] = token.special;
  }

  // Between added tokens of one kind come those of the next, then the text itself.
  void encode_span(size_t finder, const char* p, const char* end, EncodeState& state) const {
    if (p == end) return;
    if (finder == finders.size()) return encode_piece(0, p, end, state);
    AddedTokenFinder::Match match;
    while (finders[finder].find(p, end, match)) {
      encode_span(finder + 1, p, match.begin, state);
      state.ids.push_back(match.id);
      p = match.end;
    }
    encode_span(finder + 1, p, end, state);
  }

  // Every split sees each piece that those before it made as a text of its own.
  void encode_piece(size_t split, const char* begin, const char* end, EncodeState& state) const {
    if (split == splits.size()) {
      bpe.encode({begin, static_cast<size_t>(end - begin)}, state.bpe, state.ids);
      return;
    }
    const char* p = begin;
    Pattern::Match match;
    while (p < end && splits[split].find(begin, p, end, state.pattern, match)) {
      if (match.begin > p) encode_piece(split + 1, p, match.begin, state);
      encode_piece(split + 1, match.begin, match.end, state);
      p = match.end;
    }
    if (p < end) encode_piece(split + 1, p, end, state);
  }
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::load(const std::string& model_dir) {
  const std::string path = model_dir + "/tokenizer.json";
  const std::string config_path = model_dir + "/tokenizer_config.json";
  std::string config;
  if (has_entry(config_path)) config = read_file(config_path);
  return parse(read_file(path), config, path);
}

Tokenizer Tokenizer::parse(std::string_view tokenizer_json, std::string_view config_json,
                           std::string_view what) {
  const std::string config_what =
      (std::filesystem::path(what).parent_path() / "tokenizer_config.json").string();
  auto impl = std::make_unique<Impl>(read_tokenizer_file(tokenizer_json, what),
                                     read_tokenizer_config(config_json, config_what));
  const auto id_of = [&](const char* key, const std::string& text) -> int32_t {
    if (text.empty()) return -1;
    // Added tokens are compared by their text, which for all others is that of their bytes.
    const auto& bytes = impl->bytes;
    const auto it = std::find(bytes.begin(), bytes.end(), byte_level_bytes(text));
    if (it == bytes.end())
      fail("{}: field '{}': '{}' is not a token of {}", config_what, key, text, what);
    return static_cast<int32_t>(it - bytes.begin());
  };
  impl->bos = id_of("bos_token", impl->config.bos_text);
  impl->eos = id_of("eos_token", impl->config.eos_text);
  if (impl->config.add_bos && impl->bos < 0)
    fail("{}: field 'add_bos_token' is true: expected a bos_token with it, found none",
         config_what);
  return Tokenizer(std::move(impl));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  const size_t bad = find_invalid_utf8(text);
  if (bad != std::string_view::npos)
    fail("text is not UTF-8: byte 0x{:02X} at offset {}", static_cast<unsigned char>(text[bad]),
         bad);
  EncodeState state;
  // English text has about four bytes a token.
  state.ids.reserve(text.size() / 4 + 1);
  impl_->encode_span(0, text.data(), text.data() + text.size(), state);
  return std::move(state.ids);
}

std::string_view Tokenizer::token_bytes(int32_t id, bool skip_special) const {
  if (id < 0 || id >= vocab_size() || (skip_special && is_special(id))) return {};
  return impl_->bytes[static_cast<size_t>(id)];
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special) const {
  std::string bytes, text;
  for (int32_t id : ids) bytes += token_bytes(id, skip_special);
  append_utf8_lossy(bytes, true, text);
  return text;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->bytes.size()); }
bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->special[static_cast<size_t>(id)];
}
int32_t Tokenizer::bos_id() const { return impl_->bos; }
int32_t Tokenizer::eos_id() const { return impl_->eos; }
bool Tokenizer::add_bos() const { return impl_->config.add_bos; }
const std::string& Tokenizer::bos_text() const { return impl_->config.bos_text; }
const std::string& Tokenizer::eos_text() const { return impl_->config.eos_text; }
const std::string& Tokenizer::chat_template() const { return impl_->config.chat_template; }

}  // namespace mla
