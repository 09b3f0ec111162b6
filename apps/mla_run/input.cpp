#include "apps/mla_run/input.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "apps/mla_run/interrupt.h"
#include "lib/base/error.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

std::string name_of_input(const std::string& path) { return path == "-" ? "standard input" : path; }

// Waits for a writer where it is a named pipe.
int open_descriptor(const std::string& path) {
  for (;;) {
    check_interrupt();
    const int fd = path == "-" ? fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1)
                               : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd >= 0) return fd;
    if (errno != EINTR)
      fail("{}: the prompts cannot be opened: {}", name_of_input(path), std::strerror(errno));
  }
}

std::unique_ptr<std::istream> open_file(const std::string& path) {
  auto file = std::make_unique<std::ifstream>(path, std::ios::binary);
  if (!*file) fail("{}: the prompts cannot be opened: {}", path, std::strerror(errno));
  return file;
}

}  // namespace

Input::Input(const std::string& path, bool twice) : path_(path) {
  if (path_ != "-") {
    if (fs::is_directory(path_)) fail("{}: expected a file, found a folder", path_);
    std::error_code ignored;
    if (fs::is_regular_file(path_, ignored) || !fs::exists(path_, ignored)) {
      open_file(path_);  // tells what is wrong with it
      scan_ = scan_input(path_);
      return;
    }
  }
  pipe_ = std::make_unique<PipeStream>(open_descriptor(path_), interrupted);
  if (!twice) return;
  kept_.emplace(std::istreambuf_iterator<char>(*pipe_), std::istreambuf_iterator<char>());
  check_interrupt();
  check_read();
}

Input::Input(std::string path, std::string text)
    : path_(std::move(path)), kept_(std::move(text)), scan_(scan_text(*kept_)) {}

std::istream& Input::open() {
  if (kept_) {
    stream_ = std::make_unique<std::istringstream>(*kept_);
  } else if (pipe_) {
    return *pipe_;
  } else {
    stream_ = open_file(path_);
  }
  return *stream_;
}

void Input::check_read() const {
  if (pipe_ && !pipe_->error().empty())
    fail("{}: it could not be read: {}", name_of_input(path_), pipe_->error());
}

}  // namespace mla
