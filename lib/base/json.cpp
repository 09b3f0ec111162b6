#include "lib/base/json.h"

#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <set>
#include <vector>

#include "lib/base/error.h"

namespace mla {
namespace {

constexpr int kMaxDepth = 64;

const Json* find_field(const Json& object, const char* key, std::string_view what) {
  if (!object.is_object()) fail("{}: expected an object, found {}", what, describe(object));
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

const Json& require(const Json& object, const char* key, std::string_view what,
                    const char* expected) {
  const Json* value = find_field(object, key, what);
  if (!value) fail("{}: field '{}': expected {}, found nothing", what, key, expected);
  return *value;
}

int64_t as_int(const Json& value, const char* key, std::string_view what) {
  if (value.is_number_unsigned()) {
    const auto u = value.get<uint64_t>();
    if (u <= static_cast<uint64_t>(INT64_MAX)) return static_cast<int64_t>(u);
  } else if (value.is_number_integer()) {
    return value.get<int64_t>();
  } else if (value.is_number_float()) {
    const double d = value.get<double>();
    if (d == std::floor(d) && std::fabs(d) < 9.0e15) return static_cast<int64_t>(d);
  }
  fail("{}: field '{}': expected an integer, found {}", what, key, describe(value));
}

double as_number(const Json& value, const char* key, std::string_view what) {
  if (!value.is_number())
    fail("{}: field '{}': expected a number, found {}", what, key, describe(value));
  return value.get<double>();
}

bool as_bool(const Json& value, const char* key, std::string_view what) {
  if (!value.is_boolean())
    fail("{}: field '{}': expected true or false, found {}", what, key, describe(value));
  return value.get<bool>();
}

std::string as_string(const Json& value, const char* key, std::string_view what) {
  if (!value.is_string())
    fail("{}: field '{}': expected a string, found {}", what, key, describe(value));
  return value.get<std::string>();
}

}  // namespace

namespace {

template <class J>
J parse(std::string_view text, std::string_view what) {
  // To the parser a NUL is the end of the text.
  if (const size_t at = text.find('\0'); at != std::string_view::npos)
    fail("{}: not valid JSON: a NUL byte at offset {}", what, at);
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, typename J::parse_event_t event, J& parsed) {
    if (depth > kMaxDepth) fail("{}: JSON nested deeper than {}", what, kMaxDepth);
    if (event == J::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == J::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == J::parse_event_t::key) {
      const auto& key = parsed.template get_ref<const std::string&>();
      if (!keys.back().insert(key).second) fail("{}: duplicate key '{}'", what, key);
    }
    return true;
  };
  try {
    return J::parse(text.begin(), text.end(), watch);
  } catch (const typename J::exception& e) {
    // nlohmann's messages begin with "[json.exception.parse_error.101] ".
    const char* message = std::strstr(e.what(), "] ");
    fail("{}: not valid JSON: {}", what, message ? message + 2 : e.what());
  }
}

}  // namespace

Json parse_json(std::string_view text, std::string_view what) { return parse<Json>(text, what); }
OrderedJson parse_ordered_json(std::string_view text, std::string_view what) {
  return parse<OrderedJson>(text, what);
}

bool has_entry(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

std::string read_file(const std::string& path, size_t max_bytes) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    const int error = errno;
    fail("{}: {}", path,
         error == ENOENT && has_entry(path) ? "a link to a file that is not there"
                                            : std::strerror(error));
  }
  if (!S_ISREG(info.st_mode)) fail("{}: expected a regular file", path);
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) fail("{}: cannot be opened: {}", path, std::strerror(errno));
  // Of what was opened: the name may stand for another file by now.
  const std::streamoff size = in.tellg();
  if (static_cast<size_t>(size) > max_bytes)
    fail("{}: expected at most {} bytes, found {}", path, max_bytes, size);
  std::string text(static_cast<size_t>(size), '\0');
  in.seekg(0);
  in.read(text.data(), size);
  if (in.gcount() != size) fail("{}: expected {} bytes, read {}", path, size, in.gcount());
  return text;
}

std::string describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::string: {
      const auto& s = value.get_ref<const std::string&>();
      if (s.size() <= 40) return fmt::format("the string \"{}\"", s);
      return fmt::format("a string of {} bytes", s.size());
    }
    default:
      return fmt::format("the number {}",
                         value.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
}

int64_t get_int(const Json& object, const char* key, std::string_view what) {
  return as_int(require(object, key, what, "an integer"), key, what);
}
double get_number(const Json& object, const char* key, std::string_view what) {
  return as_number(require(object, key, what, "a number"), key, what);
}
bool get_bool(const Json& object, const char* key, std::string_view what) {
  return as_bool(require(object, key, what, "true or false"), key, what);
}
std::string get_string(const Json& object, const char* key, std::string_view what) {
  return as_string(require(object, key, what, "a string"), key, what);
}

std::optional<int64_t> find_int(const Json& object, const char* key, std::string_view what) {
  const Json* value = find_field(object, key, what);
  return value ? std::optional(as_int(*value, key, what)) : std::nullopt;
}
std::optional<double> find_number(const Json& object, const char* key, std::string_view what) {
  const Json* value = find_field(object, key, what);
  return value ? std::optional(as_number(*value, key, what)) : std::nullopt;
}
std::optional<bool> find_bool(const Json& object, const char* key, std::string_view what) {
  const Json* value = find_field(object, key, what);
  return value ? std::optional(as_bool(*value, key, what)) : std::nullopt;
}
std::optional<std::string> find_string(const Json& object, const char* key, std::string_view what) {
  const Json* value = find_field(object, key, what);
  return value ? std::optional(as_string(*value, key, what)) : std::nullopt;
}

}  // namespace mla
