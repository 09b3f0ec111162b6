// --resume, signals and --fail-fast: whatever ends a run, what it finished is kept, and going on
// gives the file of a run that nothing ended.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "tests/e2e/child.h"

namespace mla::test::resume_test {
namespace {

namespace fs = std::filesystem;

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu ";

// Requests that end one after another.
std::string some_prompts(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    const std::string id = "q" + std::to_string(i);
    Json body = {{"prompt", {5 + i, 6, 7, 8}},
                 {"temperature", i % 2},
                 {"ignore_eos", true},
                 {"max_tokens", 8 + 13 * i % 40}};
    // Every fifth in the form of OpenAI's batch API.
    const bool openai = i % 5 == 4;
    if (!openai) body["id"] = id;
    const Json line = openai ? Json{{"custom_id", id},
                                    {"method", "POST"},
                                    {"url", "/v1/completions"},
                                    {"body", body}}
                             : body;
    text += line.dump() + "\n";
  }
  return text;
}

// A finished run to compare with, and the command of another one into folder `o`.
struct Fixture {
  TempDir dir;
  std::string options = kModel + "--threads 1 --max-num-seqs 3 ";
  explicit Fixture(const std::string& prompts = some_prompts(24), int expected_code = 0) {
    write_text(dir / "p.jsonl", prompts);
    REQUIRE(
        run_program(dir, options + "-o " + (dir / "whole") + " " + (dir / "p.jsonl")).exit_code ==
        expected_code);
  }
  std::string command(const std::string& more = "") const {
    return options + more + " -o " + (dir / "o") + " " + (dir / "p.jsonl");
  }
  ProcessResult resume(const std::string& more = "") const {
    return run_program(dir, command("--resume " + more));
  }
  std::string whole() const { return without_timing(dir / "whole/outputs.jsonl"); }
  std::string resumed() const { return without_timing(dir / "o/outputs.jsonl"); }
  int64_t partial_lines() const {
    if (!fs::exists(dir / "o/outputs.jsonl.partial")) return 0;
    const std::string text = read_file(dir / "o/outputs.jsonl.partial");
    return std::count(text.begin(), text.end(), '\n');
  }
  // The first `lines` lines of the finished run, in another order, as a run leaves them that was
  // ended; `torn` bytes of the next line behind them.
  void leave_partial(size_t lines, size_t torn) {
    fs::create_directories(dir / "o");
    const std::string text = read_file(dir / "whole/outputs.jsonl");
    std::vector<std::string> all;
    for (size_t at = 0; at < text.size();) {
      const size_t end = text.find('\n', at) + 1;
      all.push_back(text.substr(at, end - at));
      at = end;
    }
    std::string partial;
    for (size_t i = lines; i > 0; --i) partial += all[i - 1];
    if (torn > 0) partial += all[lines].substr(0, torn);
    write_text(dir / "o/outputs.jsonl.partial", partial);
    leave_run_json("running");
  }
  void leave_run_json(const std::string& state) {
    Json run = run_json(dir / "whole");
    run["state"] = state;
    run["summary"] = nullptr;
    write_text(dir / "o/run.json", run.dump(2));
  }
};

TEST_CASE("A run killed at any moment and resumed gives the file of a run that nothing ended") {
  Fixture f;
  const auto start = std::chrono::steady_clock::now();
  REQUIRE(run_program(f.dir, f.command()).exit_code == 0);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::mt19937 random(20250601);
  const auto uniform = [&](double to) {
    return std::uniform_real_distribution<double>(0, to)(random);
  };
  const auto sleep = [](double s) { usleep(static_cast<useconds_t>(s * 1e6)); };
  int kept = 0, ended = 0;
  for (int round = 0; round < 20; ++round) {
    fs::remove_all(f.dir / "o");
    // Twice, so that a resumed run is killed too: at a time, behind a record, and about the rename.
    for (const char* how : {"", "--resume "}) {
      Child child(f.dir, f.command(how));
      const int64_t lines = f.partial_lines();
      const double moment = round % 3 == 0 ? uniform(seconds) : uniform(0.004);
      const int64_t record = round % 3 == 2 ? 24 : lines + 1 + static_cast<int64_t>(uniform(12));
      if (round % 3 > 0)
        wait_until([&] { return f.partial_lines() >= record || !child.running(); });
      sleep(moment);
      child.send(SIGKILL);
      const int code = child.wait();
      std::printf("round %d %s: %s %.4f s, %lld records, exit %d\n", round, how,
                  round % 3 ? fmt::format("behind record {} by", record).c_str() : "at", moment,
                  static_cast<long long>(f.partial_lines()), code);
      kept += f.partial_lines() > 0;
      ended += code == 137;
    }
    const ProcessResult result = f.resume();
    INFO("round " << round << ": " << result.err);
    REQUIRE(result.exit_code == 0);
    REQUIRE(f.resumed() == f.whole());
    CHECK(run_json(f.dir / "o").at("state") == "finished");
    CHECK(!fs::exists(f.dir / "o/outputs.jsonl.partial"));
  }
  CHECK(kept > 10);
  CHECK(ended > 20);
}

TEST_CASE("A torn last line is dropped and only what is missing runs") {
  Fixture f;
  f.leave_partial(20, 40);
  const ProcessResult result = f.resume();
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(f.resumed() == f.whole());
  const Json run = run_json(f.dir / "o");
  CHECK(run.at("counts").at("requests") == 24);
  CHECK(run.at("counts").at("ok") == 24);
  CHECK(run.at("counts").at("kept") == 20);
  CHECK(run.at("summary").at("num_requests") == 4);
  // Kept records stay as they are, timing included.
  const auto lines = read_lines(f.dir / "o/outputs.jsonl");
  REQUIRE(lines.size() == 24);
  CHECK(lines[3] == read_lines(f.dir / "whole/outputs.jsonl")[3]);
}

TEST_CASE("A partial file with every record is renamed without running anything again") {
  Fixture f;
  f.leave_partial(24, 0);
  write_text(f.dir / "o/outputs.jsonl.tmp", "{\"id\":");
  CHECK(f.resume().exit_code == 0);
  CHECK(read_file(f.dir / "o/outputs.jsonl") == read_file(f.dir / "whole/outputs.jsonl"));
  CHECK(run_json(f.dir / "o").at("summary").at("num_requests") == 0);
}

TEST_CASE("A run ended between the rename and its last word is brought to its end") {
  Fixture f;
  f.leave_partial(24, 0);
  fs::copy(f.dir / "whole/outputs.jsonl", f.dir / "o/outputs.jsonl");
  const ProcessResult result = f.resume();
  CHECK(result.exit_code == 0);
  CHECK(!has(result.err, "loaded"));
  CHECK(read_file(f.dir / "o/outputs.jsonl") == read_file(f.dir / "whole/outputs.jsonl"));
  CHECK(!fs::exists(f.dir / "o/outputs.jsonl.partial"));
  CHECK(run_json(f.dir / "o").at("state") == "finished");
  CHECK(run_json(f.dir / "o").at("counts").at("ok") == 24);
}

TEST_CASE("A complete run stays as it is and nothing is loaded") {
  Fixture f;
  fs::copy(f.dir / "whole", f.dir / "o");
  const ProcessResult result = f.resume();
  CHECK(result.exit_code == 0);
  CHECK(!has(result.err, "loaded"));
  for (const char* name : {"/outputs.jsonl", "/run.json"})
    CHECK(read_file(f.dir.path() + "/o" + name) == read_file(f.dir.path() + "/whole" + name));
}

TEST_CASE("An empty folder is a fresh start for resume") {
  Fixture f;
  CHECK(f.resume().exit_code == 0);
  CHECK(f.resumed() == f.whole());
}

TEST_CASE("Failed records run again and records of broken lines keep the exit code") {
  const std::string prompts = some_prompts(6) + "{not json\n";
  Fixture f(prompts, 3);
  f.leave_partial(7, 0);
  std::string partial = read_file(f.dir / "o/outputs.jsonl.partial");
  partial += "{\"id\":\"q9\",\"index\":9";  // torn
  const size_t at = partial.find("{\"id\":\"q2\"");
  partial.replace(
      at, partial.find('\n', at) - at,
      R"({"id":"q2","index":2,"line":3,"status":"error","error":{"code":"x","message":"y"}})");
  write_text(f.dir / "o/outputs.jsonl.partial", partial);
  CHECK(f.resume().exit_code == 3);
  CHECK(f.resumed() == f.whole());
  CHECK(run_json(f.dir / "o").at("counts").at("kept") == 5);
  // The finished file with failures likewise, whatever was done of it.
  CHECK(f.resume().exit_code == 3);
  CHECK(f.resumed() == f.whole());
}

TEST_CASE("Resume refuses what is of another run and names the difference") {
  Fixture f;
  f.leave_partial(10, 0);
  const std::string before = read_file(f.dir / "o/run.json");
  const auto refused = [&](const std::string& options) {
    const ProcessResult result = f.resume(options);
    INFO(options << ": " << result.err);
    CHECK(result.exit_code == 2);
    CHECK(!has(result.err, "loaded"));
    CHECK(read_file(f.dir / "o/run.json") == before);
    CHECK(f.partial_lines() == 10);
    return result.err;
  };
  CHECK(has(refused("--seed 1"), "option sampling.seed: expected 1, found 0"));
  CHECK(has(refused("--temperature 0.5"), "option sampling.temperature"));
  CHECK(has(refused("--limit 20"), "option limit: expected 20, found null"));
  CHECK(has(refused("--dtype float32"), "option dtype"));
  CHECK(has(refused("--max-model-len 2048"), "option max_model_len: expected 2048, found 4096"));
  CHECK(has(refused("--chunked-prefill on"), "option chunked_prefill"));
  CHECK(has(refused("--shard 0/2"), "option shard"));
  CHECK(has(refused("--load-format dummy"), "checkpoint fingerprint"));
  CHECK(has(refused("--overwrite"), "--overwrite"));

  write_text(f.dir / "p.jsonl", some_prompts(25));
  CHECK(has(refused(""), "SHA-256 of the input"));
  write_text(f.dir / "p.jsonl", some_prompts(24));

  fs::remove(f.dir / "o/run.json");
  const ProcessResult none = f.resume();
  CHECK(none.exit_code == 2);
  CHECK(has(none.err, "run.json"));
  write_text(f.dir / "o/run.json", before);

  std::string partial = read_file(f.dir / "o/outputs.jsonl.partial");
  write_text(f.dir / "o/outputs.jsonl.partial", partial.substr(7));
  const ProcessResult broken = f.resume();
  CHECK(broken.exit_code == 1);
  CHECK(has(broken.err, "outputs.jsonl.partial: line 1"));
  write_text(f.dir / "o/outputs.jsonl.partial", partial);

  // What changes no bit may change.
  CHECK(f.resume("--mla-workspace-tokens 64 --max-num-batched-tokens 5000 --enforce-eager")
            .exit_code == 0);
  CHECK(f.resumed() == f.whole());
}

TEST_CASE("Resume is refused where what was read or written is gone") {
  Fixture f;
  const auto code = [&](const std::string& arguments) {
    const ProcessResult result = run_program(f.dir, kModel + "--resume " + arguments);
    CHECK(has(result.err, "--resume"));
    return result.exit_code;
  };
  CHECK(code("-o " + (f.dir / "o") + " -") == 2);
  CHECK(code("-o - " + (f.dir / "p.jsonl")) == 2);
  REQUIRE(mkfifo((f.dir / "fifo").c_str(), 0600) == 0);
  CHECK(code("-o " + (f.dir / "o") + " " + (f.dir / "fifo")) == 2);
}

TEST_CASE("With both each mode resumes on its own") {
  Fixture f;
  const std::string both = "--chunked-prefill both --max-num-batched-tokens 16 ";
  REQUIRE(run_program(f.dir, f.command(both)).exit_code == 0);
  const std::string off = read_file(f.dir / "o/off/outputs.jsonl");
  fs::remove(f.dir / "o/on/outputs.jsonl");
  fs::remove(f.dir / "o/compare.json");
  const ProcessResult result = f.resume(both);
  INFO(result.err);
  CHECK(result.exit_code == 0);
  CHECK(read_file(f.dir / "o/off/outputs.jsonl") == off);
  CHECK(without_timing(f.dir / "o/on/outputs.jsonl") == f.whole());
  CHECK(has(result.out, "identical: 24 of 24"));
  CHECK(!has(f.resume(both).err, "loaded"));
}

TEST_CASE("The first signal ends a run in good order and it can be resumed") {
  Fixture f;
  for (const int signal : {SIGINT, SIGTERM}) {
    fs::remove_all(f.dir / "o");
    Child child(f.dir, f.command());
    REQUIRE(wait_until([&] { return f.partial_lines() >= 2; }));
    child.send(signal);
    CHECK(child.wait() == 130);
    INFO(child.err());
    CHECK(has(child.err(), "--resume"));
    const Json run = run_json(f.dir / "o");
    CHECK(run.at("state") == "interrupted");
    CHECK(run.at("counts").at("ok") == f.partial_lines());
    CHECK(!fs::exists(f.dir / "o/outputs.jsonl"));
    CHECK(f.resume().exit_code == 0);
    CHECK(f.resumed() == f.whole());
  }
}

TEST_CASE("A signal ends the wait for a pipe") {
  for (const bool is_standard_input : {true, false}) {
    TempDir dir;
    const std::string fifo = dir / "fifo";
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    const int writer = open(fifo.c_str(), O_RDWR);  // nobody writes
    REQUIRE(writer >= 0);
    Child child(dir, kModel + "-o " + (dir / "o") + " " + (is_standard_input ? "-" : fifo),
                is_standard_input ? fifo : "/dev/null");
    const auto reads = [&] {
      return fs::exists(dir / "o/run.json") && !run_json(dir / "o").at("load_time").is_null();
    };
    REQUIRE(wait_until([&] { return reads() || !child.running(); }));
    usleep(100000);
    REQUIRE(child.running());
    child.send(SIGTERM);
    CHECK(child.wait() == 130);
    CHECK(run_json(dir / "o").at("state") == "interrupted");
    close(writer);
  }
}

TEST_CASE("A second signal ends at once") {
  TempDir dir;
  write_text(dir / "p.jsonl",
             "{\"prompt\": [5], \"max_tokens\": 1}\n"
             "{\"prompt\": [5], \"max_tokens\": 60, \"ignore_eos\": true}\n");
  Child child(dir, kModel + "-o " + (dir / "o") + " " + (dir / "p.jsonl"), "/dev/null",
              "MLA_FAULT=hang:0", "mla-run-faulty");  // in a step that does not end
  REQUIRE(
      wait_until([&] { return fs::exists(dir / "stderr") && has(child.err(), "device 0 hangs"); }));
  child.send(SIGINT);
  usleep(100000);
  CHECK(child.running());
  child.send(SIGINT);
  CHECK(child.wait() == 130);
  CHECK(read_lines(dir / "o/outputs.jsonl.partial").size() == 1);
  CHECK(run_json(dir / "o").at("state") == "running");
}

TEST_CASE("The first failed line stops a run with fail-fast and it can be resumed") {
  std::string prompts = some_prompts(12);
  prompts.insert(prompts.find("{\"id\":\"q7\""), "{\"prompt\": [99999999]}\n");
  Fixture f(prompts, 3);
  const ProcessResult stopped = run_program(f.dir, f.command("--fail-fast"));
  CHECK(stopped.exit_code == 3);
  CHECK(has(stopped.err, "--fail-fast"));
  CHECK(has(stopped.err, "line "));
  CHECK(!fs::exists(f.dir / "o/outputs.jsonl"));
  const Json run = run_json(f.dir / "o");
  CHECK(run.at("state") == "stopped");
  CHECK(run.at("counts").at("failed") == 1);
  CHECK(run.at("counts").at("requests") == f.partial_lines());
  CHECK(f.resume().exit_code == 3);
  CHECK(f.resumed() == f.whole());
}

TEST_CASE("Lines in front of the one at which fail-fast stops are answered") {
  const std::string too_long = Json{{"prompt", std::vector<int>(5000, 7)}}.dump() + "\n";
  for (const std::string& bad : {std::string("{broken\n"), too_long}) {
    std::string prompts = some_prompts(12);
    prompts.insert(prompts.find("{\"id\":\"q7\""), bad);
    Fixture f(prompts, 3);
    for (const std::string engines : {"", "-dp 2 "}) {
      if (bad == too_long && !engines.empty()) continue;  // its engine stops at once
      const ProcessResult stopped = run_program(f.dir, f.command("--fail-fast " + engines));
      INFO(engines << bad.substr(0, 30) << ": " << stopped.err);
      CHECK(stopped.exit_code == 3);
      const Json run = run_json(f.dir / "o");
      CHECK(run.at("state") == "stopped");
      CHECK(run.at("counts").at("ok") == 7);  // q0 to q6
      CHECK(run.at("counts").at("failed") == 1);
      CHECK(run.at("counts").at("requests") == f.partial_lines());
      CHECK(f.resume().exit_code == 3);
      CHECK(f.resumed() == f.whole());
      fs::remove_all(f.dir / "o");
    }
  }
}

}  // namespace
}  // namespace mla::test::resume_test
