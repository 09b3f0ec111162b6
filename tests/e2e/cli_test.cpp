// The program from outside: commands, exit codes, bad lines, the comparison.
#include <sys/stat.h>

#include <filesystem>

#include "tests/e2e/process.h"

namespace mla::test::cli_test {
namespace {

namespace fs = std::filesystem;

const std::string kTiny = "-m " + source_path("tests/data/tiny-random") + " ";
const std::string kModel = kTiny + "--device cpu ";

TEST_CASE("The quickstart's model solves word problems, alike in both modes") {
  TempDir dir;
  const ProcessResult result = run_program(
      dir, "-m " + source_path("examples/word-problems") +
               " --device cpu --chunked-prefill both --max-num-batched-tokens 64 --limit 40 -o " +
               (dir / "out") + " " + source_path("examples/prompts.jsonl"));
  INFO(result.out << result.err);
  CHECK(result.exit_code == 0);
  CHECK(has(result.out, "identical: 40 of 40 requests"));
  const Json report = read_json(dir / "out/compare.json");
  for (const char* side : {"a", "b"}) CHECK(report.at(side).at("correct").get<int>() >= 36);
  CHECK(report.at("b").at("prompts_split").get<int>() >= 20);
}

TEST_CASE("The prompts of the tests give the same bits in both modes and at least half are split") {
  TempDir dir;
  const ProcessResult result = run_program(
      dir, kModel + "--chunked-prefill both --max-num-batched-tokens 64 --logprobs 2 -o " +
               (dir / "out") + " " + source_path("tests/data/tiny-prompts.jsonl"));
  CHECK(result.exit_code == 0);
  CHECK(has(result.out, "identical: 64 of 64 requests"));
  const Json report = read_json(dir / "out/compare.json");
  CHECK(report.at("token_identical").get<double>() == 1.0);
  CHECK(report.at("logprob_identical").get<double>() == 1.0);
  const Json on = read_json(dir / "out/on/run.json");
  CHECK(on.at("state") == "finished");
  CHECK(on.at("counts").at("prompts_split").get<int>() >= 32);
  const Json off = read_json(dir / "out/off/run.json");
  CHECK(off.at("counts").at("prompts_split").get<int>() == 0);
  CHECK(off.at("input").at("sha256") == on.at("input").at("sha256"));
  const std::vector<Json> records = read_lines(dir / "out/on/outputs.jsonl");
  REQUIRE(records.size() == 64);
  for (size_t i = 0; i < records.size(); ++i) {
    CHECK(records[i].at("index").get<size_t>() == i);
    CHECK(records[i].at("logprobs").size() == records[i].at("token_ids").size());
  }
}

TEST_CASE("One changed token makes the comparison exit 4") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": \"one two three\"}\n{\"prompt\": \"four\"}\n");
  REQUIRE(run_program(dir, kModel + "--logprobs 2 -o " + (dir / "a") + " " + (dir / "p.jsonl"))
              .exit_code == 0);
  fs::copy(dir / "a", dir / "b");
  CHECK(
      run_program(dir, "compare --json " + (dir / "c.json") + " " + (dir / "a") + " " + (dir / "b"))
          .exit_code == 0);
  std::string text = read_file(dir / "b/outputs.jsonl");
  const size_t at = text.find("\"token_ids\":[") + 13;
  text.replace(at, text.find(',', at) - at, "7");
  text.insert(text.find("\"text\":\"") + 8, "other ");
  write_text(dir / "b/outputs.jsonl", text);
  const ProcessResult result = run_program(
      dir, "compare --json " + (dir / "c.json") + " " + (dir / "a") + " " + (dir / "b"));
  CHECK(result.exit_code == 4);
  CHECK(has(result.out, "1 of 2"));
  const Json report = read_json(dir / "c.json");
  const Json& divergence = report.at("divergences").at(0);
  CHECK(divergence.at("position") == 0);
  CHECK(divergence.at("token_b") == 7);
  CHECK(divergence.at("margin_a").is_number());
  CHECK(divergence.at("text_b").get<std::string>().starts_with("other "));
  CHECK(has(result.out, "1 at token 0: A "));
  CHECK(has(result.out, ", B \"other "));
  CHECK(!has(result.out, "not known"));
}

TEST_CASE(
    "A file with every kind of bad line gives one record a line and right answers for the good "
    "ones") {
  TempDir dir;
  const std::string good_a =
      R"({"id": "good a", "prompt": "A baker has 3 trays of bread.", "max_tokens": 5})";
  const std::string good_b = R"({"id": 7, "prompt": [5, 6, 7, 8], "max_tokens": 4, "answer": "3"})";
  std::string text = "\xEF\xBB\xBF" + good_a + "\r\n\n";
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"{not json", "not valid JSON"},
      {"[1, 2]", "object"},
      {"\"text\"", "object"},
      {"{\"prompt\": \"\xff\xfe\"}", "UTF-8"},
      {R"({"prompt": "x", "prompt": "y"})", "duplicate key 'prompt'"},
      {R"({"id": "good a", "prompt": "again"})", "id"},
      {R"({"max_tokens": 3})", "prompt"},
      {R"({"prompt": ""})", "empty"},
      {R"({"prompt": []})", "empty"},
      {R"({"prompt": 5})", "prompt"},
      {R"({"prompt": [1, 1024]})", "1024"},
      {R"({"prompt": [1, -1]})", "-1"},
      {R"({"prompt": [1, 2.5]})", "2.5"},
      {R"({"prompt": "x", "temperature": -1})", "temperature"},
      {R"({"prompt": "x", "temperature": "hot"})", "temperature"},
      {R"({"prompt": "x", "top_p": 0})", "top_p"},
      {R"({"prompt": "x", "top_p": 1.5})", "top_p"},
      {R"({"prompt": "x", "top_k": -2})", "top_k"},
      {R"({"prompt": "x", "max_tokens": 0})", "max_tokens"},
      {R"({"prompt": "x", "max_tokens": 2.5})", "max_tokens"},
      {R"({"prompt": "x", "max_tokens": 2, "min_tokens": 3})", "min_tokens"},
      {R"({"prompt": "x", "seed": "one"})", "seed"},
      {R"({"prompt": "x", "stop": [""]})", "stop"},
      {R"({"prompt": "x", "stop_token_ids": [99999]})", "stop_token_ids"},
      {R"({"prompt": "x", "logprobs": 21})", "logprobs"},
      {R"({"prompt": "x", "stream": true})", "stream"},
      {R"({"prompt": "x", "n": 129})", "from 1 to 128"},
      {R"({"prompt": "x", "best_of": 2})", "best_of"},
      {R"({"prompt": "x", "min_p": 1.5})", "min_p"},
      {R"({"prompt": "x", "presence_penalty": -3})", "presence_penalty"},
      {R"({"prompt": "x", "frequency_penalty": 3})", "frequency_penalty"},
      {R"({"prompt": "x", "repetition_penalty": 0})", "repetition_penalty"},
      {R"({"prompt": "x", "logit_bias": {"1024": 1}})", "1024"},
      {R"({"id": 1.5, "prompt": "x"})", "id"},
      {R"({"messages": []})", "messages"},
      {R"({"messages": [{"role": "wizard", "content": "x"}]})", "wizard"},
      {R"({"messages": [{"role": "user"}]})", "content"},
  };
  for (const auto& [line, message] : bad) text += line + "\n";
  // 4096 positions: one prompt at the limit.
  std::string long_prompt = "{\"prompt\": [9";
  for (int i = 1; i < 4096; ++i) long_prompt += ",9";
  text += long_prompt + "]}\n" + good_b;  // no newline at the end
  write_text(dir / "p.jsonl", text);

  const ProcessResult result =
      run_program(dir, kModel + "-o " + (dir / "out") + " " + (dir / "p.jsonl"));
  CHECK(result.exit_code == 3);
  const std::vector<Json> records = read_lines(dir / "out/outputs.jsonl");
  REQUIRE(records.size() == bad.size() + 3);
  for (size_t i = 0; i < records.size(); ++i) CHECK(records[i].at("index").get<size_t>() == i);
  for (size_t i = 0; i < bad.size(); ++i) {
    const Json& record = records[i + 1];
    INFO(bad[i].first << " gave " << record.dump());
    REQUIRE(record.at("status") == "error");
    CHECK(record.at("line").get<size_t>() == i + 3);  // behind the good one and a blank line
    CHECK(has(record.at("error").at("message").get<std::string>(), bad[i].second));
  }
  const Json& limit = records[bad.size() + 1];
  CHECK(limit.at("error").at("code") == "context_length_exceeded");
  CHECK(has(limit.at("error").at("message").get<std::string>(), "4096"));

  write_text(dir / "good.jsonl", good_a + "\n" + good_b + "\n");
  REQUIRE(
      run_program(dir, kModel + "-o " + (dir / "alone") + " " + (dir / "good.jsonl")).exit_code ==
      0);
  const std::vector<Json> alone = read_lines(dir / "alone/outputs.jsonl");
  const auto same = [](const Json& a, const Json& b) {
    return a.at("status") == "ok" && a.at("id") == b.at("id") &&
           a.at("token_ids") == b.at("token_ids") && a.at("logprob_hash") == b.at("logprob_hash") &&
           a.at("text") == b.at("text");
  };
  CHECK(same(records.front(), alone[0]));
  CHECK(same(records.back(), alone[1]));
  CHECK(records.back().at("answer") == "3");
}

TEST_CASE("Stops and token limits end a request as they say") {
  TempDir dir;
  write_text(dir / "p.jsonl", R"({"id": "plain", "prompt": "A baker has", "max_tokens": 12})");
  REQUIRE(run_program(dir, kModel + "-o " + (dir / "a") + " " + (dir / "p.jsonl")).exit_code == 0);
  const Json plain = read_lines(dir / "a/outputs.jsonl").at(0);
  const std::vector<int32_t> ids = plain.at("token_ids");
  const std::string text = plain.at("text");
  REQUIRE(ids.size() == 12);
  REQUIRE(plain.at("finish_reason") == "length");

  Json by_id = {
      {"id", "id"}, {"prompt", "A baker has"}, {"max_tokens", 12}, {"stop_token_ids", {ids[4]}}};
  Json late = by_id;
  late["id"] = "late";
  late["min_tokens"] = 8;
  const std::string stop = text.substr(text.size() / 2, 4);
  Json by_text = {{"id", "text"}, {"prompt", "A baker has"}, {"max_tokens", 12}, {"stop", stop}};
  write_text(dir / "q.jsonl", by_id.dump() + "\n" + late.dump() + "\n" + by_text.dump() + "\n");
  REQUIRE(run_program(dir, kModel + "-o " + (dir / "b") + " " + (dir / "q.jsonl")).exit_code == 0);
  const std::vector<Json> records = read_lines(dir / "b/outputs.jsonl");
  CHECK(records[0].at("finish_reason") == "stop");
  CHECK(records[0].at("stop_reason") == ids[4]);
  CHECK(records[0].at("token_ids").back() == ids[4]);  // in token_ids, not in text
  CHECK(has(text, records[0].at("text").get<std::string>()));
  CHECK(records[1].at("token_ids").size() >= 8);
  for (size_t i = 0; i + 1 < 8; ++i) CHECK(records[1].at("token_ids")[i] != ids[4]);
  CHECK(records[2].at("finish_reason") == "stop");
  CHECK(records[2].at("stop_reason") == stop);
  CHECK(records[2].at("text") == text.substr(0, text.find(stop)));
}

TEST_CASE("Options that cannot work are told before anything is loaded and exit 2") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": \"x\"}\n");
  const auto message = [&](const std::string& options) {
    const ProcessResult result =
        run_program(dir, kModel + "-o " + (dir / "o") + " " + options + " " + (dir / "p.jsonl"));
    INFO(options << ": " << result.err);
    CHECK(result.exit_code == 2);
    CHECK(!has(result.err, "loaded"));
    return result.err;
  };
  CHECK(has(message("--max-num-seqs 2.5"),
            "mla-run: --max-num-seqs: expected an integer of 32 bits, found '2.5'"));
  CHECK(has(message("--max-tokens 2147483648"), "expected an integer of 32 bits"));
  CHECK(has(message("--temperature x"), "mla-run: --temperature: expected a number, found 'x'"));
  CHECK(has(message("--seed x"), "mla-run: --seed: expected an integer of 64 bits, found 'x'"));
  CHECK(has(run_program(dir, "").err, "expected a command or a file of prompts, found nothing"));
  const std::string budget = message("--max-num-batched-tokens 100");
  CHECK((has(budget, "100") && has(budget, "4096") && has(budget, "max_num_seqs")));
  CHECK(has(message("--dtype float16"), "overflow"));
  CHECK(has(message("--dtype int8"), "int8"));
#ifndef MLA_WITH_CUDA
  const ProcessResult cuda = run_program(dir, kTiny + "--device cuda " + (dir / "p.jsonl"));
  CHECK(cuda.exit_code == 2);
  CHECK(has(cuda.err, "this build has no CUDA backend"));
#endif
  CHECK(has(message("--gpu-memory-utilization 0"), "gpu-memory-utilization"));
  CHECK(has(message("--load-format pickle"), "load-format"));
  CHECK(has(message("--max-model-len 100000"), "4096"));
  CHECK(has(message("--kv-cache-memory-bytes 1K"), "page"));
  CHECK(has(message("--kv-cache-memory-bytes many"), "many"));
  CHECK(has(message("--mla-workspace-tokens 0"), "mla-workspace-tokens"));
  CHECK(has(message("--top-p 0"), "top-p"));
  CHECK(has(message("--temperature -1"), "temperature"));
  CHECK(has(message("--min-p 1.1"), "min-p"));
  CHECK(has(message("--min-p nan"), "min-p"));
  CHECK(has(message("--presence-penalty 2.1"), "presence-penalty"));
  CHECK(has(message("--frequency-penalty=-2.1"), "frequency-penalty"));
  CHECK(has(message("--repetition-penalty 0"), "repetition-penalty"));
  CHECK(has(message("--repetition-penalty 2.1"), "repetition-penalty"));
  CHECK(has(message("--mla-workspace-tokens 2147483647"), "mla-workspace-tokens"));
  CHECK(has(message("--max-num-batched-tokens 2147483647"), "max-num-batched-tokens"));
  CHECK(has(message("--max-num-seqs 0"), "max-num-seqs"));
  CHECK(has(message("--stop-token-ids 5000000 --min-tokens 4"), "5000000"));
  CHECK(has(message("--stop-token-ids=-7"), "-7"));
  CHECK(has(message("--stop \"$(printf '\\377')\""), "UTF-8"));
  CHECK(has(message("--min-tokens 9 --max-tokens 8"), "min-tokens"));
  CHECK(has(message("--seed 18446744073709551616"), "seed"));
  const ProcessResult both =
      run_program(dir, kModel + "--chunked-prefill both -o - " + (dir / "p.jsonl"));
  CHECK(both.exit_code == 2);
  CHECK(has(both.err, "both"));
  CHECK(!fs::exists(dir / "o/outputs.jsonl"));
  CHECK(run_program(dir, "--no-such-option").exit_code == 2);
  CHECK(run_program(dir, "--help").exit_code == 0);
  CHECK(has(run_program(dir, "--version").out, "mla-run"));
}

TEST_CASE("An output that exists is refused without overwrite and the input is never overwritten") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": \"x\"}\n");
  const std::string command = kModel + "--quiet -o " + (dir / "o") + " " + (dir / "p.jsonl");
  REQUIRE(run_program(dir, command).exit_code == 0);
  const ProcessResult refused = run_program(dir, command);
  CHECK(refused.exit_code == 2);
  CHECK(has(refused.err, "outputs.jsonl"));
  CHECK(run_program(dir, "run --overwrite " + command).exit_code == 0);
  const ProcessResult input =
      run_program(dir, kModel + "--overwrite -o " + (dir / "o") + " " + (dir / "o/outputs.jsonl"));
  CHECK(input.exit_code != 0);
  CHECK(read_lines(dir / "o/outputs.jsonl").size() == 1);
}

TEST_CASE("Standard input and output work and the mode's word is optional") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": \"x\"}\n{\"prompt\": \"y\"}\n{\"prompt\": \"z\"}\n");
  const ProcessResult piped =
      run_program(dir, kModel + "--quiet --limit 2 -o - -", dir / "p.jsonl");
  CHECK(piped.exit_code == 0);
  CHECK(std::count(piped.out.begin(), piped.out.end(), '\n') == 2);
  const auto mode_of = [&](const std::string& words) {
    REQUIRE(run_program(dir, words + " " + kModel + " --quiet --overwrite -o " + (dir / "o"))
                .exit_code == 0);
    return read_json(dir / "o/run.json").at("options").at("chunked_prefill").get<std::string>();
  };
  CHECK(mode_of("--chunked-prefill " + (dir / "p.jsonl")) == "on");
  CHECK(mode_of("--chunked-prefill on " + (dir / "p.jsonl")) == "on");
  CHECK(mode_of("--chunked-prefill off " + (dir / "p.jsonl")) == "off");
  CHECK(mode_of("--enable-chunked-prefill " + (dir / "p.jsonl")) == "on");
  CHECK(mode_of("--no-enable-chunked-prefill " + (dir / "p.jsonl")) == "off");
  CHECK(mode_of(dir / "p.jsonl") == "off");
}

TEST_CASE("A pipe is read whole in one mode and in both") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": \"x\"}\n{\"prompt\": \"y\"}\n");
  const auto piped = [&](const std::string& options, const std::string& name) {
    const std::string fifo = dir / name;
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    REQUIRE(std::system(("cat " + (dir / "p.jsonl") + " >" + fifo + " &").c_str()) == 0);
    return run_program(dir, kModel + options + " " + fifo);
  };
  CHECK(piped("-o " + (dir / "one"), "fifo1").exit_code == 0);
  CHECK(read_lines(dir / "one/outputs.jsonl").size() == 2);
  CHECK(has(piped("--chunked-prefill both -o " + (dir / "two"), "fifo2").out, "identical: 2 of 2"));
}

TEST_CASE("Errors of the standard streams are told and a lost log ends no run") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": \"x\"}\n");
  const auto shell = [&](const std::string& command) {
    const int status = std::system((std::string(MLA_BINARY_DIR) + "/mla-run " + command).c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const std::string to = " -o " + (dir / "o") + " --overwrite ";
  CHECK(shell(kModel + to + (dir / "p.jsonl") + " 2>/dev/full") == 0);
  CHECK(shell(kModel + to + (dir / "p.jsonl") + " 2>&-") == 0);
  CHECK(read_lines(dir / "o/outputs.jsonl").size() == 1);
  CHECK(shell(kModel + " --quiet -o - " + (dir / "p.jsonl") + " >/dev/full 2>/dev/null") == 1);
  CHECK(shell("plan " + kModel + " >/dev/full 2>/dev/null") == 1);
  CHECK(shell(kModel + " --quiet" + to + "- </tmp 2>/dev/null") == 1);
  CHECK(read_json(dir / "o/run.json").at("state") == "failed");
  CHECK(shell(kModel + " --quiet" + to + "--limit 0 --chunked-prefill both " + (dir / "p.jsonl") +
              " >/dev/null") == 0);
}

TEST_CASE("A checkpoint without tokenizer.json serves token ids and refuses text") {
  TempDir dir;
  fs::copy(source_path("tests/data/tiny-random"), dir / "m");
  fs::remove(dir / "m/tokenizer.json");
  write_text(dir / "p.jsonl", "{\"prompt\": [5, 6]}\n{\"prompt\": \"text\"}\n");
  CHECK(run_program(
            dir, "--device cpu -m " + (dir / "m") + " -o " + (dir / "o") + " " + (dir / "p.jsonl"))
            .exit_code == 3);
  const std::vector<Json> records = read_lines(dir / "o/outputs.jsonl");
  REQUIRE(records.size() == 2);
  CHECK(records[0].at("status") == "ok");
  CHECK(records[0].at("text").is_null());
  CHECK(records[1].at("status") == "error");
}

TEST_CASE("A broken checkpoint ends the run with a message that names the file") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": \"x\"}\n");
  fs::copy(source_path("tests/data/tiny-random"), dir / "m");
  const std::string shard = dir / "m/model-00002-of-00003.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 1000);
  const ProcessResult result = run_program(
      dir, "--device cpu -m " + (dir / "m") + " -o " + (dir / "o") + " " + (dir / "p.jsonl"));
  CHECK(result.exit_code == 1);
  CHECK(has(result.err, "model-00002-of-00003.safetensors"));
  CHECK(run_program(dir, "inspect " + (dir / "m")).exit_code == 1);
  CHECK(run_program(dir, "inspect " + source_path("tests/data/tiny-random")).exit_code == 0);
}

TEST_CASE("An index is checked against the sizes of the dtype that the config names") {
  TempDir dir;
  fs::create_directory(dir / "m");
  Json config = read_json(source_path("tests/data/tiny-random/config.json"));
  Json index = read_json(source_path("tests/data/tiny-random/model.safetensors.index.json"));
  const auto inspect = [&](int exit_code) {
    write_text(dir / "m/config.json", config.dump());
    write_text(dir / "m/model.safetensors.index.json", index.dump());
    const ProcessResult result = run_program(dir, "inspect --index-only " + (dir / "m"));
    CHECK(result.exit_code == exit_code);
    return result.out;
  };
  CHECK(has(inspect(0), "total_size of the index: 2738048 bytes, as expected"));
  config["dtype"] = "float32";
  CHECK(has(inspect(1), "total_size of the index: 2738048 bytes, expected 5476096"));
  index["metadata"]["total_size"] = 5476096;
  const std::string out = inspect(0);
  CHECK(has(out, "83 tensors, 1369024 parameters, 5476096 bytes in float32"));
  CHECK(has(out, "total_size of the index: 5476096 bytes, as expected"));
  index.erase("metadata");
  CHECK(has(inspect(0), "the index has no total_size"));
}

TEST_CASE("The released index passes inspection and its memory plan is shown") {
  if (assets().empty()) MLA_SKIP("the released configs are not there (MLA_TEST_ASSETS)");
  TempDir dir;
  const std::string lite = assets() + "/configs/DeepSeek-V2-Lite";
  const ProcessResult inspect = run_program(dir, "inspect --index-only " + lite);
  CHECK(inspect.exit_code == 0);
  CHECK(has(inspect.out, "5291 tensors, 15706484224 parameters, 31412968448 bytes"));
  CHECK(has(inspect.out, "missing from the index: 0"));
  CHECK(has(inspect.out, "in the index, not expected: 0"));
  const ProcessResult plan =
      run_program(dir, "plan --device cpu --chunked-prefill both --device-memory 1G -m " + lite);
  CHECK(plan.exit_code == 1);  // 31 GB of weights
  CHECK(has(plan.out, "does not fit"));
}

TEST_CASE("A plan for a device's memory is a GPU's unless the device is the CPU") {
  TempDir dir;
  const auto plan = [&](const std::string& options) {
    return run_program(dir, "plan " + kTiny + options, "/dev/null", "CUDA_VISIBLE_DEVICES=");
  };
  const ProcessResult gpu = plan("--device-memory 16G");
  INFO(gpu.out << gpu.err);
#ifdef MLA_WITH_CUDA
  CHECK(gpu.exit_code == 0);
  CHECK(has(gpu.out, "CUDA context reserve"));
  CHECK(has(gpu.out, "of 17179869184 bytes: fits"));
  CHECK(plan("--device-memory 16G --device cuda").out == gpu.out);
  CHECK(plan("--device-memory 1M").exit_code == 2);
#else
  CHECK(gpu.exit_code == 2);
  CHECK(has(gpu.err, "--device-memory: expected a build with CUDA"));
#endif
  const ProcessResult cpu = plan("--device cpu --chunked-prefill both --device-memory 16G");
  CHECK(cpu.exit_code == 0);
  CHECK(has(cpu.out, "of 17179869184 bytes: fits"));
  const ProcessResult small = plan("--device cpu --device-memory 1M");
  CHECK(small.exit_code == 1);
  CHECK(has(small.out, "of 1048576 bytes: does not fit"));
  CHECK(plan("").exit_code == 0);
  CHECK(has(plan("--device cpu --device-memory 0").err, "expected at least a byte, found 0"));
}

TEST_CASE("A plan counts the weights as the run will hold them") {
  TempDir dir;
  fs::create_directory(dir / "m");
  Json config = read_json(source_path("tests/data/tiny-random/config.json"));
  const auto weights = [&](const char* stored, const std::string& options) {
    config["dtype"] = stored;
    write_text(dir / "m/config.json", config.dump());
    const ProcessResult result =
        run_program(dir, "plan --device cpu --json " + options + " -m " + (dir / "m"));
    INFO(result.err);
    REQUIRE(result.exit_code == 0);
    return Json::parse(result.out).at(0).at("bytes").at("weights").get<uint64_t>();
  };
  const uint64_t narrow = weights("bfloat16", "--dtype float32");
  const uint64_t wide = weights("float32", "--dtype float32");
  CHECK(wide > narrow * 3 / 2);
  CHECK(weights("float16", "--dtype float32") == wide);  // which bfloat16 does not hold
  CHECK(weights("float16", "--dtype bfloat16") == narrow);
  CHECK(weights("float32", "--dtype float32 --load-format dummy") == narrow);
}

TEST_CASE("Dummy weights need config.json alone and are the same every time") {
  TempDir dir;
  fs::create_directory(dir / "m");
  fs::copy(source_path("tests/data/tiny-random/config.json"), dir / "m/config.json");
  write_text(dir / "p.jsonl", "{\"prompt\": [1, 2, 3, 4], \"max_tokens\": 8}\n");
  const std::string model = "-m " + (dir / "m") + " --device cpu " + (dir / "p.jsonl");
  CHECK(run_program(dir, model + " -o " + (dir / "a")).exit_code == 1);
  std::vector<Json> tokens;
  for (const char* out : {"a", "b"}) {
    const ProcessResult result = run_program(
        dir, model + " --enforce-eager --load-format dummy --ignore-eos -o " + (dir / out));
    INFO(result.err);
    REQUIRE(result.exit_code == 0);
    CHECK(has(result.err, "random"));
    tokens.push_back(read_lines(dir.path() + "/" + out + "/outputs.jsonl")[0].at("token_ids"));
    const Json run = read_json(dir.path() + "/" + out + "/run.json");
    CHECK(run.at("options").at("load_format") == "dummy");
    CHECK(run.at("options").at("enforce_eager") == true);
  }
  CHECK(tokens[0].size() == 8);
  CHECK(tokens[0] == tokens[1]);
}

}  // namespace
}  // namespace mla::test::cli_test
