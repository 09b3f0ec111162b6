#include "lib/batch/output.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "lib/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace mla::output_test {
namespace {

using test::TempDir;

OrderedJson record(int64_t index) { return {{"id", fmt::format("q{}", index)}, {"index", index}}; }

void put(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

using test::error_text;
using test::has;

TEST_CASE("records are appended at once and sorted at the end") {
  TempDir dir;
  const std::string out = dir / "a/b";
  OutputWriter writer({.dir = out, .input_path = "-"});
  writer.write(2, record(2));
  CHECK(read_file(out + "/outputs.jsonl.partial") == "{\"id\":\"q2\",\"index\":2}\n");
  writer.write(0, record(0));
  writer.write(1, record(1));
  CHECK_FALSE(std::filesystem::exists(out + "/outputs.jsonl"));
  CHECK(writer.records() == 3);
  writer.finish();
  CHECK(read_file(out + "/outputs.jsonl") ==
        "{\"id\":\"q0\",\"index\":0}\n{\"id\":\"q1\",\"index\":1}\n{\"id\":\"q2\",\"index\":2}\n");
  CHECK(std::distance(std::filesystem::directory_iterator(out), {}) == 1);
  CHECK_THROWS_AS(writer.write(3, record(3)), Error);
}

TEST_CASE("sorting holds for more than one block of records") {
  TempDir dir;
  OutputWriter writer({.dir = dir.path(), .input_path = ""});
  constexpr int kRecords = 300;
  const auto long_record = [](int64_t i) {
    OrderedJson j = record(i);
    j["text"] = std::string(static_cast<size_t>(10000 + i), 'x');
    return j;
  };
  for (int64_t i = 0; i < kRecords; ++i) {
    const int64_t index = i * 7 % kRecords;
    writer.write(index, long_record(index));
  }
  writer.finish();
  std::ifstream in(dir / "outputs.jsonl");
  std::string line;
  for (int64_t i = 0; i < kRecords; ++i) {
    REQUIRE(std::getline(in, line));
    REQUIRE(line == long_record(i).dump());
  }
  CHECK_FALSE(std::getline(in, line));
}

TEST_CASE("a run without records has an empty output") {
  TempDir dir;
  OutputWriter({.dir = dir.path(), .input_path = ""}).finish();
  CHECK(read_file(dir / "outputs.jsonl").empty());
}

TEST_CASE("a writer that goes away leaves the whole lines it has") {
  TempDir dir;
  {
    OutputWriter writer({.dir = dir.path(), .input_path = ""});
    writer.write(4, record(4));
  }
  CHECK(read_file(dir / "outputs.jsonl.partial") == "{\"id\":\"q4\",\"index\":4}\n");
  CHECK_FALSE(std::filesystem::exists(dir / "outputs.jsonl"));
}

TEST_CASE("outputs of an earlier run are refused without overwrite") {
  for (const std::string name : {"outputs.jsonl", "outputs.jsonl.partial"}) {
    TempDir dir;
    put(dir / name, "old\n");
    const OutputOptions options{.dir = dir.path(), .input_path = ""};
    CHECK_THROWS_AS(OutputWriter(options), UsageError);
    CHECK(has(error_text([&] { OutputWriter writer(options); }), name + ": exists already"));
    CHECK(read_file(dir / name) == "old\n");
    OutputWriter writer({.dir = dir.path(), .input_path = "", .overwrite = true});
    CHECK_FALSE(std::filesystem::exists(dir / "outputs.jsonl"));
    writer.write(0, record(0));
    writer.finish();
    CHECK(read_file(dir / "outputs.jsonl") == "{\"id\":\"q0\",\"index\":0}\n");
  }
}

TEST_CASE("an input that would be written over is refused even with overwrite") {
  TempDir dir;
  const std::string input = dir / "outputs.jsonl";
  put(input, "{}\n");
  std::filesystem::create_symlink(input, dir / "link.jsonl");
  for (const std::string& path : {input, dir / "link.jsonl", dir.path() + "/./outputs.jsonl"}) {
    const OutputOptions options{.dir = dir.path(), .input_path = path, .overwrite = true};
    CHECK(has(error_text([&] { OutputWriter writer(options); }), "the input is one of the files"));
  }
  CHECK(read_file(input) == "{}\n");
}

TEST_CASE("two runs do not write to one folder") {
  TempDir dir;
  OutputWriter first({.dir = dir.path(), .input_path = ""});
  const OutputOptions again{.dir = dir.path(), .input_path = "", .overwrite = true};
  CHECK(has(error_text([&] { OutputWriter second(again); }), "another run is writing to it"));
  first.write(0, record(0));
  first.finish();
  CHECK(read_file(dir / "outputs.jsonl") == "{\"id\":\"q0\",\"index\":0}\n");
}

TEST_CASE("a folder that cannot be made is named") {
  TempDir dir;
  put(dir / "file", "");
  const OutputOptions options{.dir = dir / "file/out", .input_path = ""};
  CHECK(has(error_text([&] { OutputWriter writer(options); }), "file/out: cannot be made: "));
}

TEST_CASE("two records with one index are an error at the end") {
  TempDir dir;
  OutputWriter writer({.dir = dir.path(), .input_path = ""});
  writer.write(1, record(1));
  writer.write(1, record(1));
  CHECK(has(error_text([&] { writer.finish(); }), "two records with index 1"));
  CHECK(std::filesystem::exists(dir / "outputs.jsonl.partial"));
}

TEST_CASE("a descriptor gets the records in order of completion") {
  TempDir dir;
  const int fd = ::open((dir / "stream").c_str(), O_WRONLY | O_CREAT, 0666);
  OutputWriter writer = OutputWriter::to_descriptor(fd, "<stdout>");
  writer.write(1, record(1));
  writer.write(0, record(0));
  writer.finish();
  CHECK(::close(fd) == 0);
  CHECK(read_file(dir / "stream") == "{\"id\":\"q1\",\"index\":1}\n{\"id\":\"q0\",\"index\":0}\n");
}

TEST_CASE("a full disk is an error with its reason") {
  const int fd = ::open("/dev/full", O_WRONLY);
  if (fd < 0) MLA_SKIP("no /dev/full");
  OutputWriter writer = OutputWriter::to_descriptor(fd, "<stdout>");
  CHECK(error_text([&] { writer.write(0, record(0)); }) ==
        "<stdout>: cannot be written: No space left on device");
  ::close(fd);
}

// A process with a file size limit stands for a disk that fills up in the middle of a record.
TEST_CASE("a record that does not fit leaves no torn line") {
  TempDir dir;
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int code = 1;
    try {
      OutputWriter writer({.dir = dir.path(), .input_path = ""});
      writer.write(0, record(0));
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{.rlim_cur = 200, .rlim_max = 200};
      ::setrlimit(RLIMIT_FSIZE, &limit);
      OrderedJson big = record(1);
      big["text"] = std::string(1000, 'x');
      try {
        writer.write(1, big);
      } catch (const Error&) {
        writer.write(2, record(2));
        code = 0;
      }
    } catch (...) {
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(read_file(dir / "outputs.jsonl.partial") ==
        "{\"id\":\"q0\",\"index\":0}\n{\"id\":\"q2\",\"index\":2}\n");
}

TEST_CASE("text that is not UTF-8 is an error and not a broken record") {
  CHECK_THROWS_AS(dump_line({{"text", "\xff"}}), Error);
}

TEST_CASE("a file is replaced as a whole") {
  TempDir dir;
  write_file_atomically(dir / "run.json", "one");
  write_file_atomically(dir / "run.json", "two");
  CHECK(read_file(dir / "run.json") == "two");
  CHECK(std::distance(std::filesystem::directory_iterator(dir.path()), {}) == 1);
  CHECK(has(error_text([&] { write_file_atomically(dir / "no/run.json", "x"); }),
            "no/run.json.tmp: cannot be opened: No such file or directory"));
}

TEST_CASE("a file that is replaced while it is read is one or the other") {
  TempDir dir;
  const std::string name = dir / "run.json", one(100, '1'), two(5000, '2');
  put(name, one);
  std::atomic<bool> end{false};
  std::thread writer([&] {
    while (!end)
      for (const std::string& text : {two, one}) {
        put(name + ".new", text);
        std::filesystem::rename(name + ".new", name);
      }
  });
  int wrong = 0;
  try {
    for (int i = 0; i < 5000; ++i) {
      const std::string text = read_file(name);
      wrong += text != one && text != two;
    }
  } catch (const Error&) {
    ++wrong;
  }
  end = true;
  writer.join();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace mla::output_test
