// What the disk, the pipe or the folder refuses: a clear error, and what was finished is kept.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "tests/e2e/child.h"

namespace mla::test::disk_test {
namespace {

namespace fs = std::filesystem;

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu ";
const std::string kProgram = std::string(MLA_BINARY_DIR) + "/mla-run ";

int bash(const std::string& command) {
  const int status = std::system(("bash -c '" + command + "'").c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void write_prompts(const std::string& path, int count) {
  std::string text;
  for (int i = 0; i < count; ++i)
    text += "{\"prompt\": [" + std::to_string(i) + ", 6], \"max_tokens\": 40}\n";
  write_text(path, text);
}

TEST_CASE("A full disk ends the run with its reason and what was finished is resumed") {
  TempDir dir;
  write_prompts(dir / "p.jsonl", 60);
  const std::string run = kModel + "--ignore-eos --threads 1 " + (dir / "p.jsonl") + " -o ";
  REQUIRE(run_program(dir, run + (dir / "whole")).exit_code == 0);
  REQUIRE(fs::file_size(dir / "whole/outputs.jsonl") > 12 * 1024);
  // A limit on the size of a file fails at the same place of the program as a full disk.
  CHECK(bash("ulimit -f 12; exec " + kProgram + run + (dir / "o") + " 2>" + (dir / "err")) == 1);
  const std::string err = read_file(dir / "err");
  INFO(err);
  CHECK(has(err, "outputs.jsonl.partial: cannot be written: File too large"));
  const std::string partial = read_file(dir / "o/outputs.jsonl.partial");
  CHECK(partial.size() > 6 * 1024);
  CHECK(partial.back() == '\n');
  const Json record = run_json(dir / "o");
  CHECK(record.at("state") == "failed");
  CHECK(has(record.at("error").get<std::string>(), "File too large"));
  CHECK(run_program(dir, "--resume " + run + (dir / "o")).exit_code == 0);
  CHECK(without_timing(dir / "o/outputs.jsonl") == without_timing(dir / "whole/outputs.jsonl"));
  CHECK(run_json(dir / "o").at("counts").at("kept") ==
        std::count(partial.begin(), partial.end(), '\n'));
}

TEST_CASE("A disk that is really full is told and the run resumes when there is room") {
  TempDir dir;
  fs::create_directory(dir / "small");
  const std::string mount = "mount -t tmpfs -o size=64k none " + (dir / "small");
  if (std::system((mount + " 2>/dev/null").c_str()) != 0) MLA_SKIP("no right to mount a tmpfs");
  write_prompts(dir / "p.jsonl", 200);
  const std::string run = kModel + "--ignore-eos --threads 1 " + (dir / "p.jsonl") + " -o ";
  const ProcessResult full = run_program(dir, run + (dir / "small/o"));
  const auto code = full.exit_code;
  const std::string remount = "mount -o remount,size=8m " + (dir / "small");
  const bool room = std::system(remount.c_str()) == 0;
  const int resumed = run_program(dir, "--resume " + run + (dir / "small/o")).exit_code;
  REQUIRE(run_program(dir, run + (dir / "whole")).exit_code == 0);
  const std::string text = without_timing(dir / "small/o/outputs.jsonl");
  const std::string kept = run_json(dir / "small/o").at("counts").at("kept").dump();
  CHECK(std::system(("umount " + (dir / "small")).c_str()) == 0);
  INFO(full.err << kept);
  CHECK(code == 1);
  CHECK(has(full.err, "No space left on device"));
  CHECK(room);
  CHECK(resumed == 0);
  CHECK(kept.size() > 1);  // dozens
  CHECK(text == without_timing(dir / "whole/outputs.jsonl"));
}

TEST_CASE("A reader of standard output that goes away ends the run with an error") {
  TempDir dir;
  write_prompts(dir / "p.jsonl", 400);
  CHECK(bash(kProgram + kModel + "--ignore-eos -o - " + (dir / "p.jsonl") + " 2>" + (dir / "err") +
             " | head -n 1 >" + (dir / "head") + "; exit ${PIPESTATUS[0]}") == 1);
  INFO(read_file(dir / "err"));
  CHECK(has(read_file(dir / "err"), "standard output: cannot be written: Broken pipe"));
  CHECK(read_lines(dir / "head").at(0).at("status") == "ok");
}

TEST_CASE("A folder that cannot be written is told before anything is loaded") {
  TempDir dir;
  write_prompts(dir / "p.jsonl", 1);
  std::string folder = dir / "o";
  fs::create_directory(folder);
  fs::permissions(folder, fs::perms::owner_read | fs::perms::owner_exec);
  if (geteuid() == 0) folder = "/proc";  // root writes where it may not
  for (const std::string& output : {folder, folder + "/x"}) {
    const ProcessResult result =
        run_program(dir, kModel + "-o " + output + " " + (dir / "p.jsonl"));
    INFO(result.err);
    CHECK(result.exit_code == 1);
    CHECK(has(result.err, output));
    CHECK(!has(result.err, "loaded"));
  }
}

}  // namespace
}  // namespace mla::test::disk_test
