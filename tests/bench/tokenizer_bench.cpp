// Calls the tokenizer from a script.
//   tokenizer_bench encode DIR < {"text": …} lines            > {"ids": […]} lines
//   tokenizer_bench decode DIR < {"ids": […], "skip": …} lines > {"text": …} lines
//   tokenizer_bench bench DIR FILE     one thread; JSON with the best of five runs
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "lib/text/tokenizer.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void bench(const mla::Tokenizer& tokenizer, const std::string& path) {
  const std::string text = mla::read_file(path);
  double whole = 1e30, lines = 1e30;
  size_t tokens = 0;
  for (int i = 0; i < 5; ++i) {
    auto start = Clock::now();
    tokens = tokenizer.encode(text).size();
    whole = std::min(whole, seconds_since(start));
    start = Clock::now();
    for (size_t p = 0; p < text.size();) {
      const size_t end = std::min(text.find('\n', p), text.size());
      tokenizer.encode(std::string_view(text).substr(p, end - p));
      p = end + 1;
    }
    lines = std::min(lines, seconds_since(start));
  }
  const double mb = static_cast<double>(text.size()) / 1e6;
  fmt::print(
      "{{\"bytes\": {}, \"tokens\": {}, \"mb_per_s\": {:.1f}, \"mb_per_s_by_line\": {:.1f}}}\n",
      text.size(), tokens, mb / whole, mb / lines);
}

int run(int argc, char** argv) {
  const std::string mode = argc > 2 ? argv[1] : "";
  if (mode != "encode" && mode != "decode" && !(mode == "bench" && argc == 4)) {
    fmt::print(stderr, "usage: tokenizer_bench encode DIR | decode DIR | bench DIR FILE\n");
    return 2;
  }
  const auto start = Clock::now();
  const mla::Tokenizer tokenizer = mla::Tokenizer::load(argv[2]);
  fmt::print(stderr, "loaded in {:.0f} ms\n", 1e3 * seconds_since(start));
  if (mode == "bench") {
    bench(tokenizer, argv[3]);
    return 0;
  }
  std::string line;
  while (std::getline(std::cin, line)) {
    const mla::Json in = mla::parse_json(line, "line");
    mla::Json out;
    if (mode == "encode") {
      out["ids"] = tokenizer.encode(mla::get_string(in, "text", "line"));
    } else {
      out["text"] = tokenizer.decode(in.at("ids").get<std::vector<int32_t>>(),
                                     mla::get_bool(in, "skip", "line"));
    }
    fmt::print("{}\n", out.dump());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "tokenizer_bench: {}\n", e.what());
    return 1;
  }
}
