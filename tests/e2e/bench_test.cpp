// mla-run bench from outside.
#include <filesystem>

#include "tests/e2e/child.h"

namespace mla::test::bench_test {
namespace {

namespace fs = std::filesystem;

const std::string kBench = "bench --device cpu --threads 2 -m " +
                           source_path("tests/data/tiny-random") + " --max-num-seqs 4 ";

TEST_CASE("bench measures each kind of work and counts its tokens and steps") {
  TempDir dir;
  const ProcessResult result = run_program(
      dir, kBench +
               "--workload prefill:3x70 --workload decode:4x33x6 --workload mixed:5x20x7 "
               "--repeats 2 --json -o " +
               (dir / "bench.json"));
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(has(result.err, "memory plan"));
  CHECK(has(result.err, "decode:4x33x6, chunked prefill off: 2 of 2"));
  CHECK(read_file(dir / "bench.json") == result.out);
  const Json all = parse_json(result.out, "stdout");
  for (const char* key : {"version", "model", "fingerprint", "backend", "device", "dtype",
                          "load_format", "enforce_eager", "threads", "sampling", "load_time_s",
                          "warmup_time_s", "memory_plans", "peaks", "results"})
    CHECK(all.contains(key));
  CHECK(all.at("backend") == "cpu");
  CHECK(all.at("peaks").is_null());  // not measured there
  CHECK(all.at("memory_plans").at(0).at("max_model_len") == 71);
  REQUIRE(all.at("results").size() == 3);

  struct Expected {
    const char* workload;
    const char* kind;
    int64_t tokens, steps;
  };
  const std::vector<Expected> expected = {
      {"prefill:3x70", "prefill", 210, 1},
      {"decode:4x33x6", "decode", 24, 6},
      {"mixed:5x20x7", "mixed", 135, 14},  // four prompts, six steps, the fifth, six steps
  };
  for (size_t i = 0; i < expected.size(); ++i) {
    const Json& r = all.at("results").at(i);
    INFO(r.dump());
    CHECK(r.at("workload") == expected[i].workload);
    CHECK(r.at("kind") == expected[i].kind);
    CHECK(r.at("chunked_prefill") == "off");
    CHECK(r.at("tokens").get<int64_t>() == expected[i].tokens);
    CHECK(r.at("steps").get<int64_t>() == expected[i].steps);
    CHECK(r.at("steps_not_counted") == (i == 1 ? 1 : 0));
    CHECK(r.at("limit").is_null());
    REQUIRE(r.at("repeats").size() == 2);
    std::vector<double> rates;
    for (const Json& repeat : r.at("repeats")) {
      const double seconds = repeat.at("seconds"), rate = repeat.at("tokens_per_second");
      CHECK(seconds > 0);
      CHECK(std::abs(rate * seconds - static_cast<double>(expected[i].tokens)) < 1e-6);
      CHECK(std::abs(repeat.at("step_ms").get<double>() * static_cast<double>(expected[i].steps) -
                     1000 * seconds) < 1e-6);
      CHECK(repeat.at("preemptions") == 0);
      const double host = repeat.at("host_share");
      CHECK((host >= 0 && host < 1));
      rates.push_back(rate);
    }
    const Json& rate = r.at("tokens_per_second");
    CHECK(rate.at("min") == std::min(rates[0], rates[1]));
    CHECK(rate.at("max") == std::max(rates[0], rates[1]));
    CHECK(std::abs(rate.at("median").get<double>() - (rates[0] + rates[1]) / 2) < 1e-6);
    CHECK(r.at("tflop_per_second").get<double>() > 0);
    CHECK(r.at("gbyte_per_second").get<double>() > 0);
    CHECK(r.at("bytes").get<double>() > 0);
  }
  // Six steps of four sequences of 34 to 39 keys read 876 cache rows of 3 · 576 bfloat16; the
  // weights are 1.3 million, of which a step of four reads most.
  const double bytes = all.at("results").at(1).at("bytes");
  const double cache = 876.0 * 3 * 576 * 2;
  CHECK((bytes > cache + 6e6 && bytes < cache + 6 * 2.8e6));
}

// Prompts of `length` token ids, all different, and six tokens generated for each.
std::string six_tokens_each(int count, int length) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    Json ids = Json::array();
    for (int t = 0; t < length; ++t) ids.push_back(100 * i + t);
    text += Json{{"prompt", ids}, {"max_tokens", 6}, {"ignore_eos", true}}.dump() + "\n";
  }
  return text;
}

TEST_CASE("A run counts its work as bench does") {
  TempDir dir;
  write_text(dir / "p.jsonl", six_tokens_each(4, 20));
  const std::string modes = "--chunked-prefill both --max-num-batched-tokens 32 ";
  const ProcessResult bench =
      run_program(dir, kBench + modes + "--quiet --workload mixed:4x20x6 --repeats 1 --json");
  INFO(bench.err);
  REQUIRE(bench.exit_code == 0);
  const Json counted = parse_json(bench.out, "stdout").at("results");
  const std::string run = "--device cpu --threads 2 --quiet --max-num-seqs 4 -m " +
                          source_path("tests/data/tiny-random") + " " + (dir / "p.jsonl") + " ";
  const auto summary = [&](const std::string& name, const std::string& options) {
    const ProcessResult result = run_program(dir, run + options + " -o " + (dir / name));
    INFO(options << ": " << result.err);
    REQUIRE(result.exit_code == 0);
    const bool both = has(options, "both");
    const Json s = run_json(dir / (both ? name + "/on" : name)).at("summary");
    const double seconds = s.at("elapsed_time");
    CHECK(s.at("tflop_per_second") == s.at("flop").get<double>() / seconds / 1e12);
    CHECK(s.at("gbyte_per_second") == s.at("bytes").get<double>() / seconds / 1e9);
    return s;
  };
  const Json on = summary("o", modes);
  const Json off = run_json(dir / "o/off").at("summary");
  for (const char* name : {"flop", "bytes"}) {
    CHECK(off.at(name) == counted.at(0).at(name));
    CHECK(on.at(name) == counted.at(1).at(name));
  }
  const double flop = off.at("flop");
  CHECK(flop > 0);
  CHECK(on.at("flop") == flop);  // the same rows in other steps
  CHECK(summary("dp", "-dp 2").at("flop") == flop);
  CHECK(summary("tp", "-tp 2").at("flop") == flop);
  // One of four was answered before.
  REQUIRE(summary("r", "").at("flop") == flop);
  const std::string records = read_file(dir / "r/outputs.jsonl");
  write_text(dir / "r/outputs.jsonl.partial", records.substr(0, records.find('\n') + 1));
  fs::remove(dir / "r/outputs.jsonl");
  CHECK(summary("r", "--resume").at("flop") == flop * 3 / 4);
}

TEST_CASE("A run counts no work for tokens whose pages are there") {
  TempDir dir;
  const std::string once = six_tokens_each(1, 150);
  write_text(dir / "p.jsonl", once + once);
  const auto flop = [&](const std::string& options) {
    const ProcessResult result = run_program(
        dir, "--device cpu --quiet --max-num-seqs 1 -m " + source_path("tests/data/tiny-random") +
                 " " + (dir / "p.jsonl") + " --overwrite -o " + (dir / "o") + options);
    INFO(options << ": " << result.err);
    REQUIRE(result.exit_code == 0);
    return run_json(dir / "o").at("summary").at("flop").get<double>();
  };
  const double all = flop(""), shared = flop(" --enable-prefix-caching");
  // Of the second prompt's 150 tokens 128 were there; attention makes the others dearer.
  CHECK(shared < 0.65 * all);
  CHECK(shared > 0.5 * all);
}

TEST_CASE("bench runs dummy weights in both modes and prints a table") {
  TempDir dir;
  fs::create_directory(dir / "m");
  fs::copy(source_path("tests/data/tiny-random/config.json"), dir / "m/config.json");
  const ProcessResult result =
      run_program(dir, "bench --device cpu -m " + (dir / "m") +
                           " --load-format dummy --decode --batch 3 --input-len 40 --output-len 8 "
                           "--repeats 3 --chunked-prefill both --max-num-batched-tokens 60 "
                           "--temperature 0.8 --seed 3 --quiet");
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  INFO(result.out);
  CHECK(has(result.err, "random"));
  CHECK(!has(result.err, "memory plan"));
  CHECK(has(result.out, "decode:3x40x8"));
  CHECK(has(result.out, "tok/s of each repeat:"));
  CHECK(has(result.out, " off       8 "));
  CHECK(has(result.out, " on       6 "));  // the first two begin while the third has its prompt
  CHECK(has(result.out, "fewer than 3 sequences: 5"));
}

TEST_CASE("The defaults of a single workload follow from its kind") {
  TempDir dir;
  const auto only = [&](const std::string& options) {
    const ProcessResult result =
        run_program(dir, "bench --device cpu -m " + source_path("tests/data/tiny-random") +
                             " --quiet --json --repeats 1 " + options);
    INFO(result.err);
    REQUIRE(result.exit_code == 0);
    return parse_json(result.out, "stdout");
  };
  const Json prefill = only("--prefill --num-prompts 2 --input-len 30 --batch 1");
  CHECK(prefill.at("results").at(0).at("workload") == "prefill:2x30");
  CHECK(prefill.at("results").at(0).at("steps") == 2);
  CHECK(prefill.at("memory_plans").at(0).at("max_num_seqs") == 1);
  const Json mixed = only("--num-prompts 2 --input-len 30 --output-len 3");
  CHECK(mixed.at("results").at(0).at("workload") == "mixed:2x30x3");
  CHECK(mixed.at("results").at(0).at("tokens") == 66);
  const Json decode = only("--decode --num-prompts 2 --input-len 30 --output-len 3");
  CHECK(decode.at("results").at(0).at("workload") == "decode:2x30x3");
}

TEST_CASE("What bench cannot run is told before weights are loaded and exits 2") {
  TempDir dir;
  const auto message = [&](const std::string& options) {
    const ProcessResult result = run_program(dir, kBench + options);
    INFO(options << ": " << result.err);
    CHECK(result.exit_code == 2);
    CHECK(!has(result.err, "loaded"));
    CHECK(result.out.empty());
    return result.err;
  };
  CHECK(has(message("--input-len 0"), "--input-len: expected 1 to"));
  CHECK(has(message("--output-len 0"), "--output-len: expected 1 to"));
  CHECK(has(message("--num-prompts=-3"), "--num-prompts: expected 1 to 268435456, found -3"));
  CHECK(has(message("--decode --batch 0"), "--batch: expected 1 to"));
  CHECK(has(message("--repeats 0"), "--repeats: expected 1 to 1000, found 0"));
  CHECK(has(message("--prefill --decode"), "found both"));
  CHECK(has(message("--prefill --output-len 2"), "expected --output-len 1, found 2"));
  CHECK(has(message("--decode --batch 3 --num-prompts 2"), "expected --num-prompts 3, found 2"));
  CHECK(has(message("--batch 3"), "expected 3, found 4"));
  CHECK(has(message("--input-len 4000 --output-len 97"), "4097 positions"));
  CHECK(has(message("--input-len 4000 --output-len 97"), "the model has 4096"));
  CHECK(has(message("--decode --input-len 4000 --output-len 96"), "4097 positions"));
  CHECK(has(message("--input-len 100 --output-len 9 --max-model-len 108"),
            "max_model_len of 109 (100 prompt tokens and 9 generated), found 108"));
  CHECK(has(message("--workload decode:5x10x10"), "at least the 5 sequences of decode:5x10x10"));
  CHECK(has(message("--workload decode:5x10"), "'decode:5x10': expected"));
  CHECK(has(message("--workload prefill:1x10 --input-len 5"), "expected no --input-len"));
  CHECK(has(message("--workload decode:4x200x50 --kv-cache-memory-bytes 1M"), "17 KV pages"));
  CHECK(has(message("--temperature -1"), "temperature"));
  CHECK(has(message("-o " + (dir / "none/x.json")), "expected a folder"));
  CHECK(has(message("-o " + dir.path()), "found the folder"));
  CHECK(run_program(dir, "bench --no-such-option").exit_code == 2);
  CHECK(has(run_program(dir, "bench --help").out, "--workload"));
}

}  // namespace
}  // namespace mla::test::bench_test
