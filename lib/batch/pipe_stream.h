// A pipe, a terminal or another stream whose reader may have to wait.
#pragma once

#include <array>
#include <functional>
#include <istream>
#include <streambuf>
#include <string>

namespace mla {

class PipeStream : public std::istream {
 public:
  // Takes `fd`, and closes it. Reads wait for bytes until `stop` is true, which is asked ten times
  // a second; that is an end then, and so is an error, which error() tells.
  PipeStream(int fd, std::function<bool()> stop);

  // Whether a read would have a byte, or the end, at once.
  bool ready() const;
  // The system's words; empty where there was none.
  const std::string& error() const { return buffer_.error; }

 private:
  struct Buffer : std::streambuf {
    Buffer(int fd, std::function<bool()> stop);
    ~Buffer() override;
    int_type underflow() override;
    bool ready() const;

    int fd;
    std::function<bool()> stop;
    std::string error;
    bool ended = false;
    std::array<char, 65536> bytes;
  };
  Buffer buffer_;
};

}  // namespace mla
