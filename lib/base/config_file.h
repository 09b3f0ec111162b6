// A file of settings: the part of TOML that names and values need, and INI's plain values. Without
// dotted or quoted keys, nested tables and multi-line strings.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mla {

struct ConfigEntry {
  std::string section;              // "" before the first [section]
  std::string key;                  // as written
  std::vector<std::string> values;  // one, or those of a list
  int64_t line;                     // from 1
};

// Lines are `key = value`, `[section]`, blank, or a comment after # or ;. A value is a "string"
// with the escapes \" \\ \n \t \r \uXXXX, a 'string' without, a list [a, b] over one or more lines,
// or plain text up to the end of the line or " #". Throws Error with `what` and the line: on
// anything else, and on a key that comes twice in one section.
std::vector<ConfigEntry> parse_config_file(std::string_view text, std::string_view what);

}  // namespace mla
