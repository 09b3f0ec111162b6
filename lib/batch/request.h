// Requests of a JSONL file, read one by one; a line that is not a request becomes a BadLine.
#pragma once

#include <cstdint>
#include <functional>
#include <istream>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "lib/base/json.h"
#include "lib/batch/hash.h"
#include "lib/text/chat_template.h"

namespace mla {

inline constexpr int32_t kDefaultMaxTokens = 16;  // of text and token prompts, as vLLM
inline constexpr int kMaxLogprobs = 20;
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr int32_t kMaxChoices = 128;  // of a request, as OpenAI

// Whether a text prompt gets a BOS in front: as the tokenizer's add_bos_token says, always, never.
// One that has it already gets no second one.
enum class AddBos : uint8_t { automatic, always, never };

struct SamplingParams {
  float temperature = 0;  // 0: greedy; finite, >= 0
  int32_t top_k = 0;      // 0 or -1: off
  float top_p = 1;        // (0, 1]
  float min_p = 0;        // [0, 1]
  // [-2, 2], as OpenAI: of tokens that were generated, once, and for each time.
  float presence_penalty = 0, frequency_penalty = 0;
  // (0, 2]: of tokens of the prompt and those generated. vLLM takes any number above 0; above 2 it
  // is more likely 11 for 1.1 than meant.
  float repetition_penalty = 1;
  // Added to the logits of the tokens: distinct ids inside the vocabulary, ascending; [-100, 100].
  std::vector<std::pair<int32_t, float>> logit_bias;
  int32_t n = 1;  // choices, 1 .. kMaxChoices
  // >= 1, or 0 with echo: nothing is generated. As a default of the reader: what the command line
  // says, if it does. In a Request: absent (a chat line that does not say) means the rest of the
  // model length.
  std::optional<int32_t> max_tokens;
  int32_t min_tokens = 0;         // 0 .. max_tokens
  std::optional<int64_t> seed;    // of this request; absent: the run's
  std::vector<std::string> stop;  // non-empty strings, at most kMaxStopStrings
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  std::optional<int32_t> logprobs, prompt_logprobs;  // 0 .. kMaxLogprobs

  // Of the prompt and the record.
  AddBos add_bos = AddBos::automatic;
  bool return_token_ids = false;  // the prompt's, in the record
  bool echo = false;  // completions: the prompt in front of the text, and of the logprobs
};

// The codes of error records that this library gives; the engine adds its own.
namespace error_code {
inline constexpr const char* kInvalidUtf8 = "invalid_utf8";
inline constexpr const char* kInvalidJson = "invalid_json";  // not JSON, or a key twice
inline constexpr const char* kLineTooLong = "line_too_long";
inline constexpr const char* kDuplicateId = "duplicate_id";
inline constexpr const char* kInvalidRequest = "invalid_request";
inline constexpr const char* kUnsupported = "unsupported";
inline constexpr const char* kContextLength = "context_length_exceeded";  // prompt too long
inline constexpr const char* kNotFinite = "logits_not_finite";
}  // namespace error_code

// Of a line, and so of the record that answers it: this program's own, or that of the OpenAI batch
// API for /v1/completions or /v1/chat/completions.
enum class Form : uint8_t { simple, completion, chat };

using Prompt = std::variant<std::string, std::vector<int32_t>, std::vector<ChatMessage>>;

struct Request {
  int64_t index = 0;  // of the record, from 0; blank lines do not count
  int64_t line = 0;   // physical, from 1
  Form form = Form::simple;
  Json id;            // a string or an integer; by default the line number; custom_id of OpenAI's
  std::string model;  // the name that an OpenAI record gives
  Prompt prompt;      // not empty; token ids are inside the vocabulary
  SamplingParams sampling;
  std::optional<std::string> answer;
};

struct BadLine {
  int64_t index = 0;
  int64_t line = 0;
  bool openai = false;                // the form of its record
  Json id;                            // null where it could not be read
  std::string code;                   // one of error_code
  std::string message;                // "line 7: field 'top_p': expected …, found …"
  std::optional<std::string> answer;  // the line's, where it has one that could be read
};

// For a request that turns out later not to be served; the message gets "line N: " in front.
BadLine make_bad_line(const Request& request, std::string_view code, std::string_view message);

struct ReaderOptions {
  SamplingParams defaults;    // of lines that do not say
  std::string model;          // its path or name; OpenAI lines that name another one are noted
  int64_t vocab_size = 0;     // token ids lie in [0, vocab_size)
  bool has_tokenizer = true;  // false: text, messages and stop strings are bad lines
  size_t max_line_bytes = size_t{64} << 20;
  // Of a stream whose reader may have to wait: whether it has a byte, or its end, at once. Empty:
  // it always has.
  std::function<bool()> ready;
};

using Record = std::variant<Request, BadLine>;

// Blank lines are skipped, a BOM and CRLF are fine. Keeps one line and the ids seen, nothing more.
class RequestReader {
 public:
  // `what` names the stream in I/O errors. The stream outlives the reader.
  RequestReader(std::istream& in, std::string what, ReaderOptions options);

  // The next record; nothing at the end. Throws Error only when the stream cannot be read.
  std::optional<Record> next();
  // Whether next() would not wait. What is there of a line is read.
  bool ready();

  struct UnknownField {
    int64_t first_line = 0;
    int64_t lines = 0;
  };
  // Fields that no line may have, by name, so far; at most 100 names are kept.
  const std::map<std::string, UnknownField>& unknown_fields() const { return unknown_; }

  // Models that OpenAI lines name and that are not this one, likewise.
  const std::map<std::string, UnknownField>& other_models() const { return other_models_; }

  int64_t records() const { return records_; }  // returned so far
  int64_t bytes_read() const { return hash_.bytes(); }
  std::string input_hash() const { return hash_.hex(); }  // SHA-256 of the bytes read so far

 private:
  enum class Read : uint8_t { line, end, waits };
  // To a line that is not blank, or the end; `waits` only where it may not wait.
  Read advance(bool may_wait);
  // Into line_, without the newline; goes on with one that was begun.
  Read read_line(bool may_wait);
  Record parse_line(int64_t index);
  Request parse_object(const Json& object, BadLine& bad, const std::string& what);
  void claim_id(const Json& id);
  void note(std::map<std::string, UnknownField>& fields, std::string_view name) const;
  void note_model(const Json& body);

  std::istream& in_;
  std::string what_;
  ReaderOptions options_;
  std::string line_;
  bool begun_ = false, too_long_ = false;  // of the line
  Read read_ = Read::waits;                // line: the next record's is in line_
  int64_t line_number_ = 0;
  int64_t records_ = 0;
  std::unordered_set<std::string> ids_;  // as JSON text, so that 1 and "1" differ
  std::map<std::string, UnknownField> unknown_, other_models_;
  bool openai_ = false;  // the last line that could be read was of that form
  Sha256 hash_;
};

}  // namespace mla
