// A data set of GSM8K's form, made in place: 30 examples and 3 questions.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "lib/base/json.h"

namespace mla::test {

// DIR/train.jsonl and DIR/test.jsonl.
inline void write_small_gsm8k(const std::string& dir) {
  std::filesystem::create_directories(dir);
  std::ofstream train(dir + "/train.jsonl", std::ios::binary);
  for (int i = 1; i <= 30; ++i) {
    const std::string n = std::to_string(i), sum = std::to_string(2 * i);
    train << Json{{"question", "What is " + n + " plus " + n + "?"},
                  {"answer", "It is <<" + n + "+" + n + "=" + sum + ">>" + sum + ".\n#### " + sum}}
          << "\n";
  }
  std::ofstream test(dir + "/test.jsonl", std::ios::binary);
  test << Json{{"question", "What is 20 plus 1?\tNow “really”."}, {"answer", "#### 21"}} << "\n"
       << Json{{"question", "How many?"}, {"answer", "a \"lot\"\\\n#### 1,000"}} << "\n"
       << Json{{"question", "Cost?"}, {"answer", "\x01 é\n#### $5."}} << "\n";
}

}  // namespace mla::test
