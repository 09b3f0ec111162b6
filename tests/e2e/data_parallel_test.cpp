// -dp: several engines over one file give the file of one, but for timing.
#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "lib/base/error.h"
#include "lib/engine/run_batch.h"
#include "tests/e2e/child.h"
#include "tests/support/forwarding_runner.h"
#include "tests/support/runner.h"
#include "tests/support/synthetic.h"

namespace mla::test::data_parallel_test {
namespace {

namespace fs = std::filesystem;

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu ";

// Requests of every kind, bad lines among them.
std::string mixed_prompts(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    Json line = {{"id", "q" + std::to_string(i)},
                 {"max_tokens", 4 + 7 * i % 23},
                 {"temperature", i % 3 == 0 ? 1 : 0},
                 {"ignore_eos", true}};
    line["prompt"] = i % 2 == 0 ? Json("one two three " + std::to_string(i)) : Json({5 + i, 6, 7});
    if (i % 5 == 0) line["n"] = 2;
    if (i % 7 == 0) line["logprobs"] = 2;
    if (i % 11 == 0) line["repetition_penalty"] = 1.2;
    text += line.dump() + "\n";
    if (i % 9 == 4) text += i % 2 ? "{broken\n" : "{\"prompt\": [99999999]}\n";
  }
  return text;
}

struct Fixture {
  TempDir dir;
  Fixture() { write_text(dir / "p.jsonl", mixed_prompts(40)); }
  ProcessResult run(const std::string& out, const std::string& options,
                    const std::string& fault = "", const std::string& program = "mla-run") const {
    return run_program(
        dir, kModel + "--quiet -o " + (dir / out) + " " + options + " " + (dir / "p.jsonl"),
        "/dev/null", fault, program);
  }
  std::string records(const std::string& out) const {
    return without_timing(dir / (out + "/outputs.jsonl"));
  }
};

TEST_CASE("Several engines give the records of one, in either mode and with ranks") {
  const Fixture f;
  REQUIRE(f.run("one", "--threads 1").exit_code == 3);
  const Json one = run_json(f.dir / "one");
  int number = 0;
  for (const std::string options : {"-dp 2", "-dp 3 --max-num-seqs 2",
                                    "--data-parallel-size 2 --chunked-prefill on "
                                    "--max-num-batched-tokens 16",
                                    "-dp 2 --enable-prefix-caching", "-dp=2 --limit 50"}) {
    const std::string out = "o" + std::to_string(number++);
    const ProcessResult result = f.run(out, options);
    INFO(options << ": " << result.err);
    REQUIRE(result.exit_code == 3);
    const Json run = run_json(f.dir / out);
    for (const char* count : {"requests", "ok", "failed"})
      CHECK(run.at("counts").at(count) == one.at("counts").at(count));
    CHECK(run.at("summary").at("total_num_tokens") == one.at("summary").at("total_num_tokens"));
    CHECK(run.at("options").at("data_parallel_size").get<int>() > 1);
    if (has(options, "caching")) continue;  // cached_tokens are others
    CHECK(f.records(out) == f.records("one"));
  }
}

TEST_CASE("Ranks and engines together give the bits of ranks alone") {
  const Fixture f;
  REQUIRE(f.run("tp", "-tp 2").exit_code == 3);
  const ProcessResult result = f.run("both",
                                     "-tp 2 -dp 2 --chunked-prefill both --overwrite "
                                     "--max-num-batched-tokens 16");
  INFO(result.out << result.err);
  REQUIRE(result.exit_code == 3);
  CHECK(f.records("both/off") == f.records("tp"));
  CHECK(f.records("both/on") == f.records("tp"));
}

TEST_CASE("Work is dealt to every engine and a trace has a process for each") {
  const Fixture f;
  REQUIRE(f.run("o", "-dp 2 --max-num-seqs 2 --trace " + (f.dir / "t.json")).exit_code == 3);
  const Json trace = read_json(f.dir / "t.json");
  std::set<std::string> names;
  std::map<int64_t, int64_t> tokens;
  for (const Json& event : trace) {
    if (event.at("name") == "process_name")
      names.insert(event.at("args").at("name").get<std::string>());
    if (event.at("name") == "decode")
      tokens[event.at("pid").get<int64_t>()] += event.at("args").at("tokens").get<int64_t>();
  }
  CHECK(names ==
        std::set<std::string>{"chunked prefill off, engine 0", "chunked prefill off, engine 1"});
  REQUIRE(tokens.size() == 2);
  // The rates of the two add up; their tokens in the time of both would be half of it.
  const Json steps = run_json(f.dir / "o").at("summary").at("decode_steps");
  CHECK(steps.at("tokens_per_second").get<double>() >
        1.2 * steps.at("decode_tokens").get<double>() / steps.at("seconds").get<double>());
  CHECK(tokens[1] > 0.25 * static_cast<double>(tokens[2]));
  CHECK(tokens[2] > 0.25 * static_cast<double>(tokens[1]));
}

TEST_CASE("A run of several engines ends early in good order and resumes with another number") {
  const Fixture f;
  REQUIRE(f.run("one", "").exit_code == 3);
  const ProcessResult stopped = f.run("o", "-dp 2 --fail-fast");
  CHECK(stopped.exit_code == 3);
  CHECK(run_json(f.dir / "o").at("state") == "stopped");
  CHECK_FALSE(fs::exists(f.dir / "o/outputs.jsonl"));
  CHECK(f.run("o", "--resume").exit_code == 3);
  CHECK(f.records("o") == f.records("one"));

  fs::remove_all(f.dir / "o");
  write_text(f.dir / "long.jsonl", [] {
    std::string text;
    for (int i = 0; i < 64; ++i)
      text += Json{{"prompt", {5 + i, 6}}, {"max_tokens", 400}, {"ignore_eos", true}}.dump() + "\n";
    return text;
  }());
  const std::string command =
      kModel + "-o " + (f.dir / "o") + " -dp 2 --max-num-seqs 2 " + (f.dir / "long.jsonl");
  Child child(f.dir, command);
  REQUIRE(wait_until([&] {
    const std::string partial = f.dir / "o/outputs.jsonl.partial";
    return fs::exists(partial) && fs::file_size(partial) > 0;
  }));
  child.send(SIGINT);
  CHECK(child.wait() == 130);
  CHECK(run_json(f.dir / "o").at("state") == "interrupted");
  CHECK(run_program(f.dir, command + " --resume").exit_code == 0);
  CHECK(read_lines(f.dir / "o/outputs.jsonl").size() == 64);
}

// A batch of eight requests on two engines that ends, as a signal ends it, when all are answered
// and nobody has looked yet.
TEST_CASE("What engines have finished when a batch is stopped is kept") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_plain"), dir.path() + "/m");
  std::deque<LoadedModel> loaded;
  std::deque<std::unique_ptr<ModelRunner>> models;
  std::deque<Engine> engines;
  std::vector<Engine*> all;
  for (int i = 0; i < 2; ++i) {
    LoadedModel& one = loaded.emplace_back(dir / "m", DType::f32, 1);
    const MemoryPlan plan = plan_for(one, {.max_seqs = 4});
    models.push_back(one.make_model(plan.limits));
    engines.emplace_back(one.config, *models.back(), TextSetup{}, plan, 0, i == 1);
    all.push_back(&engines.back());
  }
  std::istringstream in([] {
    std::string lines;
    for (int i = 0; i < 8; ++i)
      lines += R"({"prompt": [5, 6], "max_tokens": 1})"
               "\n";
    return lines;
  }());
  ReaderOptions options;
  options.vocab_size = loaded.front().config.vocab_size;
  RequestReader reader(in, "requests", options);
  int kept = 0;
  const BatchOutcome outcome =
      run_batch(reader, all,
                {.stop =
                     [&] {
                       if (reader.records() < 8) return false;
                       std::this_thread::sleep_for(std::chrono::milliseconds(2000));
                       return true;
                     }},
                [&](int64_t, const OrderedJson&) { ++kept; });
  CHECK(outcome.end == BatchEnd::stopped);
  CHECK(kept >= 6);  // the last ones that were read may not have been dealt
  CHECK(outcome.counts.ok == kept);
}

// Its second step, which samples what nobody waits for, fails once `told` says that the record of
// the first one is known.
class FailsBehindTheLast : public ForwardingRunner {
 public:
  FailsBehindTheLast(ModelRunner& to, std::atomic<bool>& waits, const std::atomic<bool>& told)
      : ForwardingRunner(to), waits_(waits), told_(told) {}

  StepOutput collect() override {
    StepOutput out = ForwardingRunner::collect();
    if (++steps_ < 2) return out;
    waits_ = true;
    wait_until([&] { return told_.load(); }, 20);
    fail("told to fail");
  }

 private:
  std::atomic<bool>& waits_;
  const std::atomic<bool>& told_;
  int steps_ = 0;
};

// A pipelined engine has a step on its way when it learns that a stop token ended the last request.
TEST_CASE("An engine that fails when every line is answered still ends the batch as failed") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_plain"), dir.path() + "/m");
  LoadedModel loaded(dir / "m", DType::f32, 1);
  const MemoryPlan plan = plan_for(loaded, {.max_seqs = 4});
  BatchRequest request{.prompt = {5, 6}, .sampling = {}};
  request.sampling.max_tokens = 1;
  request.sampling.ignore_eos = true;
  const int32_t token = run_requests(loaded, {}, {request}).results[0].tokens[0];

  std::atomic<bool> waits{false}, told{false};
  std::deque<std::unique_ptr<ModelRunner>> models;
  std::deque<FailsBehindTheLast> failing;
  std::deque<LoadedModel> others;
  std::deque<Engine> engines;
  std::vector<Engine*> all;
  for (int i = 0; i < 2; ++i) {
    LoadedModel& one = others.emplace_back(dir / "m", DType::f32, 1);
    models.push_back(one.make_model(plan.limits));
    failing.emplace_back(*models.back(), waits, told);
    engines.emplace_back(one.config, failing.back(), TextSetup{}, plan, 0, true);
    all.push_back(&engines.back());
  }
  const Json line = {
      {"prompt", {5, 6}}, {"max_tokens", 9}, {"ignore_eos", true}, {"stop_token_ids", {token}}};
  std::istringstream in(line.dump());
  ReaderOptions options;
  options.vocab_size = loaded.config.vocab_size;
  RequestReader reader(in, "requests", options);
  int kept = 0;
  std::string error;
  try {
    run_batch(reader, all, {}, [&](int64_t, const OrderedJson& record) {
      kept += record.at("status") == "ok";
      CHECK(wait_until([&] { return waits.load(); }, 20));
      told = true;
    });
  } catch (const Error& e) {
    error = e.what();
  }
  CHECK(kept == 1);
  CHECK(error == "engine 0: told to fail");
}

TEST_CASE("A device that fails or hangs ends the run, what was finished is kept and it resumes") {
  const Fixture f;
  REQUIRE(f.run("one", "").exit_code == 3);
  REQUIRE(f.run("two", "-tp 2").exit_code == 3);
  for (const std::string fault : {"throw", "hang"}) {
    for (const std::string devices : {"-dp 2", "-tp 2", "-tp 2 -dp 2"}) {
      if (fault == "hang" && devices == "-tp 2 -dp 2")
        continue;  // as with one of them, and as long
      fs::remove_all(f.dir / "o");
      const std::string options = devices + " --threads 1 --max-num-seqs 2 ";
      const auto start = std::chrono::steady_clock::now();
      const ProcessResult failed =
          f.run("o", options + "--rank-timeout 1", "MLA_FAULT=" + fault + ":1", "mla-run-faulty");
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      INFO(fault << " " << devices << ": " << failed.err);
      CHECK(failed.exit_code == 1);
      CHECK(took.count() < 60);  // the bound, and 20 s for threads that do not end
      const Json run = run_json(f.dir / "o");
      CHECK(run.at("state") == "failed");
      const std::string error = run.at("error").get<std::string>();
      CHECK(has(failed.err, error));
      CHECK(has(error, fault == "throw" ? "device 1 was told to fail" : "within 1 s"));
      CHECK(has(error, devices == "-dp 2" ? "engine 1: rank 0" : "rank 1"));
      CHECK_FALSE(fs::exists(f.dir / "o/outputs.jsonl"));
      const size_t finished = read_lines(f.dir / "o/outputs.jsonl.partial").size();
      CHECK(finished > 0);
      const Json& counts = run.at("counts");
      CHECK(counts.at("requests") == finished);
      CHECK(counts.at("ok").get<size_t>() + counts.at("failed").get<size_t>() == finished);
      CHECK(f.run("o", options + "--resume").exit_code == 3);
      CHECK(run_json(f.dir / "o").at("counts").at("kept").get<int>() > 0);
      CHECK(f.records("o") == f.records(has(devices, "-tp") ? "two" : "one"));
    }
  }
}

}  // namespace
}  // namespace mla::test::data_parallel_test
