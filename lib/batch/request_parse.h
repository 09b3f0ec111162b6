// From a parsed line to a Request. Used by the reader only.
#pragma once

#include <string>
#include <string_view>

#include "lib/base/json.h"
#include "lib/batch/request.h"

namespace mla {

// What the functions below throw is Error (invalid_request) or RequestError. `what`: "line 7".

// The id of a line of the simple form, `line` where it has none.
Json parse_id(const Json& object, int64_t line, std::string_view what);

// A line is of the OpenAI batch form where it has a field of it.
bool is_openai_line(const Json& object);
Json parse_custom_id(const Json& object, std::string_view what);
// Checks method, url and that the body is an object.
Form parse_url(const Json& object, std::string_view what);

// Prompt, sampling and answer. `body`: the line itself, or the body of an OpenAI line.
Request parse_request(const Json& body, Form form, const ReaderOptions& options,
                      std::string_view what);

}  // namespace mla
