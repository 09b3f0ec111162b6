#include "lib/text/detokenizer.h"

#include <algorithm>

#include "lib/base/error.h"
#include "lib/text/utf8.h"

namespace mla {

Detokenizer::Detokenizer(const Tokenizer* tokenizer, std::vector<std::string> stop)
    : tokenizer_(tokenizer), stop_(std::move(stop)) {
  if (!tokenizer_ && !stop_.empty())
    fail("stop: expected no stop strings for a model without tokenizer.json, found {}",
         stop_.size());
  for (const std::string& text : stop_) {
    if (text.empty()) fail("stop: expected text, found an empty string");
    longest_stop_ = std::max(longest_stop_, text.size());
  }
}

bool Detokenizer::push(int32_t token, bool match_stops) {
  if (stopped_) fail("a token came after the stop string \"{}\"", stop_string_);
  if (!tokenizer_) return false;
  bytes_ += tokenizer_->token_bytes(token);
  const size_t before = held_.size();
  bytes_.erase(0, append_utf8_lossy(bytes_, false, held_));
  if (held_.size() == before) return false;
  if (!match_stops) unmatched_ = held_.size();
  if (find_stop()) return true;
  const size_t released = held_.size() - held_back();
  text_.append(held_, 0, released);
  held_.erase(0, released);
  unmatched_ -= std::min(unmatched_, released);
  return false;
}

// Text that was released cannot take part: it would have been held as the beginning of a stop.
bool Detokenizer::find_stop() {
  size_t end = held_.size() + 1;
  const std::string* found = nullptr;
  for (const std::string& text : stop_) {
    const size_t from = unmatched_ >= text.size() ? unmatched_ - text.size() + 1 : 0;
    const size_t at = held_.find(text, from);
    if (at == std::string::npos || at + text.size() >= end) continue;
    end = at + text.size();
    found = &text;
  }
  if (!found) return false;
  text_.append(held_, 0, end - found->size());
  stop_string_ = *found;
  stopped_ = true;
  held_.clear();
  bytes_.clear();
  return true;
}

// Bytes of the longest end of held_ with which a stop string begins.
size_t Detokenizer::held_back() const {
  if (longest_stop_ == 0) return 0;
  for (size_t size = std::min(held_.size(), longest_stop_ - 1); size > 0; --size) {
    const std::string_view end = std::string_view(held_).substr(held_.size() - size);
    for (const std::string& text : stop_) {
      if (text.size() > size && std::string_view(text).starts_with(end)) return size;
    }
  }
  return 0;
}

void Detokenizer::finish() {
  append_utf8_lossy(bytes_, true, held_);
  bytes_.clear();
  text_ += held_;
  held_.clear();
}

const std::string& Detokenizer::text() const { return text_; }
const std::string& Detokenizer::stop_string() const { return stop_string_; }

}  // namespace mla
