#include "lib/batch/pipe_stream.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace mla {
namespace {

constexpr int kLookMs = 100;  // for `stop`

// Whether there are bytes, the end or an error; false after the time, or a signal.
bool poll_one(int fd, int timeout_ms) {
  pollfd one{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&one, 1, timeout_ms) > 0;
}

}  // namespace

PipeStream::Buffer::Buffer(int descriptor, std::function<bool()> asked)
    : fd(descriptor), stop(std::move(asked)) {}

PipeStream::Buffer::~Buffer() { close(fd); }

bool PipeStream::Buffer::ready() const { return ended || gptr() < egptr() || poll_one(fd, 0); }

PipeStream::Buffer::int_type PipeStream::Buffer::underflow() {
  while (!ended) {
    if (!poll_one(fd, kLookMs)) {
      ended = stop();
      continue;
    }
    const ssize_t count = ::read(fd, bytes.data(), bytes.size());
    if (count > 0) {
      setg(bytes.data(), bytes.data(), bytes.data() + count);
      return traits_type::to_int_type(bytes[0]);
    }
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) error = std::strerror(errno);
    ended = true;
  }
  return traits_type::eof();
}

PipeStream::PipeStream(int fd, std::function<bool()> stop)
    : std::istream(nullptr), buffer_(fd, std::move(stop)) {
  rdbuf(&buffer_);
}

bool PipeStream::ready() const { return buffer_.ready(); }

}  // namespace mla
