// Turns generated tokens into text one by one, and finds stop strings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/text/tokenizer.h"

namespace mla {

// Text released so far never changes: an incomplete UTF-8 sequence and a suffix that could begin a
// stop string are held back until it is known what they are.
class Detokenizer {
 public:
  // `tokenizer` may be null (a checkpoint without tokenizer.json): then there is no text and
  // `stop` must be empty. Stop strings are not empty. Throws Error otherwise. The tokenizer
  // outlives the detokenizer.
  Detokenizer(const Tokenizer* tokenizer, std::vector<std::string> stop);

  // Adds a token; special tokens and ids without a token add no text. True when a stop string is
  // complete: text() then ends before it, stop_string() names it, and nothing may be pushed any
  // more. Of several the one that is complete first wins, then the one given first, however the
  // text falls into tokens. Without match_stops (output shorter than min_tokens) none is complete,
  // but one may begin.
  bool push(int32_t token, bool match_stops = true);

  // No more tokens come: releases what was held back; an incomplete UTF-8 tail becomes U+FFFD.
  // Without a stop, text() is then what Tokenizer::decode() gives for all the tokens.
  void finish();

  const std::string& text() const;         // released text
  const std::string& stop_string() const;  // the one found, or ""

 private:
  bool find_stop();
  size_t held_back() const;

  const Tokenizer* tokenizer_;
  std::vector<std::string> stop_;
  size_t longest_stop_ = 0;
  std::string bytes_;     // an incomplete UTF-8 sequence
  std::string held_;      // text after text_ that is not released yet
  size_t unmatched_ = 0;  // bytes at the front of held_ where no stop string may end
  std::string text_, stop_string_;
  bool stopped_ = false;
};

}  // namespace mla
