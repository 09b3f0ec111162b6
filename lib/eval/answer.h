// GSM8K answers as lm-evaluation-harness takes them out of a text and compares them (task gsm8k,
// version 3). No number is parsed: "18.0" is not "18".
#pragma once

#include <string>
#include <string_view>

namespace mla {

inline constexpr std::string_view kInvalidAnswer = "[invalid]";

// First match of `#### (\-?[0-9\.\,]+)`, its group; kInvalidAnswer where there is none.
std::string extract_strict(std::string_view text);

// Last match of `(-?[$0-9.,]{2,})|(-?[0-9]+)`; kInvalidAnswer where there is none.
std::string extract_flexible(std::string_view text);

// Without `,` and `$`, without all up to the last `#### `, without one final `.` (also before a
// final newline), ASCII letters in lower case.
std::string normalize_answer(std::string_view answer);

// The exact_match metric on an extracted prediction and the whole reference answer.
bool exact_match(std::string_view prediction, std::string_view reference);

}  // namespace mla
