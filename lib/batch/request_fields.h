// The fields that lines may have, by the form of the line. Used by the reader only.
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

// The field's value; null pointer where it is absent or null.
const Json* find_field(const Json& object, const char* key);

[[noreturn]] void refuse_field(const char* key, const std::string& expected, const Json& found,
                               std::string_view what);
[[noreturn]] void refuse_unsupported(std::string_view what, const std::string& message);

// Refuses fields of other programs that this one does not support, unless they have their neutral
// value.
// `body`: the line itself, or the body of an OpenAI line.
void check_unserved(const Json& body, Form form, AddBos add_bos, std::string_view what);

// Names of the line's fields that mean nothing here: those of messages as "messages[].name", those
// of an OpenAI line's body as "body.name".
std::vector<std::string> unknown_field_names(const Json& line, Form form);

}  // namespace mla
