// Reads lines of requests, for tests of what they give.
#pragma once

#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lib/batch/request.h"
#include "tests/support/catch.h"

namespace mla::test {

inline ReaderOptions reader_options() {
  ReaderOptions o;
  o.vocab_size = 1000;
  o.model = "/models/Lite/";
  return o;
}

inline std::vector<Record> read_all(const std::string& text,
                                    const ReaderOptions& options = reader_options()) {
  std::istringstream in(text);
  RequestReader reader(in, "test.jsonl", options);
  std::vector<Record> records;
  while (auto record = reader.next()) records.push_back(std::move(*record));
  return records;
}

// The request of a line.
inline Request good(const std::string& line, const ReaderOptions& options = reader_options()) {
  const auto records = read_all(line, options);
  REQUIRE(records.size() == 1);
  if (const auto* bad = std::get_if<BadLine>(&records[0])) FAIL(bad->message);
  return std::get<Request>(records[0]);
}

// What is said of a line that is not one.
inline BadLine bad(const std::string& line, const ReaderOptions& options = reader_options()) {
  INFO(line);
  const auto records = read_all(line, options);
  REQUIRE(records.size() == 1);
  REQUIRE(std::holds_alternative<BadLine>(records[0]));
  return std::get<BadLine>(records[0]);
}

}  // namespace mla::test
