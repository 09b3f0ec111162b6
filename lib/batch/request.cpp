#include "lib/batch/request.h"

#include <array>
#include <utility>

#include "lib/base/error.h"
#include "lib/batch/request_fields.h"
#include "lib/batch/request_parse.h"
#include "lib/text/utf8.h"

namespace mla {
namespace {

constexpr size_t kMaxUnknownNames = 100;
constexpr std::string_view kBom = "\xef\xbb\xbf";

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

Json parse_line_json(std::string_view line, std::string_view what) {
  // The parser would pass over one.
  if (line.starts_with(kBom))
    throw RequestError(
        error_code::kInvalidJson,
        fmt::format("{}: expected a JSON object, found a byte order mark (U+FEFF): one may stand "
                    "at the start of the input alone",
                    what));
  Json value;
  try {
    value = parse_json(line, what);
  } catch (const Error& e) {
    throw RequestError(error_code::kInvalidJson, e.what());
  }
  if (!value.is_object()) fail("{}: expected a JSON object, found {}", what, describe(value));
  return value;
}

std::optional<std::string> answer_of(const Json& object, bool openai) {
  const Json* body = openai ? find_field(object, "body") : &object;
  const Json* answer = body && body->is_object() ? find_field(*body, "answer") : nullptr;
  if (!answer || !answer->is_string()) return std::nullopt;
  return answer->get<std::string>();
}

std::string_view last_component(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

BadLine make_bad_line(const Request& request, std::string_view code, std::string_view message) {
  return {.index = request.index,
          .line = request.line,
          .openai = request.form != Form::simple,
          .id = request.id,
          .code = std::string(code),
          .message = clean(fmt::format("line {}: {}", request.line, message)),
          .answer = request.answer};
}

RequestReader::RequestReader(std::istream& in, std::string what, ReaderOptions options)
    : in_(in), what_(std::move(what)), options_(std::move(options)) {
  if (options_.vocab_size < 1)
    fail("vocab_size: expected at least 1, found {}", options_.vocab_size);
}

RequestReader::Read RequestReader::read_line(bool may_wait) {
  if (!begun_) {
    line_.clear();
    too_long_ = false;
  }
  std::array<char, 4096> buffer;
  size_t filled = 0;
  bool newline = false, waits = false;
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
      waits = !may_wait && options_.ready && source->in_avail() <= 0 && !options_.ready();
      if (waits) break;
      const int c = source->sbumpc();
      if (c == std::char_traits<char>::eof()) break;
      begun_ = true;
      newline = c == '\n';
      buffer[filled++] = static_cast<char>(c);
      if (filled == buffer.size()) flush();
    }
  } catch (const std::ios_base::failure& e) {
    fail("{}: cannot be read after line {}: {}", what_, line_number_, e.what());
  }
  if (filled > 0) flush();
  if (waits) return Read::waits;
  if (!begun_) return Read::end;
  begun_ = false;
  ++line_number_;
  return Read::line;
}

void RequestReader::claim_id(const Json& id) {
  const std::string text = id.dump();
  if (!ids_.insert(text).second) {
    throw RequestError(error_code::kDuplicateId,
                       fmt::format("line {}: duplicate id: expected a new one, found {} again",
                                   line_number_, describe(id)));
  }
}

void RequestReader::note(std::map<std::string, UnknownField>& fields, std::string_view name) const {
  const std::string key = clean(name);
  auto it = fields.find(key);
  if (it == fields.end() && fields.size() >= kMaxUnknownNames) return;
  if (it == fields.end()) it = fields.insert({key, {.first_line = line_number_}}).first;
  ++it->second.lines;
}

void RequestReader::note_model(const Json& body) {
  const Json* model = find_field(body, "model");
  if (!model || !model->is_string() || options_.model.empty()) return;
  const auto& name = model->get_ref<const std::string&>();
  if (last_component(name) != last_component(options_.model)) note(other_models_, name);
}

Request RequestReader::parse_object(const Json& object, BadLine& bad, const std::string& what) {
  bad.openai = openai_ = is_openai_line(object);
  bad.answer = answer_of(object, bad.openai);
  bad.id = bad.openai ? parse_custom_id(object, what) : parse_id(object, line_number_, what);
  claim_id(bad.id);
  const Form form = bad.openai ? parse_url(object, what) : Form::simple;
  const Json& body = bad.openai ? object.at("body") : object;
  Request request = parse_request(body, form, options_, bad.openai ? what + ": body" : what);
  request.form = form;
  request.model = last_component(options_.model);
  for (const std::string& name : unknown_field_names(object, form)) note(unknown_, name);
  if (bad.openai) note_model(body);
  return request;
}

Record RequestReader::parse_line(int64_t index) {
  const std::string what = fmt::format("line {}", line_number_);
  // A line that cannot be read is answered in the form it seems to have, else in that of the last
  // one before it: a reader of either form finds records of its form only.
  const bool seems_openai = openai_ || line_.find("\"custom_id\"") != std::string::npos;
  BadLine bad{.index = index, .line = line_number_, .openai = seems_openai};
  try {
    if (too_long_) {
      throw RequestError(
          error_code::kLineTooLong,
          fmt::format("{}: expected at most {} bytes, found more", what, options_.max_line_bytes));
    }
    check_utf8(line_, what);
    Request request = parse_object(parse_line_json(line_, what), bad, what);
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

RequestReader::Read RequestReader::advance(bool may_wait) {
  while (read_ == Read::waits) {
    const Read read = read_line(may_wait);
    if (read == Read::waits) break;
    if (read == Read::line) {
      if (line_number_ == 1 && line_.starts_with(kBom)) line_.erase(0, kBom.size());
      if (!too_long_ && is_blank(line_)) continue;
    }
    read_ = read;
  }
  return read_;
}

bool RequestReader::ready() { return advance(false) != Read::waits; }

std::optional<Record> RequestReader::next() {
  if (advance(true) == Read::end) return std::nullopt;
  read_ = Read::waits;
  Record record = parse_line(records_);
  ++records_;
  return record;
}

}  // namespace mla
