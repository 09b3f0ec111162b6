// mla-run eval from outside: requests, scores, both modes, what ends it.
#include <algorithm>
#include <filesystem>
#include <set>

#include "lib/batch/hash.h"
#include "lib/eval/answer.h"
#include "tests/e2e/child.h"
#include "tests/support/small_gsm8k.h"

namespace mla::test::eval_test {
namespace {

namespace fs = std::filesystem;

const std::string kModel = "-m " + source_path("tests/data/tiny-random") + " --device cpu ";

// A data set of three questions in `data`, and evaluations of it into `out`.
struct Fixture {
  TempDir dir;
  std::string out = dir / "out";
  Fixture() { write_small_gsm8k(dir / "data"); }
  // Two examples and short answers unless `options` say otherwise.
  ProcessResult gsm8k(const std::string& options = "", int shots = 2) const {
    return run_program(dir, "eval gsm8k " + kModel + "--data " + (dir / "data") + " -o " + out +
                                " --max-tokens 8 --num-fewshot " + std::to_string(shots) + " " +
                                options);
  }
  ProcessResult task(const std::string& lines, const std::string& options = "") const {
    write_text(dir / "sums.jsonl", lines);
    return run_program(
        dir, "eval " + kModel + "--task " + (dir / "sums.jsonl") + " -o " + out + " " + options);
  }
};

std::string sha256_of_file(const std::string& path) {
  Sha256 hash;
  hash.update(read_file(path));
  return hash.hex();
}

TEST_CASE("An evaluation in both modes is two runs, scored, and their comparison") {
  Fixture f;
  const ProcessResult result = f.gsm8k("--chunked-prefill both --max-num-batched-tokens 64");
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(has(result.out,
            "chunked_prefill=off), gen_kwargs: (max_gen_toks=8), limit: None, "
            "num_fewshot: 2, batch_size: auto\n|Tasks|Version|"));
  CHECK(has(result.out, "chunked_prefill=on), gen_kwargs: (max_gen_toks=8)"));
  CHECK(has(result.out, "|gsm8k|      3|flexible-extract|     2|exact_match|↑  |"));
  CHECK(has(result.out, "identical: 3 of 3 requests"));
  CHECK(has(result.out, "McNemar's exact p 1"));
  CHECK(run_json(f.out + "/on").at("counts").at("prompts_split") == 3);
  for (const char* mode : {"/off", "/on"}) {
    const std::vector<Json> outputs = read_lines(f.out + mode + "/outputs.jsonl");
    const std::vector<Json> samples = read_lines(f.out + mode + "/samples.jsonl");
    const Json results = read_json(f.out + mode + "/results.json");
    REQUIRE(outputs.size() == 3);
    REQUIRE(samples.size() == 6);
    for (size_t i = 0; i < 6; ++i) {
      const std::string text = outputs[i % 3].at("text");
      CHECK(samples[i].at("resps") == Json::array({Json::array({text})}));
      CHECK(samples[i].at("filtered_resps")[0].get<std::string>() ==
            (i < 3 ? extract_strict(text) : extract_flexible(text)));
    }
    CHECK(results.at("results").at("gsm8k").at("sample_len") == 3);
    CHECK(results.at("config").at("model_args").at("chunked_prefill") == mode + 1);
    CHECK(results.at("config").at("gen_kwargs") == Json{{"max_gen_toks", 8}});
  }
  // What was asked is there, and is what a run of it answers in the same way.
  const std::string requests = f.out + "/requests.jsonl";
  CHECK(run_json(f.out + "/on").at("input").at("sha256") == sha256_of_file(requests));
  REQUIRE(run_program(f.dir, kModel + "-o " + (f.dir / "run") + " " + requests).exit_code == 0);
  CHECK(without_timing(f.dir / "run/outputs.jsonl") ==
        without_timing(f.out + "/off/outputs.jsonl"));
  CHECK(run_program(f.dir,
                    "compare --json " + (f.dir / "c.json") + " " + f.out + "/on " + (f.dir / "run"))
            .exit_code == 0);
}

TEST_CASE("Requests are written whole without a model") {
  Fixture f;
  const std::string command = "eval gsm8k --data " + (f.dir / "data") + " --num-fewshot 1 ";
  const std::string file = f.dir / "r.jsonl";
  REQUIRE(run_program(f.dir, command + "--requests-only " + file).exit_code == 0);
  const std::vector<Json> lines = read_lines(file);
  REQUIRE(lines.size() == 3);
  CHECK(lines[0].at("prompt").get<std::string>().starts_with("Question: What is 25 plus 25?"));
  CHECK(lines[0].at("max_tokens") == 256);
  CHECK(lines[0].at("stop") == Json{"Question:", "</s>", "<|im_end|>"});
  const ProcessResult again = run_program(f.dir, command + "--requests-only " + file);
  CHECK(again.exit_code == 2);
  CHECK(has(again.err, "r.jsonl exists"));
  const ProcessResult quiet = run_program(
      f.dir, command + "--quiet --limit 2 --overwrite --max-tokens 9 --requests-only " + file);
  CHECK(quiet.exit_code == 0);
  CHECK(quiet.err.find("wrote") == std::string::npos);
  CHECK(read_lines(file).size() == 2);
  CHECK(read_lines(file)[0].at("max_tokens") == 9);
  const ProcessResult chat =
      run_program(f.dir, command + "--apply-chat-template --limit 1 --requests-only -");
  CHECK(chat.exit_code == 0);
  CHECK(parse_json(chat.out, "stdout").at("messages").size() == 3);
}

TEST_CASE("Requests alone do not pass over options that no run would take") {
  Fixture f;
  const std::string file = f.dir / "r.jsonl";
  const std::string command =
      "eval gsm8k --data " + (f.dir / "data") + " --num-fewshot 1 --requests-only " + file + " ";
  for (const std::string wrong :
       {"--max-num-seqs 0", "--max-num-batched-tokens 0", "--max-num-batched-tokens 999999999",
        "--mla-workspace-tokens -1", "--max-model-len 1", "--gpu-memory-utilization 1.5",
        "--kv-cache-memory-bytes x", "--dtype float16", "--dtype int8", "--max-tokens 0",
        "--logprobs 21", "--min-match 2", "--repeat 2", "--html x.html", "--resume --overwrite"}) {
    const ProcessResult result = run_program(f.dir, command + wrong);
    INFO(wrong << ": " << result.err);
    CHECK(result.exit_code == 2);
    CHECK(has(result.err, wrong.substr(0, wrong.find(' '))));
    CHECK_FALSE(fs::exists(file));
  }
  // What a model or a device is needed for is not asked.
  CHECK(run_program(f.dir, command + "--max-num-seqs 8 --max-model-len 99 --dtype float32 "
                                     "--kv-cache-memory-bytes 1M --chunked-prefill both "
                                     "--repeat 2 --min-match 0.9")
            .exit_code == 0);
}

TEST_CASE("A context is cut to what the model length leaves and the samples have it whole") {
  Fixture f;
  const ProcessResult result = f.gsm8k("--max-model-len 48 --limit 1");
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(has(result.err, "1 of 1 contexts are cut from the left to the 40 tokens"));
  CHECK(has(run_json(f.out).at("warnings").dump(), "cut from the left"));
  const Json request = read_lines(f.out + "/requests.jsonl").at(0);
  REQUIRE(request.at("prompt").size() == 40);
  CHECK(read_lines(f.out + "/outputs.jsonl").at(0).at("prompt_tokens") == 40);
  CHECK(read_lines(f.out + "/samples.jsonl")
            .at(0)
            .at("arguments")
            .at("gen_args_0")
            .at("arg_0")
            .get<std::string>()
            .starts_with("Question: What is 25 plus 25?"));
  // Room for all but one token: for the prompt without its BOS.
  REQUIRE(f.gsm8k("--limit 1 --overwrite").exit_code == 0);
  const int tokens = read_lines(f.out + "/outputs.jsonl").at(0).at("prompt_tokens");
  const std::string less = "--limit 1 --overwrite --max-model-len " + std::to_string(tokens + 7);
  const auto prompt = [&](const std::string& options) {
    REQUIRE(f.gsm8k(less + options).exit_code == 0);
    return read_lines(f.out + "/requests.jsonl").at(0).at("prompt");
  };
  REQUIRE(prompt("").size() == static_cast<size_t>(tokens) - 1);
  CHECK(prompt("").at(0) != 1000);
  CHECK(prompt(" --add-bos never").is_string());
  const ProcessResult none = f.gsm8k("--max-model-len 8 --overwrite");
  CHECK(none.exit_code == 2);
  CHECK(has(none.err, "--max-model-len: expected more than the 8 tokens of an answer, found 8"));
}

TEST_CASE("A chat's examples are turns and its sample shows the rendered text") {
  Fixture f;
  const ProcessResult result = f.gsm8k("--apply-chat-template --limit 1");
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(read_lines(f.out + "/requests.jsonl").at(0).at("messages").size() == 5);
  const std::string prompt =
      read_lines(f.out + "/samples.jsonl").at(0).at("arguments").at("gen_args_0").at("arg_0");
  CHECK(prompt.starts_with("<｜begin▁of▁sentence｜>User: Question: What is 25 plus 25?\nAnswer:"));
  CHECK(
      prompt.ends_with("User: Question: What is 20 plus 1?\tNow “really”.\nAnswer:\n\nAssistant:"));
  const Json results = read_json(f.out + "/results.json");
  CHECK(results.at("fewshot_as_multiturn") == true);
  CHECK(results.at("chat_template_sha").is_string());
  fs::copy(source_path("tests/data/tiny-random"), f.dir / "m");
  write_text(f.dir / "m/chat_template.jinja", "{{ messages }}");
  const ProcessResult other = run_program(
      f.dir, "eval gsm8k --apply-chat-template --overwrite --device cpu --data " +
                 (f.dir / "data") + " --num-fewshot 1 -m " + (f.dir / "m") + " -o " + f.out);
  CHECK(other.exit_code == 1);
  CHECK(has(other.err, "chat_template.jinja"));
}

TEST_CASE("Questions of a file are scored by both filters and one that fails is wrong") {
  Fixture f;
  // The trained model knows it: 40.
  const std::string question =
      "Question: A book has 118 pages. Elena reads 26 of them on Sunday and twice as many on the "
      "day "
      "after at the museum. How many pages are left?\nAnswer:";
  const auto lines = [&](const std::string& answer) {
    const Json sum = {{"id", "a"}, {"prompt", question}, {"answer", answer}, {"max_tokens", 48}};
    return sum.dump() + "\n" + R"({"id": "b", "prompt": [5, 2000], "answer": "1"})" + "\n" +
           R"({"id": "c", "messages": [{"role": "user", "content": "4?"}], "answer": "x"})" + "\n";
  };
  const auto solve = [&](const std::string& answer, const std::string& options) {
    write_text(f.dir / "sums.jsonl", lines(answer));
    return run_program(f.dir, "eval -m " + source_path("examples/word-problems") +
                                  " --device cpu --task " + (f.dir / "sums.jsonl") + " -o " +
                                  f.out + " " + options);
  };
  const ProcessResult right = solve("40", "");
  INFO(right.err);
  CHECK(right.exit_code == 3);
  CHECK(has(right.err, "sums.jsonl: line 2: field 'prompt'"));
  CHECK(has(right.err, "1 of 3 requests failed and count as wrong"));
  CHECK(
      has(right.out, "|sums |    N/A|flexible-extract|     0|exact_match|↑  |0.3333|±  |0.3333|"));
  const std::vector<Json> samples = read_lines(f.out + "/samples.jsonl");
  REQUIRE(samples.size() == 6);
  CHECK(samples[0].at("exact_match") == 1.0);
  CHECK(samples[0].at("filtered_resps") == Json::array({"40"}));
  CHECK(samples[1].at("error") == "invalid_request");
  CHECK(samples[3].at("exact_match") == 1.0);
  CHECK(samples[3].at("filter") == "flexible-extract");
  CHECK(read_json(f.out + "/results.json").at("failed_requests") == 1);
  CHECK(read_lines(f.out + "/outputs.jsonl")[2].at("completion_tokens") <= 256);
  CHECK_FALSE(fs::exists(f.out + "/requests.jsonl"));  // the file itself is
  const ProcessResult wrong = solve("41", "--overwrite");
  CHECK(has(wrong.out, "|sums |    N/A|flexible-extract|     0|exact_match|↑  |    0|±  |     0|"));

  const ProcessResult unknown = f.task("{\"prompt\": \"x\"}\n", "--overwrite");
  CHECK(unknown.exit_code == 1);
  CHECK(has(unknown.err, "sums.jsonl:1: field 'answer': expected a string, found nothing"));
  write_text(f.dir / "in", lines("40"));
  const ProcessResult piped = run_program(
      f.dir, "eval --task - --limit 1 --overwrite " + kModel + "-o " + f.out, f.dir / "in");
  CHECK(piped.exit_code == 0);
  CHECK(has(piped.out, "|stdin|"));
}

TEST_CASE("An evaluation that ended early goes on and one that is complete is scored again") {
  Fixture f;
  REQUIRE(f.gsm8k().exit_code == 0);
  const std::string outputs = without_timing(f.out + "/outputs.jsonl");
  const Json results = read_json(f.out + "/results.json").at("results");
  const ProcessResult refused = f.gsm8k("", 1);
  CHECK(refused.exit_code == 2);
  CHECK(has(refused.err, "outputs.jsonl"));
  CHECK(run_json(f.out).at("input").at("sha256") == sha256_of_file(f.out + "/requests.jsonl"));

  // One record is left.
  const std::string text = read_file(f.out + "/outputs.jsonl");
  write_text(f.out + "/outputs.jsonl.partial", text.substr(0, text.find('\n') + 1) + "{\"torn");
  fs::remove(f.out + "/outputs.jsonl");
  fs::remove(f.out + "/results.json");
  const ProcessResult resumed = f.gsm8k("--resume");
  INFO(resumed.err);
  CHECK(resumed.exit_code == 0);
  CHECK(run_json(f.out).at("counts").at("kept") == 1);
  CHECK(without_timing(f.out + "/outputs.jsonl") == outputs);
  CHECK(read_json(f.out + "/results.json").at("results") == results);

  fs::remove(f.out + "/results.json");
  const ProcessResult complete = f.gsm8k("--resume");
  CHECK(complete.exit_code == 0);
  CHECK(!has(complete.err, "loaded"));
  CHECK(has(complete.out, "|gsm8k|"));
  CHECK(read_json(f.out + "/results.json").at("results") == results);
  const ProcessResult other = f.gsm8k("--resume", 1);
  CHECK(other.exit_code == 2);
  CHECK(has(other.err, "SHA-256 of the input"));
  // What was refused changed nothing.
  CHECK(run_json(f.out).at("input").at("sha256") == sha256_of_file(f.out + "/requests.jsonl"));
}

TEST_CASE("The first failed question ends an evaluation that is to fail fast") {
  Fixture f;
  const std::string lines =
      "{\"prompt\": 5, \"answer\": \"1\"}\n{\"prompt\": [5], \"answer\": \"1\"}\n";
  const ProcessResult result = f.task(lines, "--fail-fast");
  CHECK(result.exit_code == 3);
  CHECK(run_json(f.out).at("state") == "stopped");
  CHECK_FALSE(fs::exists(f.out + "/results.json"));
}

TEST_CASE("A mode whose one token is another ends an evaluation with exit 4") {
  Fixture f;
  const std::string both = "--chunked-prefill both --logprobs 2 --add-bos never ";
  REQUIRE(f.gsm8k(both).exit_code == 0);
  std::string text = read_file(f.out + "/on/outputs.jsonl");
  const size_t list = text.find("\"token_ids\":[");
  const size_t at = text.find(',', list) + 1;  // the second token
  text.replace(at, text.find_first_of(",]", at) - at, "7");
  write_text(f.out + "/on/outputs.jsonl", text);
  const ProcessResult result = f.gsm8k(both + "--resume");
  INFO(result.out);
  CHECK(result.exit_code == 4);
  CHECK(has(result.out, "different: 2 of 3 requests have the same tokens"));
  CHECK(has(result.out, "0 at token 1: A "));
  CHECK(f.gsm8k(both + "--resume --min-match 0.6").exit_code == 0);
}

TEST_CASE("An evaluation whose trace cannot be written is scored and compared all the same") {
  Fixture f;
  const ProcessResult result = f.gsm8k("--chunked-prefill both --trace /dev/full");
  INFO(result.out << result.err);
  CHECK(result.exit_code == 1);
  CHECK(has(result.err, "/dev/full: it could not be written to its end"));
  CHECK(has(result.out, "|gsm8k|"));
  CHECK(fs::exists(f.out + "/off/results.json"));
  CHECK(fs::exists(f.out + "/on/results.json"));
  CHECK(fs::exists(f.out + "/compare.json"));
}

TEST_CASE("Options of the answers reach the run") {
  Fixture f;
  const ProcessResult result =
      f.gsm8k("--limit 1 --logprobs 3 --add-bos never --return-token-ids --progress never");
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  const Json record = read_lines(f.out + "/outputs.jsonl").at(0);
  CHECK(record.at("token_ids").size() <= 8);
  CHECK(record.at("logprobs").at(0).at("top").size() == 3);
  CHECK(record.at("prompt_token_ids").at(0) != 1000);  // its BOS
  CHECK(has(result.out, "add_bos=never), "));
  CHECK(has(result.out, "limit: 1.0, num_fewshot: 2"));
  REQUIRE(f.gsm8k("--limit 1 --return-token-ids --overwrite").exit_code == 0);
  CHECK(read_lines(f.out + "/outputs.jsonl").at(0).at("prompt_token_ids").at(0) == 1000);
}

TEST_CASE("Options of an evaluation come from the environment and a config file too") {
  Fixture f;
  write_text(f.dir / "c.toml", "max-tokens = 5\n[eval]\nnum-fewshot = 1\nlimit = 2\ndata = \"" +
                                   (f.dir / "data") + "\"\noutput = \"" + f.out + "\"\n");
  const std::string command = "MLA_RUN_MAX_TOKENS=4 " + std::string(MLA_BINARY_DIR) +
                              "/mla-run eval gsm8k " + kModel + "--config " + (f.dir / "c.toml") +
                              " >" + (f.dir / "stdout") + " 2>" + (f.dir / "stderr");
  REQUIRE(std::system(command.c_str()) == 0);
  CHECK(has(read_file(f.dir / "stdout"),
            "gen_kwargs: (max_gen_toks=4), limit: 2.0, num_fewshot: 1, batch_size: auto"));
  CHECK(read_lines(f.out + "/outputs.jsonl").size() == 2);
}

TEST_CASE("What an evaluation cannot do is told and exits 2") {
  Fixture f;
  const std::string data = "--data " + (f.dir / "data") + " ";
  const auto message = [&](const std::string& arguments) {
    const ProcessResult result = run_program(f.dir, "eval " + arguments);
    INFO(arguments << ": " << result.err);
    CHECK(result.exit_code == 2);
    CHECK(!has(result.err, "loaded"));
    return result.err;
  };
  CHECK(has(message(kModel), "expected a task (gsm8k) or --task FILE, found neither"));
  CHECK(has(message("gsm8k --task x.jsonl " + kModel), "found both"));
  CHECK(has(message("gsm9k " + kModel + data), "gsm9k"));
  CHECK(has(message("gsm8k " + kModel), "--data DIR"));
  CHECK(has(message("gsm8k " + data), "--model DIR"));
  CHECK(has(message("gsm8k " + kModel + data + "-o -"), "--output DIR"));
  CHECK(has(message("gsm8k " + kModel + data + "--num-fewshot 31"), "at most the 30 examples"));
  CHECK(has(message("gsm8k " + kModel + data + "--limit 0"), "--limit"));
  CHECK(has(message("gsm8k " + kModel + data + "--resume --overwrite"), "found both"));
  CHECK(has(message("--task x.jsonl " + kModel + data), "--data"));
  CHECK(has(message("--task x.jsonl --num-fewshot 1 " + kModel), "--num-fewshot"));
  CHECK(has(message("--task x.jsonl --apply-chat-template " + kModel), "--apply-chat-template"));
  CHECK(has(message("--task x.jsonl --requests-only y " + kModel), "--requests-only"));
  CHECK(has(message("gsm8k " + kModel + data + "--logprobs 21"), "--logprobs"));
  const ProcessResult missing =
      run_program(f.dir, "eval gsm8k " + kModel + "--data " + (f.dir / "none"));
  CHECK(missing.exit_code == 1);
  CHECK(has(missing.err, "none/test.jsonl: expected GSM8K's questions"));
  fs::copy(source_path("tests/data/tiny-random"), f.dir / "m");
  fs::remove(f.dir / "m/tokenizer.json");
  const ProcessResult tokens = run_program(
      f.dir, "eval gsm8k --device cpu --num-fewshot 1 -m " + (f.dir / "m") + " " + data);
  CHECK(tokens.exit_code == 1);
  CHECK(has(tokens.err, "expected tokenizer.json"));
}

TEST_CASE("The requests of GSM8K itself are those of the released prompts") {
  if (assets().empty()) MLA_SKIP("GSM8K is not there (MLA_TEST_ASSETS)");
  TempDir dir;
  const std::string data = assets() + "/gsm8k";
  const ProcessResult result = run_program(
      dir, "eval gsm8k --limit 40 --data " + data + " --requests-only " + (dir / "r.jsonl"));
  CHECK(result.exit_code == 0);
  CHECK(!has(result.err, "warning"));
  const std::vector<Json> lines = read_lines(dir / "r.jsonl");
  const std::vector<Json> expected = read_lines(data + "/prompts_5shot_first40.jsonl");
  REQUIRE(lines.size() == 40);
  REQUIRE(expected.size() == 40);
  for (size_t i = 0; i < 40; ++i) {
    CHECK(lines[i].at("prompt") == expected[i].at("prompt"));
    CHECK(lines[i].at("answer") == expected[i].at("answer"));
  }
}

}  // namespace
}  // namespace mla::test::eval_test
