#include "apps/mla_run/input.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include "lib/base/error.h"

namespace mla {

Input::Input(const std::string& path, bool twice) : path_(path) {
  if (path_ != "-") first_ = open_file();
  if (path_ != "-" && std::filesystem::is_regular_file(path_)) {
    scan_ = scan_input(path_);
  } else if (twice) {
    std::istream& in = first_ ? *first_ : std::cin;
    kept_.emplace(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    check_read();
  }
}

Input::Input(std::string path, std::string text)
    : path_(std::move(path)), kept_(std::move(text)), scan_(scan_text(*kept_)) {}

std::istream& Input::open() {
  if (kept_) {
    stream_ = std::make_unique<std::istringstream>(*kept_);
  } else if (path_ == "-") {
    return std::cin;
  } else {
    stream_ = first_ ? std::move(first_) : open_file();
  }
  return *stream_;
}

void Input::check_read() const {
  if (path_ == "-" && std::ferror(stdin)) fail("standard input: it could not be read");
}

std::unique_ptr<std::istream> Input::open_file() const {
  if (std::filesystem::is_directory(path_)) fail("{}: expected a file, found a folder", path_);
  auto file = std::make_unique<std::ifstream>(path_, std::ios::binary);
  if (!*file) fail("{}: the prompts cannot be opened: {}", path_, std::strerror(errno));
  return file;
}

}  // namespace mla
