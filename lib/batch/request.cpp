#include "lib/batch/request.h"

#include <array>
#include <utility>

#include "lib/base/error.h"
#include "lib/batch/request_parse.h"
#include "lib/text/utf8.h"

namespace mla {
namespace {

constexpr size_t kMaxUnknownNames = 100;

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

void check_utf8(std::string_view line, std::string_view what) {
  const size_t at = find_invalid_utf8(line);
  if (at == std::string_view::npos) return;
  throw RequestError(error_code::kInvalidUtf8,
                     fmt::format("{}: expected UTF-8, found the byte 0x{:02x} at offset {}", what,
                                 static_cast<uint8_t>(line[at]), at));
}

// A message may quote a line: what is cut out of UTF-8 becomes U+FFFD, and the end of a long one
// is left away, so that an error record can always be written.
std::string clean(std::string_view message) {
  constexpr size_t kMaxMessage = 500;
  std::string text;
  append_utf8_lossy(message.substr(0, kMaxMessage), message.size() <= kMaxMessage, text);
  return message.size() > kMaxMessage ? text + " …" : text;
}

Json parse_object(std::string_view line, std::string_view what) {
  Json value;
  try {
    value = parse_json(line, what);
  } catch (const Error& e) {
    throw RequestError(error_code::kInvalidJson, e.what());
  }
  if (!value.is_object()) fail("{}: expected a JSON object, found {}", what, describe(value));
  return value;
}

}  // namespace

BadLine make_bad_line(const Request& request, std::string_view code, std::string_view message) {
  return {.index = request.index,
          .line = request.line,
          .id = request.id,
          .code = std::string(code),
          .message = clean(fmt::format("line {}: {}", request.line, message))};
}

RequestReader::RequestReader(std::istream& in, std::string what, ReaderOptions options)
    : in_(in), what_(std::move(what)), options_(std::move(options)) {
  if (options_.vocab_size < 1)
    fail("vocab_size: expected at least 1, found {}", options_.vocab_size);
}

bool RequestReader::read_line() {
  line_.clear();
  too_long_ = false;
  std::array<char, 4096> buffer;
  size_t filled = 0;
  bool any = false, newline = false;
  const auto flush = [&] {
    const std::string_view bytes(buffer.data(), filled);
    hash_.update(bytes);
    const std::string_view text = bytes.substr(0, filled - (newline ? 1 : 0));
    too_long_ = too_long_ || line_.size() + text.size() > options_.max_line_bytes;
    if (!too_long_) line_ += text;
    filled = 0;
  };
  try {
    std::streambuf* source = in_.rdbuf();
    if (!source || in_.bad()) fail("{}: cannot be read", what_);
    while (!newline) {
      const int c = source->sbumpc();
      if (c == std::char_traits<char>::eof()) break;
      any = true;
      newline = c == '\n';
      buffer[filled++] = static_cast<char>(c);
      if (filled == buffer.size()) flush();
    }
  } catch (const std::ios_base::failure& e) {
    fail("{}: cannot be read after line {}: {}", what_, line_number_, e.what());
  }
  if (filled > 0) flush();
  if (any) ++line_number_;
  return any;
}

void RequestReader::claim_id(const Json& id) {
  const std::string text = id.dump();
  if (!ids_.insert(text).second) {
    throw RequestError(error_code::kDuplicateId,
                       fmt::format("line {}: duplicate id: expected a new one, found {} again",
                                   line_number_, describe(id)));
  }
}

void RequestReader::note_unknown_fields(const Json& object) {
  for (const std::string& field : unknown_field_names(object)) {
    const std::string name = clean(field);
    auto it = unknown_.find(name);
    if (it == unknown_.end() && unknown_.size() >= kMaxUnknownNames) continue;
    if (it == unknown_.end()) it = unknown_.insert({name, {.first_line = line_number_}}).first;
    ++it->second.lines;
  }
}

Record RequestReader::parse_line(int64_t index) {
  const std::string what = fmt::format("line {}", line_number_);
  BadLine bad{.index = index, .line = line_number_};
  try {
    if (too_long_) {
      throw RequestError(
          error_code::kLineTooLong,
          fmt::format("{}: expected at most {} bytes, found more", what, options_.max_line_bytes));
    }
    check_utf8(line_, what);
    const Json object = parse_object(line_, what);
    bad.id = parse_id(object, line_number_, what);
    claim_id(bad.id);
    Request request = parse_request(object, options_, what);
    note_unknown_fields(object);
    request.index = index;
    request.line = line_number_;
    request.id = bad.id;
    return request;
  } catch (const RequestError& e) {
    bad.code = e.code();
    bad.message = clean(e.what());
  } catch (const Error& e) {
    bad.code = error_code::kInvalidRequest;
    bad.message = clean(e.what());
  }
  return bad;
}

std::optional<Record> RequestReader::next() {
  while (read_line()) {
    if (line_number_ == 1 && line_.starts_with("\xef\xbb\xbf")) line_.erase(0, 3);
    if (!too_long_ && is_blank(line_)) continue;
    Record record = parse_line(records_);
    ++records_;
    return record;
  }
  return std::nullopt;
}

}  // namespace mla
