// Files that options name are written where nothing else is.
#include <sys/stat.h>

#include <filesystem>

#include "tests/e2e/child.h"

namespace mla::test::named_file_test {
namespace {

namespace fs = std::filesystem;

const std::string kBoth =
    "-m " + source_path("tests/data/tiny-random") + " --device cpu --quiet --chunked-prefill both ";

struct Fixture {
  TempDir dir;
  Fixture() { write_text(dir / "p.jsonl", "{\"prompt\": [5, 6], \"max_tokens\": 2}\n"); }
  ProcessResult run(const std::string& options, const std::string& prompts = "p.jsonl") const {
    return run_program(dir, kBoth + options + " " + (dir / prompts));
  }
};

TEST_CASE("A page or a trace takes no file of the run's and is refused before the run") {
  const Fixture f;
  write_text(f.dir / "mine.jsonl", read_file(f.dir / "p.jsonl"));
  for (const std::string option : {"--html", "--trace"}) {
    for (const std::string name :
         {"mine.jsonl", "o/on/run.json", "o/off/outputs.jsonl", "o/on/outputs.jsonl.partial",
          "o/compare.json", "o/off/results.json"}) {
      const ProcessResult result =
          f.run(option + " " + (f.dir / name) + " -o " + (f.dir / "o"), "mine.jsonl");
      INFO(option << " " << name << ": " << result.err);
      CHECK(result.exit_code == 2);
      CHECK(has(result.err, option + ": expected a file of its own"));
      CHECK_FALSE(fs::exists(f.dir / "o"));
    }
    CHECK(has(f.run(option + " " + (f.dir / "no/x") + " -o " + (f.dir / "o")).err,
              option + ": expected a folder"));
    CHECK(has(f.run(option + " " + f.dir.path() + " -o " + (f.dir / "o")).err,
              option + ": expected a file, found the folder"));
    CHECK_FALSE(fs::exists(f.dir / "o"));
  }
  CHECK(read_file(f.dir / "mine.jsonl") == read_file(f.dir / "p.jsonl"));
  CHECK(f.run("--html " + (f.dir / "x") + " --trace " + (f.dir / "x") + " -o " + (f.dir / "o"))
            .exit_code == 2);
  CHECK(f.run("--trace " + (f.dir / "o/report.html") + " -o " + (f.dir / "o")).exit_code == 2);
  CHECK(f.run("--html " + (f.dir / "o/pages/x.html") + " -o " + (f.dir / "o")).exit_code == 2);
  CHECK_FALSE(fs::exists(f.dir / "o"));
  // Another spelling of a name in a folder that is not there yet.
  const auto in_dir = [&](const std::string& options) {
    const int status = std::system(("cd " + f.dir.path() + " && " + MLA_BINARY_DIR + "/mla-run " +
                                    kBoth + options + " p.jsonl >/dev/null 2>&1")
                                       .c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  CHECK(in_dir("-o o --html ./o/on/outputs.jsonl") == 2);
  CHECK(in_dir("-o o --trace " + (f.dir / "o/report.html")) == 2);
  CHECK(in_dir("-o o --html x --trace ./x") == 2);
  CHECK_FALSE(fs::exists(f.dir / "o"));
  // In the folder that the run makes, and where it stands by default.
  CHECK(f.run("--html " + (f.dir / "o/page.html") + " -o " + (f.dir / "o")).exit_code == 0);
  CHECK(has(read_file(f.dir / "o/page.html"), "<!doctype html>"));
  CHECK(
      f.run("--overwrite --html " + (f.dir / "o/report.html") + " -o " + (f.dir / "o")).exit_code ==
      0);
}

TEST_CASE("Prompts stay, whatever their name is") {
  const Fixture f;
  const std::string one = "-m " + source_path("examples/word-problems") + " --device cpu --quiet ";
  const std::string prompts =
      R"({"prompt": "Question: 1 + 1\nAnswer:", "max_tokens": 1, "answer": "2"})"
      "\n";
  fs::create_directory(f.dir / "d");
  write_text(f.dir / "d/samples.jsonl", prompts);
  write_text(f.dir / "d/compare.json", prompts);
  const std::string here = "-o " + (f.dir / "d") + " ";
  const std::string samples = f.dir / "d/samples.jsonl";
  const ProcessResult eval = run_program(f.dir, "eval " + one + here + "--task " + samples);
  CHECK(eval.exit_code == 2);
  CHECK(has(eval.err, "the task is one of the files to be written"));
  CHECK(f.run(here, "d/compare.json").exit_code == 2);
  for (int i = 0; i < 2; ++i)
    CHECK(run_program(f.dir, one + "--overwrite " + here + samples).exit_code == 0);
  CHECK(read_file(samples) == prompts);
  CHECK(read_file(f.dir / "d/compare.json") == prompts);
}

TEST_CASE("Reports of compare take no file of the runs, and devices, pipes and links stay") {
  const Fixture f;
  REQUIRE(f.run("-o " + (f.dir / "o")).exit_code == 0);
  const std::string records = read_file(f.dir / "o/on/outputs.jsonl");
  const auto compare = [&](const std::string& options) {
    return run_program(f.dir,
                       "compare " + (f.dir / "o/off") + " " + (f.dir / "o/on") + " " + options);
  };
  CHECK(compare("--json " + (f.dir / "o/on/outputs.jsonl")).exit_code == 2);
  CHECK(compare("--html " + (f.dir / "o/off/run.json") + " --json " + (f.dir / "c")).exit_code ==
        2);
  CHECK(compare("--html " + (f.dir / "c") + " --json " + (f.dir / "c")).exit_code == 2);
  CHECK(run_program(f.dir, "compare " + (f.dir / "o/off/outputs.jsonl") + " " +
                               (f.dir / "o/on/outputs.jsonl") + " --json " +
                               (f.dir / "o/on/run.json"))
            .exit_code == 2);
  CHECK_FALSE(fs::exists(f.dir / "c"));
  CHECK(read_file(f.dir / "o/on/outputs.jsonl") == records);

  fs::create_symlink("target", f.dir / "link");  // which is not there yet
  REQUIRE(mkfifo((f.dir / "fifo").c_str(), 0600) == 0);
  REQUIRE(std::system(("cat " + (f.dir / "fifo") + " >" + (f.dir / "read") + " &").c_str()) == 0);
  CHECK(compare("--json " + (f.dir / "link") + " --html " + (f.dir / "fifo")).exit_code == 0);
  CHECK(fs::is_symlink(f.dir / "link"));
  CHECK(read_json(f.dir / "target").at("passes") == true);
  CHECK(fs::is_fifo(f.dir / "fifo"));
  CHECK(wait_until([&] { return has(read_file(f.dir / "read"), "</html>"); }, 10));
  CHECK(has(run_program(f.dir, "compare " + (f.dir / "o/off") + " " + (f.dir / "fifo")).err,
            "found a pipe or a device"));
}

}  // namespace
}  // namespace mla::test::named_file_test
