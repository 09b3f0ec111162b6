// --shard and merge: one file over several runs, and put together again.
#include <filesystem>

#include "tests/e2e/child.h"

namespace mla::test::shard_test {
namespace {

namespace fs = std::filesystem;

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu ";

// Blank and broken lines, lines without id, and an id that comes again in another shard.
std::string mixed_prompts() {
  std::string text = "\n";
  for (int i = 0; i < 10; ++i)
    text += "{\"prompt\": [" + std::to_string(10 + i) + ", 7], \"temperature\": 1}\n" +
            (i % 3 == 0 ? "  \n" : "");
  text.insert(1, "{\"id\": \"twice\", \"prompt\": [1, 2]}\n");
  text +=
      R"({"custom_id": "o", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5]}})"
      "\n";
  text += "{\"id\": \"twice\", \"prompt\": [3, 4]}\n{broken\n{\"id\": 5000, \"prompt\": [1]}";
  return text;
}

struct Shards {
  TempDir dir;
  explicit Shards(int n, const std::string& options = "") {
    write_text(dir / "p.jsonl", mixed_prompts());
    const int whole = run("whole", options);
    REQUIRE((whole == 0 || whole == 3));
    for (int i = 0; i < n; ++i) {
      const int code =
          run(shard(i), options + " --shard " + std::to_string(i) + "/" + std::to_string(n));
      REQUIRE((code == 0 || code == 3));
    }
  }
  static std::string shard(int i) { return "s" + std::to_string(i); }
  int run(const std::string& name, const std::string& options) const {
    return run_program(dir, kModel + "-o " + (dir / name) + " " + options + " " + (dir / "p.jsonl"))
        .exit_code;
  }
  ProcessResult merge(const std::vector<std::string>& names,
                      const std::string& options = "") const {
    std::string arguments = "merge " + options + " -o " + (dir / "merged");
    for (const std::string& name : names) arguments += " " + (dir / name);
    return run_program(dir, arguments);
  }
};

TEST_CASE("Shards merged are the file of one run, records of broken lines included") {
  for (const std::string options : {"", "--limit 9"}) {
    const Shards shards(3, options);
    for (int i = 0; i < 3; ++i) {  // their prompts share no page
      Json run = run_json(shards.dir / Shards::shard(i));
      run["counts"]["cached_tokens"] = 1 + i;
      write_text(shards.dir / Shards::shard(i) + "/run.json", run.dump());
    }
    const ProcessResult merged = shards.merge({"s2", "s0", "s1"});
    INFO(options << merged.err);
    CHECK(merged.exit_code == (options.empty() ? 3 : 0));
    CHECK(without_timing(shards.dir / "merged/outputs.jsonl") ==
          without_timing(shards.dir / "whole/outputs.jsonl"));
    const Json run = run_json(shards.dir / "merged"), whole = run_json(shards.dir / "whole");
    CHECK(run.at("state") == "finished");
    for (const char* name : {"requests", "ok", "failed"})
      CHECK(run.at("counts").at(name) == whole.at("counts").at(name));
    CHECK(run.at("counts").at("cached_tokens") == 6);
    CHECK(run.at("input") == whole.at("input"));
    CHECK(run.at("options").at("shard").is_null());
    CHECK(run.at("shards").size() == 3);
    CHECK(run.at("summary").at("total_output_tokens") ==
          whole.at("summary").at("total_output_tokens"));
    const Json& rates = run.at("summary");
    CHECK(rates.at("flop") == whole.at("summary").at("flop"));
    const double seconds = rates.at("elapsed_time");
    CHECK(rates.at("tflop_per_second") == rates.at("flop").get<double>() / seconds / 1e12);
    CHECK(rates.at("gbyte_per_second") == rates.at("bytes").get<double>() / seconds / 1e9);
    CHECK(run_program(shards.dir, "compare --json " + (shards.dir / "c.json") + " " +
                                      (shards.dir / "merged") + " " + (shards.dir / "whole"))
              .exit_code == 0);
  }
}

TEST_CASE("A shard may be empty and one shard is the whole file") {
  const Shards many(20);
  CHECK(read_lines(many.dir / "s19/outputs.jsonl").empty());
  std::vector<std::string> names;
  for (int i = 0; i < 20; ++i) names.push_back(Shards::shard(i));
  CHECK(many.merge(names).exit_code == 3);
  CHECK(without_timing(many.dir / "merged/outputs.jsonl") ==
        without_timing(many.dir / "whole/outputs.jsonl"));
  const Shards one(1);
  CHECK(one.merge({"s0"}).exit_code == 3);
  CHECK(without_timing(one.dir / "merged/outputs.jsonl") ==
        without_timing(one.dir / "whole/outputs.jsonl"));
}

TEST_CASE("Merge refuses what is not the whole of one run and says which folder") {
  const Shards shards(3);
  const auto refused = [&](const std::vector<std::string>& names) {
    const ProcessResult result = shards.merge(names);
    INFO(result.err);
    CHECK(result.exit_code == 1);
    CHECK(!fs::exists(shards.dir / "merged/outputs.jsonl"));
    CHECK(!fs::exists(shards.dir / "merged/outputs.jsonl.partial"));
    return result.err;
  };
  CHECK(has(refused({"s0", "s2"}), "shard 1/3 is missing"));
  CHECK(has(refused({"s0", "s1", "s2", "s1"}), "shard 1/3 again"));
  CHECK(has(refused({"s0", "s1", "whole"}), "--shard I/N"));
  CHECK(has(refused({"s0", "s1", "nowhere"}), "nowhere"));

  const auto changed = [&](const char* pointer, const Json& value) {
    fs::remove_all(shards.dir / "other");
    fs::copy(shards.dir / "s2", shards.dir / "other");
    Json run = run_json(shards.dir / "other");
    run[Json::json_pointer(pointer)] = value;
    write_text(shards.dir / "other/run.json", run.dump());
    return refused({"s0", "s1", "other"});
  };
  CHECK(has(changed("/state", "interrupted"), "interrupted; run it again with --resume"));
  CHECK(has(changed("/options/shard", "2/4"), "3 shards"));
  CHECK(has(changed("/options/sampling/seed", 4), "option sampling.seed: expected 0, found 4"));
  CHECK(has(changed("/input/sha256", "00"), "SHA-256 of the input"));
  CHECK(has(changed("/model/fingerprint", "00"), "checkpoint fingerprint"));
  CHECK(has(changed("/model/files/config.json", "00"), "checkpoint's config.json"));
  CHECK(has(changed("/input/records", 5), "records"));
  CHECK(has(changed("/counts/ok", "x"), "other/run.json: field '/counts/ok': expected an integer"));
}

TEST_CASE("Merge finds a record that is missing, there twice or of another shard") {
  const Shards shards(2);
  const std::string path = shards.dir / "s1/outputs.jsonl", text = read_file(path);
  const size_t end = text.find('\n') + 1;
  const auto refused = [&](const std::string& outputs) {
    write_text(path, outputs);
    const ProcessResult result = shards.merge({"s0", "s1"});
    CHECK(result.exit_code == 1);
    CHECK(!fs::exists(shards.dir / "merged/outputs.jsonl.partial"));
    return result.err;
  };
  CHECK(has(refused(text.substr(end)), "s1/outputs.jsonl: expected a record with index 1"));
  CHECK(has(refused(text + text.substr(0, end)), "found index 1 again"));
  CHECK(has(refused(text + read_file(shards.dir / "s0/outputs.jsonl")), "found index 0"));
  CHECK(has(refused(text.substr(0, text.size() - 5)), "torn"));
  write_text(path, text);
  CHECK(shards.merge({"s0", "s1"}).exit_code == 3);
  CHECK(has(shards.merge({"s0", "s1"}).err, "exists already"));
  CHECK(shards.merge({"s0", "s1"}, "--overwrite --quiet").err.empty());
  CHECK(run_program(shards.dir, "merge -o " + (shards.dir / "s0") + " " + (shards.dir / "s0") +
                                    " " + (shards.dir / "s1"))
            .exit_code == 2);
}

TEST_CASE("A shard that is none is refused and one that was interrupted resumes") {
  const Shards shards(2);
  for (const char* shard : {"2/2", "-1/2", "1", "1/", "/2", "a/b", "0/0", "1/2x"})
    CHECK(shards.run("x", std::string("--shard ") + shard) == 2);
  const std::string before = without_timing(shards.dir / "s1/outputs.jsonl");
  fs::rename(shards.dir / "s1/outputs.jsonl", shards.dir / "s1/outputs.jsonl.partial");
  CHECK(shards.run("s1", "--resume --shard 0/2") == 2);
  CHECK(shards.run("s1", "--resume --shard 1/2") == 3);
  CHECK(without_timing(shards.dir / "s1/outputs.jsonl") == before);
}

}  // namespace
}  // namespace mla::test::shard_test
