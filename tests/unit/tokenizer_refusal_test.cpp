// Every refusal of tokenizer.json and tokenizer_config.json names the place and what was found.
#include "lib/base/error.h"
#include "tests/support/catch.h"
#include "tests/unit/tokenizer_fixture.h"

namespace mla::test::tokenizer_refusal_test {

using mla::Json;
using mla::test::make_tokenizer;
using mla::test::set_stages;
using mla::test::small_added;
using mla::test::small_tokenizer;
using mla::test::split_stage;

namespace {

std::string error_of(const Json& json, const std::string& config = "") {
  try {
    make_tokenizer(json, config);
  } catch (const mla::Error& e) {
    return e.what();
  }
  return "(no error)";
}

// The error after one field, named by its JSON pointer, is replaced.
std::string with(const std::string& pointer, const Json& value) {
  Json json = small_tokenizer({"a b"});
  json["added_tokens"] = {small_added(300, "<s>", true), small_added(301, "<t>", true)};
  json["pre_tokenizer"]["pretokenizers"].insert(json["pre_tokenizer"]["pretokenizers"].begin(),
                                                split_stage("x"));
  json[Json::json_pointer(pointer)] = value;
  return error_of(json);
}

std::string with_regex(const std::string& regex) {
  return with("/pre_tokenizer/pretokenizers/0/pattern/Regex", regex);
}

}  // namespace

TEST_CASE("A model that is not this form of BPE is refused") {
  CHECK(with("/model/type", "Unigram") ==
        "t.json: model: field 'type': expected \"BPE\", found \"Unigram\"");
  CHECK(with("/model", nullptr) == "t.json: field 'model': expected an object, found nothing");
  CHECK(with("/model/byte_fallback", true) ==
        "t.json: model: field 'byte_fallback': true is not supported");
  CHECK(with("/model/ignore_merges", true) ==
        "t.json: model: field 'ignore_merges': true is not supported");
  CHECK(with("/model/unk_token", "<unk>") ==
        "t.json: model: field 'unk_token': the string \"<unk>\" is not supported");
  CHECK(with("/model/dropout", 0.5) ==
        "t.json: model: field 'dropout': the number 0.5 is not supported");
  CHECK(with("/model/continuing_subword_prefix", "##") ==
        "t.json: model: field 'continuing_subword_prefix': the string \"##\" is not supported");
  CHECK(with("/model/end_of_word_suffix", "</w>") ==
        "t.json: model: field 'end_of_word_suffix': the string \"</w>\" is not supported");
  CHECK(with("/model/byte_fallback", false) == "(no error)");
}

TEST_CASE("A vocabulary that contradicts itself is refused") {
  CHECK(with("/model/vocab", Json::array()) ==
        "t.json: model: field 'vocab': expected an object with tokens, found a list");
  CHECK(with("/model/vocab/zz", 'a') == "t.json: model.vocab: tokens 'a' and 'zz' both have id 97");
  CHECK(with("/model/vocab/zz", -1) ==
        "t.json: model.vocab: token 'zz': expected an id from 0 to 1048575, found the number -1");
  CHECK(with("/model/vocab/zz", 1 << 30) ==
        "t.json: model.vocab: token 'zz': expected an id from 0 to 1048575, found the number "
        "1073741824");
  // The table of ids would take 32 bytes each: of a file of a few bytes, half a GiB at 2^24.
  CHECK(with("/model/vocab/zz", 1 << 20) ==
        "t.json: model.vocab: token 'zz': expected an id from 0 to 1048575, found the number "
        "1048576");
  CHECK(with("/model/vocab/zz", 3.5) ==
        "t.json: model.vocab: token 'zz': expected an id from 0 to 1048575, found the number 3.5");
  Json json = small_tokenizer({});
  json["model"]["vocab"].erase("q");
  CHECK(error_of(json) == "t.json: model.vocab: no token 'q' for the byte 0x71");
  json = small_tokenizer({});
  json["model"]["vocab"].erase(mla::test::byte_text(0xC0));  // never in UTF-8
  CHECK(error_of(json) == "(no error)");
}

TEST_CASE("A merge that is malformed or names an unknown token is refused") {
  CHECK(with("/model/merges", "a b") ==
        "t.json: model: field 'merges': expected a list, found the string \"a b\"");
  CHECK(with("/model/merges/0", "ab") ==
        "t.json: model.merges[0]: expected two tokens with a space between, found 'ab'");
  CHECK(with("/model/merges/0", "a b c") ==
        "t.json: model.merges[0]: expected two tokens with a space between, found 'a b c'");
  CHECK(with("/model/merges/0", Json::array({"a"})) ==
        "t.json: model.merges[0]: expected \"a b\" or [\"a\", \"b\"], found a list");
  CHECK(with("/model/merges/0", "a xyz") ==
        "t.json: model.merges[0]: token 'xyz' is not in the vocabulary");
  CHECK(with("/model/merges/0", "b a") ==
        "t.json: model.merges[0]: token 'ba' is not in the vocabulary");
}

TEST_CASE("A normalizer and other steps that change texts or ids are refused") {
  CHECK(with("/normalizer", {{"type", "NFC"}}) ==
        "t.json: field 'normalizer': expected none or an empty Sequence, found {\"type\":\"NFC\"}");
  CHECK(with("/normalizer/normalizers", Json::array({Json{{"type", "NFC"}}})) ==
        "t.json: field 'normalizer': expected none or an empty Sequence, found "
        "{\"normalizers\":[{\"type\":\"NFC\"}],\"type\":\"Sequence\"}");
  CHECK(with("/normalizer", nullptr) == "(no error)");
  CHECK(with("/truncation", Json{{"max_length", 5}}) ==
        "t.json: field 'truncation': an object is not supported");
  CHECK(with("/padding", Json{{"pad_id", 5}}) ==
        "t.json: field 'padding': an object is not supported");
  CHECK(with("/post_processor/type", "TemplateProcessing") ==
        "t.json: post_processor: field 'type': expected \"ByteLevel\", found "
        "\"TemplateProcessing\"");
  CHECK(with("/decoder/type", "Metaspace") ==
        "t.json: decoder: field 'type': expected \"ByteLevel\", found \"Metaspace\"");
  CHECK(with("/decoder", nullptr) == "t.json: field 'decoder': expected ByteLevel, found nothing");
}

TEST_CASE("An unknown pre-tokenizer or behaviour is refused") {
  const std::string stage = "t.json: pre_tokenizer.pretokenizers[0]";
  const std::string path = "/pre_tokenizer/pretokenizers/0";
  CHECK(with("/pre_tokenizer", nullptr) ==
        "t.json: pre_tokenizer: expected an object, found nothing");
  CHECK(with("/pre_tokenizer/pretokenizers", Json::array()) ==
        "t.json: pre_tokenizer: expected ByteLevel at the end, found none");
  CHECK(with(path + "/type", "Metaspace") ==
        stage + ": field 'type': expected Split, Digits or ByteLevel, found \"Metaspace\"");
  CHECK(with(path + "/behavior", "Removed") ==
        stage + ": field 'behavior': expected \"Isolated\", found \"Removed\"");
  CHECK(with(path + "/invert", true) == stage + ": field 'invert': true is not supported");
  CHECK(with(path + "/pattern", Json{{"String", "x"}}) ==
        stage + ": field 'pattern': expected {\"Regex\": …}, found {\"String\":\"x\"}");
  CHECK(with(path, Json{{"type", "Digits"}}) ==
        stage + ": field 'individual_digits': expected true or false, found nothing");
  CHECK(with(path, Json{{"type", "ByteLevel"}, {"add_prefix_space", false}}) ==
        "t.json: pre_tokenizer.pretokenizers[1]: expected nothing after ByteLevel");
  CHECK(with("/pre_tokenizer/pretokenizers/1/add_prefix_space", true) ==
        "t.json: pre_tokenizer.pretokenizers[1]: field 'add_prefix_space': true is not supported");
}

TEST_CASE("A pattern that the engines understand differently is refused") {
  const std::string stage = "t.json: pre_tokenizer.pretokenizers[0]: pattern ";
  CHECK(with_regex("\\w+") == stage + "'\\w+': '\\w' is not supported");
  CHECK(with_regex("a\\") == stage + "'a\\': '\\' is not supported");
  CHECK(with_regex("[a[b]]") == stage + "'[a[b]]': '[' is not supported");
  CHECK(with_regex("[a-z&&x]") == stage + "'[a-z&&x]': '&&' is not supported");
  CHECK(with_regex("(?i:a)") == stage + "'(?i:a)': '(?i' is not supported");
  CHECK(with_regex("(*UCP)a") == stage + "'(*UCP)a': '(*' is not supported");
  CHECK(with_regex("[\\S]") == stage + "'[\\S]': '\\S' is not supported");
  CHECK(with_regex("[]a]") == stage + "'[]a]': '[]' is not supported");
  CHECK(with_regex("a*") == stage + "'a*' can match no text at all");
  CHECK(with_regex("(a").rfind(stage + "'(a': ", 0) == 0);
  CHECK(with_regex("(?:a|\\s+(?!\\S))\\p{L}") == "(no error)");
}

TEST_CASE("An added token that cannot be honoured is refused") {
  CHECK(with("/added_tokens", Json::object()) ==
        "t.json: field 'added_tokens': expected a list, found an object");
  for (const char* key : {"single_word", "lstrip", "rstrip"})
    CHECK(with(std::string("/added_tokens/0/") + key, true) ==
          "t.json: added_tokens[0]: field '" + std::string(key) + "': true is not supported");
  CHECK(with("/added_tokens/1/id", 300) ==
        "t.json: added_tokens[1]: tokens '<s>' and '<t>' both have id 300");
  CHECK(with("/added_tokens/1/content", "<s>") ==
        "t.json: added_tokens[1]: token '<s>' is listed twice");
  CHECK(with("/added_tokens/0/content", "") ==
        "t.json: added_tokens[0]: field 'content': expected text, found none");
  CHECK(with("/added_tokens/0/id", -1) ==
        "t.json: added_tokens[0]: field 'id': expected 0 to 1048575, found -1");
  CHECK(with("/added_tokens/0/id", 97) ==
        "t.json: added_tokens[0]: id 97 of '<s>' is that of another token in the vocabulary");
  CHECK(with("/added_tokens/0/content", "a") ==
        "t.json: added_tokens[0]: token 'a': expected the vocabulary's id 97, found 300");
  CHECK(with("/added_tokens/0", small_added('a', "a", false)) == "(no error)");
}

TEST_CASE("A configuration that changes texts or names an unknown token is refused") {
  const Json json = small_tokenizer({});
  CHECK(error_of(json, R"({"add_eos_token": true})") ==
        "tokenizer_config.json: field 'add_eos_token': true is not supported");
  CHECK(error_of(json, R"({"clean_up_tokenization_spaces": true})") ==
        "tokenizer_config.json: field 'clean_up_tokenization_spaces': true is not supported");
  CHECK(error_of(json, R"({"bos_token": "<x>"})") ==
        "tokenizer_config.json: field 'bos_token': '<x>' is not a token of t.json");
  CHECK(error_of(json, R"({"add_bos_token": true})") ==
        "tokenizer_config.json: field 'add_bos_token' is true: expected a bos_token with it, found "
        "none");
  CHECK(error_of(json, R"({"eos_token": 7})") ==
        "tokenizer_config.json: field 'eos_token': expected a string or an object, found the "
        "number 7");
  CHECK(error_of(json, R"({"eos_token": {}})") ==
        "tokenizer_config.json: eos_token: field 'content': expected a string, found nothing");
  CHECK(error_of(json, R"({"chat_template": 7})") ==
        "tokenizer_config.json: field 'chat_template': expected a string or a list, found the "
        "number 7");
}

}  // namespace mla::test::tokenizer_refusal_test
