#include "apps/mla_run/options.h"

#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <set>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "lib/text/utf8.h"

namespace mla {
namespace {

constexpr int32_t kCpuMaxSeqs = 64, kCudaMaxSeqs = 1024;

}  // namespace

void EngineFlags::add_to(CLI::App& app) {
  app.add_option("-m,--model", model, "Hugging Face directory of the checkpoint")->required();
  app.add_option(
         "--chunked-prefill", chunked,
         "Cut long prompts to the token budget and mix them with decodes; both: run each mode "
         "and compare. Also --enable-chunked-prefill and --no-enable-chunked-prefill")
      ->check(CLI::IsMember({"on", "off", "both"}))
      ->capture_default_str();
  app.add_option(
      "--max-num-batched-tokens", max_batched_tokens,
      "Token budget of a step; default on: 8192, off: max(max_model_len, 16384). With both "
      "it is that of on");
  app.add_option("--max-num-seqs", max_seqs,
                 "Sequences that run at once; default cpu: 64, cuda: 1024");
  app.add_option(
      "--max-model-len", max_model_len,
      "Prompt and generated tokens of a request; default: the model's, lowered to what the KV "
      "cache holds");
  app.add_option("--kv-cache-memory-bytes", kv_cache_bytes,
                 "Size of the KV cache, N[KMG]; default cpu: 4G, cuda: what the rest leaves");
  app.add_option("--gpu-memory-utilization", gpu_memory_utilization,
                 "Share of the GPU's memory that may be used, in (0, 1]")
      ->capture_default_str();
  app.add_option("--mla-workspace-tokens", workspace_tokens,
                 "Cached rows whose K and V are recomputed in one pass; default: max(token budget, "
                 "min(max_model_len, 131072))");
  app.add_option("--device", device,
                 "Where to run; auto: cuda where this build and the machine have it")
      ->check(CLI::IsMember({"auto", "cuda", "cpu"}))
      ->capture_default_str();
  app.add_option(
         "--dtype", dtype,
         "auto (the checkpoint's: float32 stays, all else runs as bfloat16), bfloat16 or float32")
      ->capture_default_str();
  app.add_option("--load-format", load_format,
                 "dummy: seeded random weights, no files but config.json")
      ->check(CLI::IsMember({"auto", "dummy"}))
      ->capture_default_str();
  app.add_flag("--disable-custom-all-reduce", no_custom_all_reduce,
               "Ranks on GPUs add through NCCL alone, not over their own memory where that is "
               "faster; changes no bit");
  app.add_option(
         "--rank-timeout", rank_timeout,
         "With several devices: seconds after which one that gives no sign of life ends the "
         "run")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
  app.add_flag("--enforce-eager", enforce_eager, "No CUDA graphs");
  app.add_flag("--enable-prefix-caching,!--no-enable-prefix-caching", prefix_caching,
               "Keep the KV pages of prompts and share them among prompts that begin alike");
  app.add_option("--tensor-parallel-size", tensor_parallel,
                 "Ranks that share the model, each with a GPU of its own, or a share of the CPU "
                 "threads. Also -tp")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--threads", threads, "CPU threads; 0: all that the process may use")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

std::vector<bool> EngineFlags::modes() const {
  if (chunked == "both") return {false, true};
  return {chunked == "on"};
}

std::vector<EngineOptions> EngineFlags::engine_options(DeviceKind kind, uint64_t device_bytes,
                                                       DType run_dtype) const {
  const bool cuda = kind == DeviceKind::cuda;
  EngineOptions options{.max_batched_tokens = max_batched_tokens,
                        .max_model_len = max_model_len,
                        .workspace_tokens = workspace_tokens,
                        .max_seqs = max_seqs.value_or(default_max_seqs(kind)),
                        .device_bytes = cuda ? device_bytes : 0,
                        .gpu_memory_utilization = gpu_memory_utilization,
                        .graphs = cuda && !enforce_eager,
                        .stamps = !trace.empty(),
                        .prefix_caching = prefix_caching,
                        .ranks = tensor_parallel,
                        .dtype = run_dtype};
  if (!kv_cache_bytes.empty())
    options.kv_cache_bytes = parse_size(kv_cache_bytes, "--kv-cache-memory-bytes");
  std::vector<EngineOptions> all;
  for (const bool mode : modes()) {
    all.push_back(options);
    all.back().chunked = mode;
    if (chunked == "both" && !mode) all.back().max_batched_tokens.reset();
  }
  return all;
}

void EngineFlags::check() const {
  run_dtype({});
  for (const EngineOptions& options : engine_options(DeviceKind::cpu, 0, DType::bf16))
    mla::check(options);
}

DType EngineFlags::run_dtype(const ModelConfig& config) const {
  if (dtype == "bfloat16") return DType::bf16;
  if (dtype == "float32") return DType::f32;
  if (dtype == "float16" || dtype == "half")
    usage_fail(
        "--dtype {}: DeepSeek-V2's activations overflow float16 (largest value 65504); use "
        "bfloat16 or float32",
        dtype);
  if (dtype != "auto") usage_fail("--dtype: expected auto, bfloat16 or float32, found '{}'", dtype);
  return config.stored_dtype() == DType::f32 ? DType::f32 : DType::bf16;
}

int32_t EngineFlags::default_max_seqs(DeviceKind kind) {
  return kind == DeviceKind::cuda ? kCudaMaxSeqs : kCpuMaxSeqs;
}

int EngineFlags::run_threads() const {
  if (threads > 0) return threads;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

namespace {

// CLI11 takes a number beyond 64 bits for the nearest one; here it is an error.
std::string check_seed(std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return "";
  return fmt::format("expected an integer of 64 bits, found '{}'", text);
}

}  // namespace

void SamplingFlags::add_draw_to(CLI::App& app, const char* group) {
  app.add_option("--temperature", temperature, "0: greedy")->group(group)->capture_default_str();
  app.add_option("--top-p", top_p, "In (0, 1]")->group(group)->capture_default_str();
  app.add_option("--top-k", top_k, "0 or -1: off")->group(group)->capture_default_str();
  app.add_option("--min-p", min_p,
                 "In [0, 1]: leaves out tokens less likely than this share of the most likely one")
      ->group(group)
      ->capture_default_str();
  app.add_option("--presence-penalty", presence_penalty,
                 "In [-2, 2]: taken off the logits of tokens that were generated")
      ->group(group)
      ->capture_default_str();
  app.add_option("--frequency-penalty", frequency_penalty,
                 "In [-2, 2]: the same, for each time they were")
      ->group(group)
      ->capture_default_str();
  app.add_option("--repetition-penalty", repetition_penalty,
                 "In (0, 2]: divides the logits, where they are above 0, of tokens of the prompt "
                 "and generated ones, else multiplies them")
      ->group(group)
      ->capture_default_str();
  app.add_option("--seed", seed,
                 "Of the run; a request without a seed gets a hash of this and its id")
      ->check(CLI::Validator(&check_seed, "", "seed"))
      ->group(group)
      ->capture_default_str();
}

void SamplingFlags::add_to(CLI::App& app) {
  app_ = &app;
  const char* group = "Sampling, for lines that do not say";
  add_draw_to(app, group);
  app.add_option("--max-tokens", max_tokens,
                 "Generated tokens at most; default 16, chat: the rest of "
                 "the model length")
      ->group(group);
  app.add_option("--min-tokens", min_tokens, "No end of sequence and no stop before that many")
      ->group(group)
      ->capture_default_str();
  app.add_option("--stop", stop, "A stop string; may be given several times")
      ->group(group)
      ->expected(1)
      ->allow_extra_args(false)  // with them, [x] would be a list
      ->take_all();
  app.add_option("--stop-token-ids", stop_token_ids, "Stop token ids, with commas between them")
      ->group(group)
      ->delimiter(',')
      ->expected(1)
      ->take_all();
  app.add_flag("--ignore-eos", ignore_eos, "Go on after the end of sequence")->group(group);
  app.add_option("--logprobs", logprobs, "Log-probabilities of the k best tokens, 0 to 20")
      ->group(group);
  app.add_option("--prompt-logprobs", prompt_logprobs,
                 "Log-probabilities of the prompt's tokens and of the k best, 0 to 20")
      ->group(group);
  app.add_option("--generation-config", generation_config,
                 "auto: temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of "
                 "the model's generation_config.json are the defaults of these options")
      ->check(CLI::IsMember({"auto", "none"}))
      ->group(group)
      ->capture_default_str();
  app.add_option("--add-bos", add_bos,
                 "A BOS in front of text prompts; auto: as tokenizer_config.json's add_bos_token "
                 "says. Token ids and chats never get one")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->group(group)
      ->capture_default_str();
  app.add_flag("--return-token-ids", return_token_ids, "The prompt's token ids in the outputs")
      ->group(group);
}

void SamplingFlags::take_generation_config(const std::string& model_dir) {
  const std::string path = (std::filesystem::path(model_dir) / "generation_config.json").string();
  if (generation_config != "auto" || !has_entry(path)) return;
  check_draw();  // of what the command line says
  const Json config = parse_json(read_file(path), path);
  const auto number = [&](const char* key, const char* option, float& value) {
    const auto found = find_number(config, key, path);
    if (found && app_->count(option) == 0) value = static_cast<float>(*found);
  };
  number("temperature", "--temperature", temperature);
  number("top_p", "--top-p", top_p);
  number("min_p", "--min-p", min_p);
  number("repetition_penalty", "--repetition-penalty", repetition_penalty);
  const auto integer = [&](const char* key, const char* option) -> std::optional<int32_t> {
    const auto found = find_int(config, key, path);
    if (!found || app_->count(option) > 0) return std::nullopt;
    if (*found != static_cast<int32_t>(*found))
      fail("{}: field '{}': expected an integer of 32 bits, found {}", path, key, *found);
    return static_cast<int32_t>(*found);
  };
  top_k = integer("top_k", "--top-k").value_or(top_k);
  if (const auto most = integer("max_new_tokens", "--max-tokens")) max_tokens = most;
  try {
    check_draw();
  } catch (const Error& e) {
    usage_fail("{}: {}; --generation-config none passes over it", path, e.what());
  }
}

void SamplingFlags::check_draw() const {
  if (!(temperature >= 0) || std::isinf(temperature))
    usage_fail("--temperature: expected a finite number of at least 0, found {}", temperature);
  if (!(top_p > 0 && top_p <= 1))
    usage_fail("--top-p: expected a number in (0, 1], found {}", top_p);
  if (!(min_p >= 0 && min_p <= 1))
    usage_fail("--min-p: expected a number in [0, 1], found {}", min_p);
  for (const auto& [option, penalty] : {std::pair("--presence-penalty", presence_penalty),
                                        std::pair("--frequency-penalty", frequency_penalty)})
    if (!(penalty >= -2 && penalty <= 2))
      usage_fail("{}: expected a number in [-2, 2], found {}", option, penalty);
  if (!(repetition_penalty > 0 && repetition_penalty <= 2))
    usage_fail("--repetition-penalty: expected a number in (0, 2], found {}", repetition_penalty);
  if (top_k < -1) usage_fail("--top-k: expected at least -1, found {}", top_k);
}

void SamplingFlags::check(int32_t vocab_size) const {
  check_draw();
  if (max_tokens && *max_tokens < 1)
    usage_fail("--max-tokens: expected at least 1, found {}", *max_tokens);
  if (min_tokens < 0) usage_fail("--min-tokens: expected at least 0, found {}", min_tokens);
  if (logprobs && (*logprobs < 0 || *logprobs > kMaxLogprobs))
    usage_fail("--logprobs: expected 0 to {}, found {}", kMaxLogprobs, *logprobs);
  if (prompt_logprobs && (*prompt_logprobs < 0 || *prompt_logprobs > kMaxLogprobs))
    usage_fail("--prompt-logprobs: expected 0 to {}, found {}", kMaxLogprobs, *prompt_logprobs);
  if (max_tokens && min_tokens > *max_tokens)
    usage_fail("--min-tokens: expected at most the {} of --max-tokens, found {}", *max_tokens,
               min_tokens);
  for (const std::string& text : stop) {
    if (text.empty()) usage_fail("--stop: expected a string that is not empty");
    if (find_invalid_utf8(text) != std::string_view::npos)
      usage_fail("--stop: expected UTF-8 text");
  }
  for (const int32_t id : stop_token_ids)
    if (id < 0 || id >= vocab_size)
      usage_fail("--stop-token-ids: expected ids in [0, {}), found {}", vocab_size, id);
}

SamplingParams SamplingFlags::params(int32_t vocab_size) const {
  check(vocab_size);
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  params.presence_penalty = presence_penalty;
  params.frequency_penalty = frequency_penalty;
  params.repetition_penalty = repetition_penalty;
  params.max_tokens = max_tokens;
  params.min_tokens = min_tokens;
  params.stop = stop;
  params.stop_token_ids = stop_token_ids;
  params.ignore_eos = ignore_eos;
  params.logprobs = logprobs;
  params.prompt_logprobs = prompt_logprobs;
  params.add_bos = add_bos == "always"  ? AddBos::always
                   : add_bos == "never" ? AddBos::never
                                        : AddBos::automatic;
  params.return_token_ids = return_token_ids;
  return params;
}

uint64_t parse_size(const std::string& text, const char* option) {
  const auto wrong = [&]() {
    usage_fail("{}: expected a size such as 512M or 4G, found '{}'", option, text);
  };
  size_t end = 0;
  unsigned long long number = 0;
  if (text.empty() || text[0] < '0' || text[0] > '9') wrong();
  try {
    number = std::stoull(text, &end);
  } catch (const std::exception&) {
    wrong();
  }
  const std::string unit = text.substr(end);
  int shift = 0;
  if (unit == "K" || unit == "KiB" || unit == "k")
    shift = 10;
  else if (unit == "M" || unit == "MiB")
    shift = 20;
  else if (unit == "G" || unit == "GiB")
    shift = 30;
  else if (unit == "T" || unit == "TiB")
    shift = 40;
  else if (!unit.empty() && unit != "B")
    wrong();
  if (number > (UINT64_MAX >> shift)) wrong();
  return static_cast<uint64_t>(number) << shift;
}

std::vector<std::string> normalize_arguments(std::vector<std::string> arguments) {
  static const std::set<std::string> kCommands = {"run",  "eval",    "compare", "merge",
                                                  "plan", "inspect", "bench"};
  static const std::set<std::string> kTopLevel = {"-h", "--help", "--version"};
  std::vector<std::string> result;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (word == "--") {
      result.insert(result.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i),
                    arguments.end());
      break;
    }
    if (word == "--enable-chunked-prefill") {
      result.push_back("--chunked-prefill=on");
    } else if (word == "--no-enable-chunked-prefill") {
      result.push_back("--chunked-prefill=off");
    } else if (word == "--chunked-prefill") {
      const std::string next = i + 1 < arguments.size() ? arguments[i + 1] : "";
      const bool value = next == "on" || next == "off" || next == "both";
      result.push_back("--chunked-prefill=" + (value ? next : std::string("on")));
      if (value) ++i;
    } else if (word == "-dp" || word.starts_with("-dp=")) {
      result.push_back("--data-parallel-size" + word.substr(3));
    } else if (word == "-tp" || word.starts_with("-tp=")) {
      result.push_back("--tensor-parallel-size" + word.substr(3));
    } else {
      result.push_back(word);
    }
  }
  if (!result.empty() && !kCommands.count(result[0]) && !kTopLevel.count(result[0]))
    result.insert(result.begin(), "run");
  return result;
}

}  // namespace mla
