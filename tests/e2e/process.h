// Runs the built program as a user does.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "lib/base/json.h"
#include "tests/support/catch.h"

namespace mla::test {

struct ProcessResult {
  int exit_code = -1;
  std::string out, err;
};

// `arguments` is a shell fragment after the program's path; standard input is empty or `input`;
// `program` stands in the build folder, settings of the environment in front of it.
inline ProcessResult run_program(const TempDir& dir, const std::string& arguments,
                                 const std::string& input = "/dev/null",
                                 const std::string& environment = "",
                                 const std::string& program = "mla-run") {
  const std::string out = dir / "stdout", err = dir / "stderr";
  const std::string command = environment + " " + std::string(MLA_BINARY_DIR) + "/" + program +
                              " " + arguments + " >" + out + " 2>" + err + " <" + input;
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline Json read_json(const std::string& path) { return parse_json(read_file(path), path); }

inline std::vector<Json> read_lines(const std::string& path) {
  std::vector<Json> records;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) records.push_back(Json::parse(line));
  return records;
}

}  // namespace mla::test
