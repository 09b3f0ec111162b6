#include "lib/batch/pipe_stream.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <sstream>
#include <string>
#include <vector>

#include "lib/batch/request.h"
#include "tests/support/catch.h"

namespace mla::pipe_stream_test {
namespace {

// The two ends of a pipe; the reading one belongs to the stream.
struct Pipe {
  std::array<int, 2> ends{-1, -1};
  bool stop = false;
  std::unique_ptr<PipeStream> stream;
  Pipe() {
    REQUIRE(pipe2(ends.data(), O_CLOEXEC) == 0);
    stream = std::make_unique<PipeStream>(ends[0], [this] { return stop; });
  }
  ~Pipe() { close_writer(); }
  void write(std::string_view text) const {
    REQUIRE(::write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  void close_writer() {
    if (ends[1] >= 0) close(ends[1]);
    ends[1] = -1;
  }
};

ReaderOptions options() {
  ReaderOptions o;
  o.vocab_size = 1000;
  o.max_line_bytes = 100;
  return o;
}

// What a record says, as text.
std::string text_of(const Record& record) {
  if (const auto* bad = std::get_if<BadLine>(&record)) return bad->code + ": " + bad->message;
  const Request& request = std::get<Request>(record);
  return std::to_string(request.index) + " " + std::to_string(request.line) + " " +
         std::get<std::string>(request.prompt);
}

TEST_CASE("A pipe is ready when it has a byte or its end") {
  Pipe pipe;
  CHECK_FALSE(pipe.stream->ready());
  pipe.write("ab");
  CHECK(pipe.stream->ready());
  CHECK(pipe.stream->get() == 'a');
  CHECK(pipe.stream->ready());  // the second byte is in the buffer
  CHECK(pipe.stream->get() == 'b');
  CHECK_FALSE(pipe.stream->ready());
  pipe.close_writer();
  CHECK(pipe.stream->ready());
  CHECK(pipe.stream->get() == std::char_traits<char>::eof());
  CHECK(pipe.stream->error().empty());
}

TEST_CASE("A stop ends the wait for a pipe and an error is told") {
  Pipe pipe;
  pipe.stop = true;
  CHECK(pipe.stream->get() == std::char_traits<char>::eof());
  CHECK(pipe.stream->error().empty());

  const int folder = open("/", O_RDONLY | O_CLOEXEC);
  REQUIRE(folder >= 0);
  PipeStream broken(folder, [] { return false; });
  CHECK(broken.get() == std::char_traits<char>::eof());
  CHECK_FALSE(broken.error().empty());
}

TEST_CASE("Lines that come in pieces are the lines of a file, ready as soon as they are whole") {
  const std::string text = "\xef\xbb\xbf{\"prompt\":\"a\"}\r\n\n  \n{\"prompt\":\"b\"}\n{broken\n" +
                           std::string(150, ' ') +
                           "\n{\"prompt\":\"\xff\"}\n\n{\"prompt\":\"c\"}\n" +
                           "{\"prompt\":\"the last line has no newline\"}";
  std::istringstream whole(text);
  RequestReader whole_reader(whole, "t", options());
  std::vector<std::string> expected;
  while (const auto record = whole_reader.next()) expected.push_back(text_of(*record));
  REQUIRE(expected.size() == 7);

  for (const size_t piece : {size_t{1}, size_t{2}, size_t{7}, size_t{61}, text.size()}) {
    INFO(piece);
    Pipe pipe;
    ReaderOptions o = options();
    o.ready = [&] { return pipe.stream->ready(); };
    RequestReader reader(*pipe.stream, "t", o);
    std::vector<std::string> found;
    for (size_t at = 0; at < text.size(); at += piece) {
      CHECK_FALSE(reader.ready());
      pipe.write(std::string_view(text).substr(at, piece));
      while (reader.ready()) found.push_back(text_of(reader.next().value()));
      // As many as there are whole lines that are not blank.
      std::istringstream part(text.substr(0, text.rfind('\n', at + piece - 1) + 1));
      RequestReader part_reader(part, "t", options());
      size_t lines = 0;
      while (part_reader.next()) ++lines;
      CHECK(found.size() == lines);
    }
    pipe.close_writer();
    CHECK(reader.ready());
    found.push_back(text_of(reader.next().value()));
    CHECK(reader.ready());
    CHECK_FALSE(reader.next());
    CHECK(reader.ready());
    CHECK(found == expected);
    CHECK(reader.input_hash() == whole_reader.input_hash());
  }
}

}  // namespace
}  // namespace mla::pipe_stream_test
