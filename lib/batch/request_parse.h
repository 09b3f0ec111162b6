// From a parsed line to a Request, the simple form. Used by the reader only.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "lib/batch/request.h"

namespace mla {

// A mistake of one line; `code` is one of error_code.
class RequestError : public Error {
 public:
  RequestError(const char* code, const std::string& message) : Error(message), code_(code) {}
  const char* code() const { return code_; }

 private:
  const char* code_;
};

// What the functions below throw is Error (invalid_request) or RequestError. `what`: "line 7".

// The id of the line, `line` where it has none.
Json parse_id(const Json& object, int64_t line, std::string_view what);

// Everything but index, line and id.
Request parse_request(const Json& object, const ReaderOptions& options, std::string_view what);

// Names of the object's fields, those of its messages as "messages[].name", that mean nothing here.
std::vector<std::string> unknown_field_names(const Json& object);

}  // namespace mla
