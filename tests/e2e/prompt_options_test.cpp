// What options and fields do to prompts and their records: BOS, echo, token ids, and the model's
// own sampling defaults.
#include <filesystem>

#include "tests/e2e/process.h"

namespace mla::test::prompt_options_test {
namespace {

namespace fs = std::filesystem;

const std::string kTiny = source_path("tests/data/tiny-random");

std::string run_options(const std::string& model) {
  return "-m " + model + " --device cpu --quiet ";
}

std::vector<Json> outputs(const TempDir& dir, const std::string& options, const std::string& name) {
  const ProcessResult result =
      run_program(dir, options + " -o " + (dir / name) + " " + (dir / "p.jsonl"));
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  return read_lines(dir / name + "/outputs.jsonl");
}

TEST_CASE("A BOS is put in front of text alone and never twice") {
  TempDir dir;
  const Json config = read_json(kTiny + "/tokenizer_config.json");
  const Json& token = config.at("bos_token");
  const std::string bos = token.is_string() ? token : token.at("content");
  const Json lines[] = {{{"prompt", "bread"}, {"max_tokens", 1}},
                        {{"prompt", bos + "bread"}, {"max_tokens", 1}},
                        {{"prompt", {5, 6}}, {"max_tokens", 1}},
                        {{"messages", {{{"role", "user"}, {"content", "x"}}}}, {"max_tokens", 1}}};
  std::string text;
  for (const Json& line : lines) text += line.dump() + "\n";
  write_text(dir / "p.jsonl", text);
  const std::string options = run_options(kTiny) + "--return-token-ids ";
  const auto always = outputs(dir, options + "--add-bos always", "always");
  const auto never = outputs(dir, options + "--add-bos never", "never");
  const auto automatic = outputs(dir, options, "auto");
  const auto ids = [](const Json& record) {
    return record.at("prompt_token_ids").get<std::vector<int32_t>>();
  };
  const int32_t bos_id = ids(never[1]).front();
  std::vector<int32_t> with_bos = ids(never[0]);
  CHECK(with_bos.front() != bos_id);
  with_bos.insert(with_bos.begin(), bos_id);
  CHECK(ids(always[0]) == with_bos);
  CHECK(ids(always[1]) == with_bos);
  CHECK(ids(never[1]) == with_bos);  // the text has it
  CHECK(ids(automatic[0]) == ids(config.value("add_bos_token", false) ? always[0] : never[0]));
  for (const auto& records : {always, never, automatic}) {
    CHECK(ids(records[2]) == std::vector<int32_t>{5, 6});
    CHECK(ids(records[3]) == ids(automatic[3]));
    for (const Json& record : records)
      CHECK(ids(record).size() == record.at("prompt_tokens").get<size_t>());
  }
}

TEST_CASE("The prompt's token ids are in the record only where they are asked for") {
  TempDir dir;
  write_text(dir / "p.jsonl",
             "{\"prompt\":[5,6]}\n{\"prompt\":[5,6],\"return_token_ids\":true}\n"
             R"({"custom_id":"c","method":"POST","url":"/v1/completions","body":{"prompt":[5,6],)"
             R"("return_token_ids":true}})"
             "\n");
  const auto records = outputs(dir, run_options(kTiny), "o");
  CHECK_FALSE(records[0].contains("prompt_token_ids"));
  CHECK(records[1].at("prompt_token_ids") == Json{5, 6});
  CHECK(records[2].at("response").at("body").at("prompt_token_ids") == Json{5, 6});
}

TEST_CASE("An echo puts the prompt in front of a completion's text") {
  TempDir dir;
  const auto line = [](const char* id, const Json& prompt, bool echo) {
    const Json body = {{"prompt", prompt}, {"max_tokens", 4}, {"echo", echo}};
    return Json{{"custom_id", id}, {"method", "POST"}, {"url", "/v1/completions"}, {"body", body}}
               .dump() +
           "\n";
  };
  write_text(dir / "p.jsonl", line("a", "A baker has", true) + line("b", "A baker has", false) +
                                  line("c", Json{70, 71}, true) + line("d", Json{70, 71}, false));
  const auto records = outputs(dir, run_options(kTiny), "o");
  const auto text = [&](size_t i) {
    return records[i].at("response").at("body").at("choices")[0].at("text").get<std::string>();
  };
  CHECK(text(0) == "A baker has" + text(1));
  CHECK(text(2).size() > text(3).size());
  CHECK(text(2).ends_with(text(3)));
}

TEST_CASE("The model's generation config gives defaults where it is asked for and no option says") {
  TempDir dir;
  fs::copy(kTiny, dir / "m");
  const auto write_config = [&](const Json& extra) {
    Json config = read_json(kTiny + "/generation_config.json");
    config.update({{"temperature", 0.75},
                   {"top_p", 0.5},
                   {"top_k", 7},
                   {"max_new_tokens", 3},
                   {"min_p", 0.25},
                   {"repetition_penalty", 1.5}});
    config.update(extra);
    write_text(dir / "m/generation_config.json", config.dump());
  };
  write_config(Json::object());
  write_text(dir / "p.jsonl",
             "{\"prompt\":[5,6],\"ignore_eos\":true,\"min_p\":0,\"repetition_penalty\":1}\n");
  const auto sampling = [&](const std::string& options, const std::string& name) {
    outputs(dir, run_options(dir / "m") + options, name);
    return read_json(dir / name + "/run.json").at("options").at("sampling");
  };
  const Json taken = sampling("--generation-config auto", "auto");
  CHECK(taken.at("temperature") == 0.75);
  CHECK(taken.at("top_p") == 0.5);
  CHECK(taken.at("top_k") == 7);
  CHECK(taken.at("min_p") == 0.25);
  CHECK(taken.at("repetition_penalty") == 1.5);
  CHECK(taken.at("max_tokens") == 3);
  CHECK(read_lines(dir / "auto/outputs.jsonl")[0].at("completion_tokens") == 3);
  const Json said =
      sampling("--generation-config auto --temperature 0 --top-k 0 --min-p 0.5", "said");
  CHECK(said.at("temperature") == 0);
  CHECK(said.at("top_k") == 0);
  CHECK(said.at("top_p") == 0.5);
  CHECK(said.at("min_p") == 0.5);
  CHECK(said.at("repetition_penalty") == 1.5);
  const Json none = sampling("", "none");
  CHECK(none.at("temperature") == 0);
  CHECK(none.at("min_p") == 0);
  CHECK(none.at("repetition_penalty") == 1);
  CHECK(none.at("max_tokens").is_null());
  write_config({{"repetition_penalty", 3}});
  const ProcessResult refused =
      run_program(dir, run_options(dir / "m") + "--generation-config auto -o " + (dir / "x") + " " +
                           (dir / "p.jsonl"));
  CHECK(refused.exit_code == 2);
  CHECK(
      refused.err.find("generation_config.json: --repetition-penalty: expected a number in (0, 2], "
                       "found 3; --generation-config none passes over it") != std::string::npos);
}

}  // namespace
}  // namespace mla::test::prompt_options_test
