#include "lib/base/config_file.h"

#include "lib/base/error.h"
#include "tests/support/catch.h"

namespace mla::config_file_test {
namespace {

std::vector<std::string> value_of(const std::string& text) {
  const auto entries = parse_config_file("key = " + text, "f");
  REQUIRE(entries.size() == 1);
  return entries[0].values;
}

std::string error_of(const std::string& text) {
  try {
    parse_config_file(text, "f");
  } catch (const Error& e) {
    return e.what();
  }
  FAIL("expected an error of " << text);
  return "";
}

TEST_CASE("Sections, comments and lines of a config file are read") {
  const auto entries = parse_config_file(
      "\xef\xbb\xbf# about\n\nmodel = /m  # where\r\n[run]\n; old\nmax_num_seqs=4\nlimit = 2", "f");
  REQUIRE(entries.size() == 3);
  CHECK(entries[0].section.empty());
  CHECK(entries[0].key == "model");
  CHECK(entries[0].values == std::vector<std::string>{"/m"});
  CHECK(entries[0].line == 3);
  CHECK(entries[1].section == "run");
  CHECK(entries[1].values == std::vector<std::string>{"4"});
  CHECK(entries[1].line == 6);
  CHECK(entries[2].line == 7);
  CHECK(parse_config_file("", "f").empty());
  CHECK(parse_config_file("\n# x", "f").empty());
}

TEST_CASE("A value of a config file is what was meant") {
  using Values = std::vector<std::string>;
  CHECK(value_of("\"a # b; c, d\"") == Values{"a # b; c, d"});
  CHECK(value_of(R"("one\ntwo \"x\" \u00e9")") == Values{"one\ntwo \"x\" é"});
  CHECK(value_of("'a\\n'") == Values{"a\\n"});
  CHECK(value_of("two words ; said") == Values{"two words"});
  CHECK(value_of("/a#b") == Values{"/a#b"});
  CHECK(value_of("[1, 'two', \"3,\"]") == Values{"1", "two", "3,"});
  CHECK(value_of("[\n  1, # first\n  2,\n]\n") == Values{"1", "2"});
  CHECK(value_of("[]").empty());
  CHECK(value_of("\"\"") == Values{""});
}

TEST_CASE("A broken config file is an error with its line") {
  CHECK(error_of("a = 1\nb") == "f: line 2: expected = and a value, found the end");
  CHECK(error_of("a = 1\na = 2").find("line 2: duplicate key 'a'") != std::string::npos);
  CHECK(error_of("= 1").find("line 1: expected a name, found '= 1'") != std::string::npos);
  CHECK(error_of("a =\nb = 2").find("expected a value") != std::string::npos);
  CHECK(error_of("a = \"x").find("closing quote") != std::string::npos);
  CHECK(error_of("a = \"x\\").find("closing quote") != std::string::npos);
  CHECK(error_of("a = [1, 2").find("']'") != std::string::npos);
  CHECK(error_of("a = [1 2\n3]").find("',' or ']'") != std::string::npos);
  CHECK(error_of("[run\na = 1").find("expected ]") != std::string::npos);
  CHECK(error_of("a = 'x' y").find("end of the line") != std::string::npos);
  CHECK(error_of("a = \"\\q\"").find("line 1") != std::string::npos);
}

}  // namespace
}  // namespace mla::config_file_test
