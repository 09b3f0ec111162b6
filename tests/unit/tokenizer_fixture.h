// A small byte-level tokenizer, made in place: 256 bytes as ids 0 to 255 and a few merges.
#pragma once

#include <string>
#include <vector>

#include "lib/base/json.h"
#include "lib/text/tokenizer.h"
#include "lib/text/utf8.h"

namespace mla::test {

// GPT-2's byte alphabet, written out a second time.
inline std::string byte_text(int byte) {
  int c = byte;
  if (byte <= 0x20) c = 0x100 + byte;                         // Ā … Ġ
  if (byte >= 0x7F && byte <= 0xA0) c = 0x121 + byte - 0x7F;  // ġ … ł
  if (byte == 0xAD) c = 0x143;                                // Ń
  std::string out;
  append_utf8(static_cast<uint32_t>(c), out);
  return out;
}

inline Json split_stage(const std::string& regex) {
  return {{"type", "Split"},
          {"pattern", {{"Regex", regex}}},
          {"behavior", "Isolated"},
          {"invert", false}};
}

inline Json small_added(int id, const std::string& content, bool special) {
  return {{"id", id},        {"content", content}, {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", true}, {"special", special}};
}

// Merges as "a b"; each result gets the next id from 256 on unless it has one.
inline Json small_tokenizer(const std::vector<std::string>& merges) {
  Json vocab = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[byte_text(byte)] = byte;
  int next = 256;
  for (const std::string& merge : merges) {
    std::string token = merge;
    token.erase(token.find(' '), 1);
    if (!vocab.contains(token)) vocab[token] = next++;
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", Json::array()},
          {"normalizer", {{"type", "Sequence"}, {"normalizers", Json::array()}}},
          {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", Json::array({byte_level})}}},
          {"post_processor", byte_level},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"vocab", vocab},
            {"merges", merges}}}};
}

// Puts splits before the ByteLevel stage.
inline void set_stages(Json& tokenizer, std::vector<Json> stages) {
  Json& list = tokenizer["pre_tokenizer"]["pretokenizers"];
  stages.push_back(list.back());
  list = stages;
}

inline Tokenizer make_tokenizer(const Json& json, const std::string& config = "") {
  return Tokenizer::parse(json.dump(), config, "t.json");
}

}  // namespace mla::test
