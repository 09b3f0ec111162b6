// --trace: the steps of a run as Chrome's trace events.
#include <filesystem>
#include <map>

#include "tests/e2e/process.h"

namespace mla::test::trace_test {
namespace {

const std::string kRun = "-m " + source_path("tests/data/tiny-random") +
                         " --device cpu --quiet --max-num-batched-tokens 64 --limit 6 " +
                         source_path("tests/data/tiny-prompts.jsonl") + " ";

// Of one process of the trace, by the name of its track.
std::map<std::string, std::vector<Json>> tracks_of(const Json& trace, int64_t pid) {
  std::map<int64_t, std::string> names;
  std::map<std::string, std::vector<Json>> tracks;
  for (const Json& event : trace) {
    if (event.at("pid") != pid) continue;
    if (event.at("name") == "thread_name")
      names[event.at("tid").get<int64_t>()] = event.at("args").at("name").get<std::string>();
    if (event.at("ph") == "X") tracks[names.at(event.at("tid").get<int64_t>())].push_back(event);
  }
  return tracks;
}

int64_t sum_of(const std::vector<Json>& events, const char* key) {
  int64_t sum = 0;
  for (const Json& event : events) sum += event.at("args").at(key).get<int64_t>();
  return sum;
}

TEST_CASE("A trace has every step of both modes, its tokens and requests, in order of time") {
  TempDir dir;
  const ProcessResult result = run_program(dir, kRun + "--chunked-prefill both --output " +
                                                    (dir / "o") + " --trace " + (dir / "t.json"));
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  const Json trace = read_json(dir / "t.json");
  int64_t pid = 0;
  for (const std::string mode : {"off", "on"}) {
    auto tracks = tracks_of(trace, ++pid);
    const Json run = read_json(dir / ("o/" + mode + "/run.json"));
    const Json& summary = run.at("summary");
    const int64_t steps = run.at("counts").at("steps").get<int64_t>();
    INFO(mode);
    CHECK(static_cast<int64_t>(tracks.at("planning").size()) == steps);
    CHECK(static_cast<int64_t>(tracks.at("detokenising").size()) == steps);
    int64_t computed = 0;
    for (const char* kind : {"prefill_steps", "decode_steps", "mixed_steps"})
      computed += summary.at(kind).at("prefill_tokens").get<int64_t>();
    CHECK(sum_of(tracks.at("prefill"), "tokens") == computed);
    CHECK(sum_of(tracks.at("prefill"), "requests") == run.at("counts").at("chunks"));
    CHECK(sum_of(tracks.at("sampling"), "tokens") ==
          summary.at("total_num_tokens").get<int64_t>() - computed);
    CHECK(sum_of(tracks.at("detokenising"), "requests_finished") == 6);
    const Json& prompt = tracks.at("prefill")[0].at("args").at("prompts")[0];
    CHECK(prompt.at("context") == 0);
    CHECK(prompt.at("tokens").get<int64_t>() > 0);
    CHECK(prompt.contains("id"));
    // A step is planned, computed, sampled, and then its text is made; the next one comes after.
    double last = 0;
    for (size_t i = 0; i < tracks.at("planning").size(); ++i) {
      const auto begin = [&](const Json& e) { return e.at("ts").get<double>(); };
      const auto end = [&](const Json& e) { return begin(e) + e.at("dur").get<double>(); };
      const Json &plan = tracks.at("planning")[i], &take = tracks.at("detokenising")[i];
      CHECK(begin(plan) >= last);
      CHECK(begin(take) >= begin(plan));
      last = end(take) - 1;  // printed to a thousandth
    }
    for (const Json& sampling : tracks.at("sampling")) {
      const int64_t step = sampling.at("args").at("step").get<int64_t>();
      for (const char* kind : {"prefill", "decode"})
        for (const Json& compute : tracks.at(kind)) {
          if (compute.at("args").at("step") != step) continue;
          const double until = compute.at("ts").get<double>() + compute.at("dur").get<double>();
          CHECK(std::fabs(until - sampling.at("ts").get<double>()) < 1);
        }
    }
  }
  CHECK(tracks_of(trace, 3).empty());
  const auto with_prefill_beside = [&](int64_t of) {
    int64_t count = 0;
    const auto tracks = tracks_of(trace, of);
    for (const Json& event : tracks.at("decode"))
      count += event.at("args").at("prefill_tokens_beside").get<int64_t>() > 0;
    return count;
  };
  CHECK(with_prefill_beside(1) == 0);  // off never mixes
  CHECK(with_prefill_beside(2) > 0);
}

TEST_CASE("A trace changes no bit and takes no file that is there") {
  TempDir dir;
  const std::string on = kRun + "--chunked-prefill on ";
  REQUIRE(run_program(dir, on + "--output " + (dir / "a")).exit_code == 0);
  const std::string traced = on + "--trace " + (dir / "t.json") + " ";
  REQUIRE(run_program(dir, traced + "--output " + (dir / "b")).exit_code == 0);
  CHECK(
      run_program(dir, "compare --json " + (dir / "c.json") + " " + (dir / "a") + " " + (dir / "b"))
          .exit_code == 0);
  const ProcessResult again = run_program(dir, traced + "--output " + (dir / "c"));
  CHECK(again.exit_code == 2);
  CHECK(has(again.err, "t.json exists; --overwrite replaces it"));
  const ProcessResult nowhere =
      run_program(dir, on + "--trace " + (dir / "no/t.json") + " --output " + (dir / "d"));
  CHECK(nowhere.exit_code == 2);
  CHECK(has(nowhere.err, "--trace: expected a folder " + (dir / "no") + ", found none"));
  CHECK_FALSE(std::filesystem::exists(dir / "d"));
  const ProcessResult full = run_program(dir, on + "--trace /dev/full --output " + (dir / "e"));
  CHECK(full.exit_code == 1);
  CHECK(has(full.err, "/dev/full: it could not be written to its end"));
  CHECK(std::filesystem::exists(dir / "e/outputs.jsonl"));
  // With both the runs are compared all the same.
  const ProcessResult compared =
      run_program(dir, kRun + "--chunked-prefill both --trace /dev/full --output " + (dir / "h"));
  CHECK(compared.exit_code == 1);
  CHECK(has(compared.err, "/dev/full: it could not be written to its end; the trace is not whole"));
  CHECK(has(compared.out, "same tokens"));
  CHECK(read_json(dir / "h/compare.json").contains("token_identical"));
  CHECK(std::filesystem::exists(dir / "h/report.html"));
  // A file of the run's folder, but none that the run writes; one that was refused leaves nothing.
  REQUIRE(run_program(dir, on + "--output " + (dir / "f") + " --trace " + (dir / "f/t.json"))
              .exit_code == 0);
  const ProcessResult own = run_program(
      dir, on + "--overwrite --output " + (dir / "f") + " --trace " + (dir / "f/run.json"));
  CHECK(own.exit_code == 2);
  CHECK(has(own.err, "--trace: expected a file of its own"));
  CHECK(
      run_program(dir, on + "--output " + (dir / "f") + " --trace " + (dir / "u.json")).exit_code ==
      2);
  CHECK_FALSE(std::filesystem::exists(dir / "u.json"));
  // A complete run keeps its trace.
  const std::string trace = read_file(dir / "f/t.json");
  CHECK(run_program(dir, on + "--resume --output " + (dir / "f") + " --trace " + (dir / "f/t.json"))
            .exit_code == 0);
  CHECK(read_file(dir / "f/t.json") == trace);
  // --resume alone makes no trace of another run's.
  write_text(dir / "keep.txt", "mine");
  CHECK(run_program(dir, on + "--resume --output " + (dir / "g") + " --trace " + (dir / "keep.txt"))
            .exit_code == 2);
  CHECK(read_file(dir / "keep.txt") == "mine");
}

}  // namespace
}  // namespace mla::test::trace_test
