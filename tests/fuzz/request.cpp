// Lines of an input file. The first byte chooses the reader's options.
#include "lib/batch/request.h"

#include <cmath>
#include <sstream>

#include "lib/text/utf8.h"
#include "tests/fuzz/fuzz.h"

namespace mla {
namespace {

void check_ids(const std::vector<int32_t>& ids, const ReaderOptions& options) {
  for (const int32_t id : ids) FUZZ_CHECK(id >= 0 && id < options.vocab_size);
}

void check_sampling(const SamplingParams& p, const ReaderOptions& options) {
  FUZZ_CHECK(std::isfinite(p.temperature) && p.temperature >= 0);
  FUZZ_CHECK(p.top_p > 0 && p.top_p <= 1);
  FUZZ_CHECK(p.top_k >= -1);
  FUZZ_CHECK(p.min_p >= 0 && p.min_p <= 1);
  for (const float penalty : {p.presence_penalty, p.frequency_penalty})
    FUZZ_CHECK(penalty >= -2 && penalty <= 2);
  FUZZ_CHECK(p.repetition_penalty > 0 && p.repetition_penalty <= 2);
  FUZZ_CHECK(p.n >= 1 && p.n <= kMaxChoices);
  int32_t before = -1;
  for (const auto& [token, bias] : p.logit_bias) {
    FUZZ_CHECK(token > before && token < options.vocab_size);
    FUZZ_CHECK(bias >= -100 && bias <= 100);
    before = token;
  }
  FUZZ_CHECK(p.min_tokens >= 0);
  if (p.max_tokens) FUZZ_CHECK(*p.max_tokens >= 1 && p.min_tokens <= *p.max_tokens);
  if (p.logprobs) FUZZ_CHECK(*p.logprobs >= 0 && *p.logprobs <= kMaxLogprobs);
  FUZZ_CHECK(p.stop.size() <= kMaxStopStrings);
  FUZZ_CHECK(p.stop.empty() || options.has_tokenizer);
  for (const std::string& text : p.stop) FUZZ_CHECK(!text.empty());
  check_ids(p.stop_token_ids, options);
}

void check(const Request& request, const ReaderOptions& options) {
  FUZZ_CHECK(request.id.is_string() || request.id.is_number_integer());
  check_sampling(request.sampling, options);
  if (const auto* ids = std::get_if<std::vector<int32_t>>(&request.prompt)) {
    FUZZ_CHECK(!ids->empty());
    check_ids(*ids, options);
    return;
  }
  FUZZ_CHECK(options.has_tokenizer);
  if (const auto* text = std::get_if<std::string>(&request.prompt)) {
    FUZZ_CHECK(!text->empty());
    FUZZ_CHECK(find_invalid_utf8(*text) == std::string_view::npos);
    FUZZ_CHECK(request.sampling.max_tokens.has_value());
  } else {
    FUZZ_CHECK(!std::get<std::vector<ChatMessage>>(request.prompt).empty());
  }
}

// It has to be possible to write the error record.
void check(const BadLine& bad) {
  FUZZ_CHECK(!bad.code.empty());
  FUZZ_CHECK(bad.message.starts_with("line " + std::to_string(bad.line)));
  FUZZ_CHECK(bad.message.size() < 1000);
  FUZZ_CHECK(find_invalid_utf8(bad.message) == std::string_view::npos);
  bad.id.dump();
}

}  // namespace
}  // namespace mla

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla;
  if (size == 0) return 0;
  ReaderOptions options;
  options.vocab_size = data[0] & 1 ? 1000 : 102400;
  options.has_tokenizer = !(data[0] & 2);
  if (data[0] & 4) options.max_line_bytes = 300;
  if (data[0] & 8) options.defaults.max_tokens = 7;
  const std::string text(fuzz::as_text(data + 1, size - 1));
  std::istringstream in(text);
  RequestReader reader(in, "fuzz", options);
  int64_t index = 0, line = 0;
  const auto check_place = [&](const auto& record) {
    FUZZ_CHECK(record.index == index);
    FUZZ_CHECK(record.line > line);
    line = record.line;
  };
  // No line makes the whole input unreadable.
  FUZZ_CHECK(fuzz::parses([&] {
    for (; const auto record = reader.next(); ++index) {
      std::visit(check_place, *record);
      if (const auto* request = std::get_if<Request>(&*record)) check(*request, options);
      if (const auto* bad = std::get_if<BadLine>(&*record)) check(*bad);
    }
  }));
  FUZZ_CHECK(reader.records() == index);
  FUZZ_CHECK(reader.bytes_read() == static_cast<int64_t>(text.size()));
  for (const auto& [name, field] : reader.unknown_fields()) {
    FUZZ_CHECK(find_invalid_utf8(name) == std::string_view::npos);
    FUZZ_CHECK(field.lines >= 1 && field.first_line >= 1);
  }
  return 0;
}
