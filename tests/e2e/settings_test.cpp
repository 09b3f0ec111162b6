// Options from the environment and from a config file, and what a run says of itself on the way.
#include <fcntl.h>
#include <pty.h>

#include <filesystem>

#include "tests/e2e/child.h"

namespace mla::test::settings_test {
namespace {

namespace fs = std::filesystem;

const std::string kModelDir = source_path("tests/data/tiny-random");
const std::string kModel = "-m " + kModelDir + " --device cpu ";

// The program with variables in its environment, into folder `o`.
ProcessResult run_with(const TempDir& dir, const std::string& variables,
                       const std::string& arguments) {
  const std::string out = dir / "stdout", err = dir / "stderr";
  const int status = std::system(("env " + variables + " " + MLA_BINARY_DIR + "/mla-run " +
                                  arguments + " >" + out + " 2>" + err + " </dev/null")
                                     .c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
}

TEST_CASE("A flag wins over the environment, that over the file, and that over the default") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": [5, 6]}\n");
  write_text(dir / "c.toml",
             "model = \"" + kModelDir +
                 "\"\ndevice = \"cpu\"\nseed = 1\nmax_tokens = 3\n[run]\ntop-k = 4\n");
  const auto options = [&](const std::string& variables, const std::string& flags) {
    const ProcessResult result = run_with(
        dir, variables, flags + " --overwrite -o " + (dir / "o") + " " + (dir / "p.jsonl"));
    INFO(result.err);
    REQUIRE(result.exit_code == 0);
    return run_json(dir / "o").at("options").at("sampling");
  };
  const std::string config = "--config " + (dir / "c.toml");
  CHECK(options("A=b", kModel).at("seed") == 0);
  CHECK(options("A=b", config).at("seed") == 1);
  CHECK(options("A=b", config).at("max_tokens") == 3);
  CHECK(options("A=b", config).at("top_k") == 4);
  CHECK(options("MLA_RUN_SEED=2", config).at("seed") == 2);
  CHECK(options("MLA_RUN_SEED=2", config + " --seed 3").at("seed") == 3);
  CHECK(options("A=b", config + " --seed 3").at("seed") == 3);
  CHECK(options("MLA_RUN_CONFIG=" + (dir / "c.toml") + " MLA_RUN_TOP_K=7", "").at("top_k") == 7);
  CHECK(options("MLA_RUN_SEED=", config).at("seed") == 1);
  write_text(dir / "p.jsonl", "");
  write_text(dir / "c.toml", "min_p = 0.5\npresence-penalty = 1\nfrequency_penalty = -1\n");
  const Json penalties =
      options("MLA_RUN_PRESENCE_PENALTY=1.5", kModel + config + " --repetition-penalty 1.25");
  CHECK(penalties.at("min_p") == 0.5);
  CHECK(penalties.at("presence_penalty") == 1.5);
  CHECK(penalties.at("frequency_penalty") == -1);
  CHECK(penalties.at("repetition_penalty") == 1.25);
}

TEST_CASE("Lists, flags, text and the mode come from a config file as they are meant") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": \"A baker has\"}\n");
  write_text(dir / "c.toml",
             "stop = [\"a, b\", \"#\\n\", \"[END]\"]\nstop_token_ids = [7, 8]\nignore-eos = true\n"
             "chunked-prefill = true\nquiet = true\noutput = \"" +
                 (dir / "o") + "\"\n[bench]\noutput = \"nowhere/x\"\nrepeats = 2\n");
  const ProcessResult result =
      run_program(dir, kModel + "--config " + (dir / "c.toml") + " " + (dir / "p.jsonl"));
  INFO(result.err);
  REQUIRE(result.exit_code == 0);
  CHECK(result.err.empty());
  const Json options = run_json(dir / "o").at("options");
  CHECK(options.at("sampling").at("stop") == Json({"a, b", "#\n", "[END]"}));
  CHECK(options.at("sampling").at("stop_token_ids") == Json({7, 8}));
  CHECK(options.at("sampling").at("ignore_eos") == true);
  CHECK(options.at("chunked_prefill") == "on");
  // The file serves plan too, which takes what it has.
  CHECK(has(run_program(dir, "plan --json " + kModel + "--config " + (dir / "c.toml")).out,
            "\"chunked_prefill\": \"on\""));
  // run writes where the environment says, bench does not.
  const ProcessResult bench =
      run_with(dir, "MLA_RUN_OUTPUT=" + (dir / "b"),
               "bench " + kModel + "--input-len 8 --output-len 2 --num-prompts 1 --repeats 1");
  CHECK(bench.exit_code == 0);
  CHECK(!fs::exists(dir / "b"));
}

TEST_CASE("Square brackets of a stop string are its own") {
  TempDir dir;
  write_text(dir / "p.jsonl", "");
  REQUIRE(run_program(dir, kModel + "-o " + (dir / "o") + " --stop '[a,b]' --stop=[] --stop x " +
                               (dir / "p.jsonl"))
              .exit_code == 0);
  CHECK(run_json(dir / "o").at("options").at("sampling").at("stop") == Json({"[a,b]", "[]", "x"}));
}

TEST_CASE("Settings reach options that run has not, and an option by any of its names") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": [5, 6], \"max_tokens\": 1}\n");
  // The task of eval, from the environment; bench's repeats, from the top of the file.
  const ProcessResult task =
      run_with(dir, "MLA_RUN_TASK=" + (dir / "none.jsonl"), "eval " + kModel + "-o " + (dir / "e"));
  CHECK(has(task.err, "none.jsonl"));
  write_text(dir / "c.toml", "repeats = 1\nworkload = \"decode:1x4x2\"\n");
  const ProcessResult bench = run_program(dir, "bench " + kModel + "--config " + (dir / "c.toml"));
  INFO(bench.err);
  CHECK(has(bench.out, "decode:1x4x2"));
  std::string rates = bench.out.substr(bench.out.find("of each repeat:") + 16);
  rates.resize(rates.find('\n'));
  CHECK_FALSE(has(rates, " "));  // of one repeat
  write_text(dir / "c.toml", "enable-prefix-caching = true\n");
  const std::string run =
      kModel + "--config " + (dir / "c.toml") + " -o " + (dir / "o") + " " + (dir / "p.jsonl");
  REQUIRE(run_with(dir, "MLA_RUN_NO_ENABLE_PREFIX_CACHING=1", run).exit_code == 0);
  CHECK(run_json(dir / "o").at("options").at("enable_prefix_caching") == false);
  // A section wins over the top of the file, and what is given rules out what excludes it.
  write_text(dir / "c.toml",
             "no-enable-prefix-caching = true\n[run]\nenable-prefix-caching = true\n");
  REQUIRE(run_program(dir, run + " --overwrite").exit_code == 0);
  CHECK(run_json(dir / "o").at("options").at("enable_prefix_caching") == true);
  const ProcessResult file = run_with(dir, "MLA_RUN_DATA=/nowhere",
                                      "eval --task none.jsonl " + kModel + "-o " + (dir / "e"));
  CHECK(has(file.err, "none.jsonl"));
  CHECK_FALSE(has(file.err, "excludes"));
}

TEST_CASE("A mistake in the environment or the file is told with its place") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": [5, 6]}\n");
  const std::string run = kModel + "-o " + (dir / "o") + " " + (dir / "p.jsonl");
  const auto file_error = [&](const std::string& text) {
    write_text(dir / "c.ini", text);
    const ProcessResult result = run_program(dir, "--config " + (dir / "c.ini") + " " + run);
    INFO(text << ": " << result.err);
    CHECK(result.exit_code == 2);
    CHECK(!has(result.err, "loaded"));
    return result.err;
  };
  CHECK(has(file_error("max_num_seq = 4"),
            "c.ini: line 1: expected the name of an option, found "
            "'max_num_seq'"));
  CHECK(has(file_error("[runs]\nseed = 4"), "found 'runs'"));
  CHECK(has(file_error("\nmax-num-seqs = many"), "c.ini: line 2"));
  CHECK(has(file_error("top-p = 0"), "(--top-p comes from " + (dir / "c.ini") + ": line 1)"));
  CHECK(has(file_error("top-p 0"), "line 1: expected = and a value"));
  CHECK(has(run_program(dir, "--config " + (dir / "none") + " " + run).err, "none"));
  const ProcessResult variable = run_with(dir, "MLA_RUN_TOP_P=0", run);
  CHECK(variable.exit_code == 2);
  CHECK(has(variable.err, "--top-p comes from MLA_RUN_TOP_P"));
  const ProcessResult unknown = run_with(dir, "MLA_RUN_MAX_NUM_SEQ=4", run);
  CHECK(unknown.exit_code == 0);
  CHECK(has(unknown.err, "warning: MLA_RUN_MAX_NUM_SEQ is set, and there is no --max-num-seq"));
  const ProcessResult help = run_program(dir, "run --help");
  CHECK(help.exit_code == 0);
  for (const char* option : {"--config", "--resume", "--shard", "--fail-fast", "--progress"})
    CHECK(has(help.out, option));
}

TEST_CASE("Progress is lines where there is no terminal and nothing where none is wanted") {
  TempDir dir;
  write_text(dir / "p.jsonl", "{\"prompt\": [5, 6]}\n{\"prompt\": [7]}\n");
  const auto err = [&](const std::string& options) {
    const ProcessResult result = run_program(
        dir, kModel + options + " --overwrite -o " + (dir / "o") + " " + (dir / "p.jsonl"));
    CHECK(result.exit_code == 0);
    return result.err;
  };
  for (const char* options : {"", "--progress auto", "--progress always --quiet"}) {
    const std::string text = err(options);
    INFO(text);
    CHECK(has(text, "checking " + kModelDir));
    CHECK(has(text, "loading: 0 of "));
    CHECK(has(text, "chunked prefill off: 0 of 2 requests"));
    CHECK(has(text, "chunked prefill off: 2 of 2 requests, 0 failed"));
    CHECK(has(text, "decode tokens/s"));
    CHECK(!has(text, "\r"));
    CHECK(!has(text, "\033"));
  }
  CHECK(!has(err("--progress never"), "requests"));
  CHECK(has(err("--progress never"), "loaded"));
  CHECK(err("--quiet").empty());
  CHECK(run_program(dir, kModel + "--progress some " + (dir / "p.jsonl")).exit_code == 2);
}

// What the program writes to a terminal of `columns`.
std::string on_terminal(const std::string& environment, const std::string& arguments,
                        unsigned short columns) {
  int terminal = -1;
  struct winsize size {};
  size.ws_row = 24;
  size.ws_col = columns;
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, &size);
  if (pid == 0) {
    const std::string command =
        "exec env " + environment + " " + MLA_BINARY_DIR + "/mla-run " + arguments;
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(terminal, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<size_t>(n));
  int status = 0;
  waitpid(pid, &status, 0);
  close(terminal);
  CHECK(WEXITSTATUS(status) == 0);
  return text;
}

TEST_CASE("A terminal gets one line drawn again, in colour unless NO_COLOR is set") {
  TempDir dir;
  std::string prompts;
  for (int i = 0; i < 40; ++i) prompts += "{\"prompt\": [5, 6], \"max_tokens\": 60}\n";
  write_text(dir / "p.jsonl", prompts);
  const std::string run = kModel + "--ignore-eos --max-num-seqs 4 --threads 1 --overwrite -o " +
                          (dir / "o") + " " + (dir / "p.jsonl");
  const std::string bar = on_terminal("-u NO_COLOR TERM=xterm", run, 60);
  INFO(bar);
  CHECK(has(bar, "\r\033[K"));
  CHECK(has(bar, "\033[36m["));
  CHECK(has(bar, "ETA "));
  CHECK(has(bar, "40 of 40 requests"));
  // Nothing that is drawn over is wider than the terminal.
  for (size_t at = 0; (at = bar.find("\033[0m", at)) != std::string::npos; ++at) {
    const size_t begin = bar.rfind("\033[36m", at) + 5;
    const size_t end = bar.find('\r', at);
    CHECK(at - begin + (end - at - 4) < 60);
  }
  const std::string plain = on_terminal("NO_COLOR=1 TERM=xterm", run, 120);
  CHECK(has(plain, "\r\033[K["));
  CHECK(!has(plain, "\033[36m"));
  const std::string dumb = on_terminal("TERM=dumb", run, 120);
  CHECK(!has(dumb, "\033"));
  CHECK(!has(on_terminal("TERM=xterm", "--quiet " + run, 120), "\033"));
}

}  // namespace
}  // namespace mla::test::settings_test
