// Prompts that come through a pipe, slowly: they are answered as they come.
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <filesystem>

#include "tests/e2e/child.h"

namespace mla::test::pipe_test {
namespace {

namespace fs = std::filesystem;

const std::string kModel =
    "-m " + source_path("tests/data/tiny-random") + " --device cpu --threads 1 --quiet ";

std::string line(int i) {
  return Json{{"id", i}, {"prompt", {5 + i, 6, 7}}, {"max_tokens", 8}, {"ignore_eos", true}}.dump();
}

// A pipe that stays open until close().
struct Pipe {
  TempDir dir;
  int fd = -1;
  Pipe() {
    REQUIRE(mkfifo((dir / "fifo").c_str(), 0600) == 0);
    fd = open((dir / "fifo").c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0);
  }
  ~Pipe() { close(); }
  void write(const std::string& text) const {
    REQUIRE(::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  void close() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  // Complete records so far.
  int64_t records() const {
    const std::string path = dir / "o/outputs.jsonl.partial";
    if (!fs::exists(path)) return 0;
    const std::string text = read_file(path);
    return std::count(text.begin(), text.end(), '\n');
  }
  bool has_records(int64_t count) const {
    return wait_until([&] { return records() == count; }, 30);
  }
};

TEST_CASE("Prompts are answered while the pipe they come through stays open") {
  for (const std::string engines : {"", "-dp 2", "-tp 2"}) {
    for (const std::string source : {"-", "fifo"}) {
      INFO(engines << " " << source);
      Pipe pipe;
      const std::string prompts = source == "-" ? source : pipe.dir / "fifo";
      Child child(pipe.dir, kModel + engines + " -o " + (pipe.dir / "o") + " " + prompts,
                  source == "-" ? pipe.dir / "fifo" : "/dev/null");
      pipe.write(line(0) + "\n");
      REQUIRE(pipe.has_records(1));
      const std::string half = line(1).substr(0, 20);
      pipe.write("\n{broken\n" + half);  // a bad line is answered too, half a line waits
      REQUIRE(pipe.has_records(2));
      usleep(50000);
      CHECK(pipe.records() == 2);
      pipe.write(line(1).substr(20) + "\n" + line(2) + "\n");
      REQUIRE(pipe.has_records(4));
      pipe.write(line(3));  // the last one needs no newline
      pipe.close();
      REQUIRE(wait_until([&] { return !child.running(); }, 30));
      CHECK(child.wait() == 3);
      const std::vector<Json> records = read_lines(pipe.dir / "o/outputs.jsonl");
      REQUIRE(records.size() == 5);
      CHECK(records[4].at("id") == 3);
      CHECK(run_json(pipe.dir / "o").at("counts").at("ok") == 4);
      CHECK(run_json(pipe.dir / "o").at("input").at("records") == 5);

      const std::string text =
          line(0) + "\n\n{broken\n" + line(1) + "\n" + line(2) + "\n" + line(3);
      write_text(pipe.dir / "p.jsonl", text);
      REQUIRE(run_program(pipe.dir, kModel + engines + " -o " + (pipe.dir / "file") + " " +
                                        (pipe.dir / "p.jsonl"))
                  .exit_code == 3);
      CHECK(without_timing(pipe.dir / "o/outputs.jsonl") ==
            without_timing(pipe.dir / "file/outputs.jsonl"));
      CHECK(run_json(pipe.dir / "o").at("input").at("sha256") ==
            run_json(pipe.dir / "file").at("input").at("sha256"));
    }
  }
}

TEST_CASE("A pipe that ends in half a line by a signal makes no record of it") {
  Pipe pipe;
  Child child(pipe.dir, kModel + "-o " + (pipe.dir / "o") + " -", pipe.dir / "fifo");
  pipe.write(line(0) + "\n" + line(1).substr(0, 20));
  REQUIRE(pipe.has_records(1));
  child.send(SIGINT);
  CHECK(child.wait() == 130);
  CHECK(pipe.records() == 1);
  const Json run = run_json(pipe.dir / "o");
  CHECK(run.at("state") == "interrupted");
  CHECK(run.at("counts").at("requests") == 1);
}

TEST_CASE("An engine that fails ends the run while its pipe stays open") {
  Pipe pipe;
  Child child(pipe.dir, kModel + "-dp 2 --max-num-seqs 2 -o " + (pipe.dir / "o") + " -",
              pipe.dir / "fifo", "MLA_FAULT=throw:1", "mla-run-faulty");
  for (int i = 0; i < 60; ++i) pipe.write(line(i) + "\n");
  REQUIRE(wait_until([&] { return !child.running(); }, 60));
  CHECK(child.wait() == 1);
  CHECK(has(child.err(), "engine 1: rank 0: device 1 was told to fail"));
  CHECK(pipe.records() > 0);
  const Json run = run_json(pipe.dir / "o");
  CHECK(run.at("state") == "failed");
  CHECK(run.at("counts").at("ok") == pipe.records());
}

TEST_CASE("A signal ends the wait for a pipe that is needed twice") {
  Pipe pipe;
  Child child(pipe.dir, kModel + "--chunked-prefill both -o " + (pipe.dir / "o") + " -",
              pipe.dir / "fifo");
  pipe.write(line(0) + "\n");
  // It reads behind where it begins to heed signals.
  REQUIRE(wait_until([&] {
    int unread = 1;
    return ioctl(pipe.fd, FIONREAD, &unread) == 0 && unread == 0;
  }));
  REQUIRE(child.running());
  child.send(SIGTERM);
  CHECK(child.wait() == 130);
  CHECK_FALSE(fs::exists(pipe.dir / "o/off/outputs.jsonl.partial"));
}

}  // namespace
}  // namespace mla::test::pipe_test
