// Strict JSON on top of nlohmann-json: duplicate keys, bad UTF-8 and deep nesting are errors, and
// the typed getters say which field was expected to be what.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace mla {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Parses one document. Throws Error, its message beginning with `what` (a file or "line 7"): on a
// syntax error, bytes that are not UTF-8, a NUL byte, a key that appears twice in one object
// (named), nesting deeper than 64, anything after the document.
Json parse_json(std::string_view text, std::string_view what);
// The same, its fields in the order of the text.
OrderedJson parse_ordered_json(std::string_view text, std::string_view what);

// Reads a whole file; throws Error that names the path (missing, not a regular file, unreadable,
// larger than `max_bytes`).
std::string read_file(const std::string& path, size_t max_bytes = size_t{1} << 30);
// Whether the folder has an entry of that name. A link that leads nowhere is one: a file that was
// meant to be there is read and fails, it does not count as absent.
bool has_entry(const std::string& path);

// "an object", "a string", "the number 3.5" …: what was found, for messages.
std::string describe(const Json& value);

// Required fields. `what` names the document. Errors: "config.json: field 'hidden_size': expected
// an integer, found a string". Integers accept 3 and 3.0, and refuse 3.5, true and out-of-range.
int64_t get_int(const Json& object, const char* key, std::string_view what);
double get_number(const Json& object, const char* key, std::string_view what);
bool get_bool(const Json& object, const char* key, std::string_view what);
std::string get_string(const Json& object, const char* key, std::string_view what);

// The same for a field that may be absent or null.
std::optional<int64_t> find_int(const Json& object, const char* key, std::string_view what);
std::optional<double> find_number(const Json& object, const char* key, std::string_view what);
std::optional<bool> find_bool(const Json& object, const char* key, std::string_view what);
std::optional<std::string> find_string(const Json& object, const char* key, std::string_view what);

}  // namespace mla
