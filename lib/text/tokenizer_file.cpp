#include "lib/text/tokenizer_file.h"

#include <unordered_map>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "lib/text/utf8.h"

namespace mla {
namespace {

// Ids are rows of the embedding; a table of this many is beyond any model's, and small.
constexpr int64_t kMaxId = int64_t{1} << 20;

// The regex of ByteLevel where use_regex is true (GPT-2's).
constexpr std::string_view kByteLevelRegex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// GPT-2's alphabet: the bytes that print stand for themselves, the others in order for U+0100 on.
bool byte_prints(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

std::array<uint32_t, 256> byte_level_alphabet() {
  std::array<uint32_t, 256> alphabet{};
  uint32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte)
    alphabet[static_cast<size_t>(byte)] = byte_prints(byte) ? static_cast<uint32_t>(byte) : next++;
  return alphabet;
}

bool in_utf8(int byte) { return byte != 0xC0 && byte != 0xC1 && byte < 0xF5; }

const Json* find(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// Absent, null, "" and the like: the field asks for nothing.
void require_unset(const Json& object, const char* key, std::string_view what) {
  const Json* value = find(object, key);
  if (!value || *value == "" || *value == 0 || *value == false) return;
  fail("{}: field '{}': {} is not supported", what, key, describe(*value));
}

void require_type(const Json& object, const char* type, std::string_view what) {
  const std::string found = get_string(object, "type", what);
  if (found != type) fail("{}: field 'type': expected \"{}\", found \"{}\"", what, type, found);
}

// Two refusals in one: `key` has to be the given value, or absent where `absent` is so too.
void require_bool(const Json& object, const char* key, bool value, bool absent,
                  std::string_view what) {
  if (find_bool(object, key, what).value_or(absent) != value)
    fail("{}: field '{}': {} is not supported", what, key, !value);
}

struct ModelReader {
  const Json& model;
  std::string what;
  TokenizerFile& file;
  std::unordered_map<std::string_view, int32_t> ids;  // by the text in the file

  void read() {
    require_type(model, "BPE", what);
    for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix",
                            "end_of_word_suffix", "byte_fallback", "ignore_merges"})
      require_unset(model, key, what);
    read_vocab();
    read_bytes();
    read_merges();
  }

  void read_vocab() {
    const Json* vocab = find(model, "vocab");
    if (!vocab || !vocab->is_object() || vocab->empty())
      fail("{}: field 'vocab': expected an object with tokens, found {}", what,
           vocab ? describe(*vocab) : "nothing");
    ids.reserve(vocab->size());
    std::vector<const std::string*> texts;
    for (const auto& item : vocab->items()) {
      const std::string& text = item.key();
      const Json& value = item.value();
      if (!value.is_number_integer() || value < 0 || value >= kMaxId)
        fail("{}.vocab: token '{}': expected an id from 0 to {}, found {}", what, text, kMaxId - 1,
             describe(value));
      if (text.empty()) fail("{}.vocab: a token without text", what);
      const auto id = value.get<int32_t>();
      const auto place = static_cast<size_t>(id);
      if (place >= texts.size()) texts.resize(place + 1);
      if (texts[place])
        fail("{}.vocab: tokens '{}' and '{}' both have id {}", what, *texts[place], text, id);
      texts[place] = &text;
      ids.emplace(text, id);
    }
    file.tokens.resize(texts.size());
    for (size_t id = 0; id < texts.size(); ++id)
      if (texts[id]) file.tokens[id] = byte_level_bytes(*texts[id]);
  }

  void read_bytes() {
    const std::array<uint32_t, 256> alphabet = byte_level_alphabet();
    for (int byte = 0; byte < 256; ++byte) {
      std::string text;
      append_utf8(alphabet[static_cast<size_t>(byte)], text);
      const auto it = ids.find(text);
      file.byte_ids[static_cast<size_t>(byte)] = it == ids.end() ? -1 : it->second;
      if (it == ids.end() && in_utf8(byte))
        fail("{}.vocab: no token '{}' for the byte 0x{:02X}", what, text, byte);
    }
  }

  int32_t merge_token(const std::string& text, size_t index) const {
    const auto it = ids.find(text);
    if (it == ids.end())
      fail("{}.merges[{}]: token '{}' is not in the vocabulary", what, index, text);
    return it->second;
  }

  void read_merges() {
    const Json* merges = find(model, "merges");
    if (!merges || !merges->is_array())
      fail("{}: field 'merges': expected a list, found {}", what,
           merges ? describe(*merges) : "nothing");
    file.merges.reserve(merges->size());
    for (size_t i = 0; i < merges->size(); ++i) {
      const Json& merge = (*merges)[i];
      std::string left, right;
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      } else if (merge.is_string()) {
        const auto& text = merge.get_ref<const std::string&>();
        const size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
          fail("{}.merges[{}]: expected two tokens with a space between, found '{}'", what, i,
               text);
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else {
        fail("{}.merges[{}]: expected \"a b\" or [\"a\", \"b\"], found {}", what, i,
             describe(merge));
      }
      file.merges.push_back(
          {merge_token(left, i), merge_token(right, i), merge_token(left + right, i)});
    }
  }
};

void read_split(const Json& stage, const std::string& what, TokenizerFile& file) {
  const Json* pattern = find(stage, "pattern");
  if (!pattern || !pattern->is_object() || !pattern->contains("Regex"))
    fail("{}: field 'pattern': expected {{\"Regex\": …}}, found {}", what,
         pattern ? pattern->dump() : "nothing");
  const std::string behavior = get_string(stage, "behavior", what);
  if (behavior != "Isolated")
    fail("{}: field 'behavior': expected \"Isolated\", found \"{}\"", what, behavior);
  require_bool(stage, "invert", false, false, what);
  file.splits.emplace_back(get_string(*pattern, "Regex", what), what);
}

// True where the stage is ByteLevel, which has to be the last.
bool read_stage(const Json& stage, const std::string& what, TokenizerFile& file) {
  const std::string type = get_string(stage, "type", what);
  if (type == "Split") {
    read_split(stage, what, file);
  } else if (type == "Digits") {
    CodepointSet numbers;
    numbers.add(number_ranges());
    file.splits.emplace_back(std::move(numbers), !get_bool(stage, "individual_digits", what));
  } else if (type == "ByteLevel") {
    require_bool(stage, "add_prefix_space", false, true, what);
    if (find_bool(stage, "use_regex", what).value_or(true))
      file.splits.emplace_back(kByteLevelRegex, what);
    return true;
  } else {
    fail("{}: field 'type': expected Split, Digits or ByteLevel, found \"{}\"", what, type);
  }
  return false;
}

void read_pre_tokenizer(const Json& root, std::string_view source, TokenizerFile& file) {
  const std::string what = fmt::format("{}: pre_tokenizer", source);
  const Json* pre = find(root, "pre_tokenizer");
  if (!pre) fail("{}: expected an object, found nothing", what);
  bool byte_level = false;
  if (get_string(*pre, "type", what) == "Sequence") {
    const Json* stages = find(*pre, "pretokenizers");
    if (!stages || !stages->is_array())
      fail("{}: field 'pretokenizers': expected a list, found {}", what,
           stages ? describe(*stages) : "nothing");
    for (size_t i = 0; i < stages->size(); ++i) {
      const std::string stage = fmt::format("{}.pretokenizers[{}]", what, i);
      if (byte_level) fail("{}: expected nothing after ByteLevel", stage);
      byte_level = read_stage((*stages)[i], stage, file);
    }
  } else {
    byte_level = read_stage(*pre, what, file);
  }
  if (!byte_level) fail("{}: expected ByteLevel at the end, found none", what);
}

void read_added(const Json& root, std::string_view source, TokenizerFile& file,
                const std::unordered_map<std::string_view, int32_t>& vocab) {
  const Json* list = find(root, "added_tokens");
  if (!list) return;
  if (!list->is_array())
    fail("{}: field 'added_tokens': expected a list, found {}", source, describe(*list));
  std::unordered_map<int64_t, std::string> by_id;
  std::unordered_map<std::string, int64_t> by_text;
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& item = (*list)[i];
    const std::string what = fmt::format("{}: added_tokens[{}]", source, i);
    const int64_t id = get_int(item, "id", what);
    AddedToken token{0, get_string(item, "content", what),
                     find_bool(item, "special", what).value_or(false),
                     find_bool(item, "normalized", what).value_or(true)};
    const std::string& text = token.content;
    if (id < 0 || id >= kMaxId)
      fail("{}: field 'id': expected 0 to {}, found {}", what, kMaxId - 1, id);
    token.id = static_cast<int32_t>(id);
    if (text.empty()) fail("{}: field 'content': expected text, found none", what);
    for (const char* key : {"single_word", "lstrip", "rstrip"})
      require_bool(item, key, false, false, what);
    if (!by_id.emplace(id, text).second)
      fail("{}: tokens '{}' and '{}' both have id {}", what, by_id[id], text, id);
    if (!by_text.emplace(text, id).second) fail("{}: token '{}' is listed twice", what, text);
    const auto known = vocab.find(text);
    if (known != vocab.end() && known->second != id)
      fail("{}: token '{}': expected the vocabulary's id {}, found {}", what, text, known->second,
           id);
    const auto place = static_cast<size_t>(id);
    if (known == vocab.end() && place < file.tokens.size() && !file.tokens[place].empty())
      fail("{}: id {} of '{}' is that of another token in the vocabulary", what, id, text);
    file.added.push_back(std::move(token));
  }
}

// A token is given as its text or as an object that has it.
std::string token_text(const Json& config, const char* key, std::string_view what) {
  const Json* value = find(config, key);
  if (!value) return {};
  if (value->is_string()) return value->get<std::string>();
  if (value->is_object()) return get_string(*value, "content", fmt::format("{}: {}", what, key));
  fail("{}: field '{}': expected a string or an object, found {}", what, key, describe(*value));
}

std::string chat_template_text(const Json& config, std::string_view what) {
  const Json* value = find(config, "chat_template");
  if (!value) return {};
  if (value->is_string()) return value->get<std::string>();
  if (!value->is_array())
    fail("{}: field 'chat_template': expected a string or a list, found {}", what,
         describe(*value));
  // Several by name: the one that is taken where none is asked for.
  for (const Json& item : *value) {
    if (item.is_object() && item.value("name", Json()) == "default")
      return get_string(item, "template", fmt::format("{}: chat_template", what));
  }
  return {};
}

}  // namespace

std::string byte_level_bytes(std::string_view token) {
  static const std::unordered_map<uint32_t, char> bytes = [] {
    std::unordered_map<uint32_t, char> map;
    const std::array<uint32_t, 256> alphabet = byte_level_alphabet();
    for (size_t byte = 0; byte < 256; ++byte) map[alphabet[byte]] = static_cast<char>(byte);
    return map;
  }();
  std::string out;
  const char* p = token.data();
  const char* const end = p + token.size();
  while (p < end) {
    const auto it = bytes.find(next_codepoint(p));
    if (it == bytes.end()) return std::string(token);
    out += it->second;
  }
  return out;
}

TokenizerFile read_tokenizer_file(std::string_view json, std::string_view what) {
  const Json root = parse_json(json, what);
  if (!root.is_object()) fail("{}: expected an object, found {}", what, describe(root));
  // Both would change what encode() gives.
  for (const char* key : {"truncation", "padding"}) require_unset(root, key, what);
  if (const Json* normalizer = find(root, "normalizer")) {
    const std::string type = get_string(*normalizer, "type", fmt::format("{}: normalizer", what));
    const Json* list = find(*normalizer, "normalizers");
    if (type != "Sequence" || !list || !list->empty())
      fail("{}: field 'normalizer': expected none or an empty Sequence, found {}", what,
           normalizer->dump());
  }
  for (const char* key : {"post_processor", "decoder"}) {
    const Json* value = find(root, key);
    if (value) require_type(*value, "ByteLevel", fmt::format("{}: {}", what, key));
    if (!value && std::string_view(key) == "decoder")
      fail("{}: field 'decoder': expected ByteLevel, found nothing", what);
  }
  const Json* model = find(root, "model");
  if (!model) fail("{}: field 'model': expected an object, found nothing", what);

  TokenizerFile file;
  ModelReader reader{*model, fmt::format("{}: model", what), file, {}};
  reader.read();
  read_pre_tokenizer(root, what, file);
  read_added(root, what, file, reader.ids);
  return file;
}

TokenizerConfig read_tokenizer_config(std::string_view json, std::string_view what) {
  TokenizerConfig config;
  if (json.empty()) return config;
  const Json root = parse_json(json, what);
  config.add_bos = find_bool(root, "add_bos_token", what).value_or(false);
  config.bos_text = token_text(root, "bos_token", what);
  config.eos_text = token_text(root, "eos_token", what);
  config.chat_template = chat_template_text(root, what);
  // Both would change texts: the one prompts, the other what is generated.
  require_bool(root, "add_eos_token", false, false, what);
  require_bool(root, "clean_up_tokenization_spaces", false, false, what);
  return config;
}

}  // namespace mla
