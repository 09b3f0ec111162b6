#include "lib/model/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <set>

#include "lib/base/error.h"
#include "lib/base/json.h"

namespace mla {
namespace {

constexpr const char* kWhat = "config.json";
constexpr const char* kModelType = "deepseek_v2";
constexpr const char* kArchitecture = "DeepseekV2ForCausalLM";

// Far above every released model; products of two stay within 64 bits.
constexpr int64_t kMaxSize = 1 << 20;
constexpr int64_t kMaxVocab = 1 << 24;
constexpr int64_t kMaxCount = 1 << 12;  // layers, experts
// Of YaRN's numbers: what is computed from them stays finite.
constexpr double kMaxYarn = 1e6;

// Keys that this file reads, and keys that say nothing about what is computed: of training, of the
// Python code, of defaults of a generate() call.
const std::set<std::string>& known_keys() {
  static const std::set<std::string> keys = {
      "architectures", "attention_bias", "bos_token_id", "dtype", "eos_token_id",
      "first_k_dense_replace", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
      "kv_lora_rank", "max_position_embeddings", "mlp_bias", "mlp_layer_types", "model_type",
      "moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts",
      "norm_topk_prob", "num_attention_heads", "num_experts_per_tok", "num_hidden_layers",
      "num_key_value_heads", "original_max_position_embeddings", "partial_rotary_factor",
      "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "quantization_config",
      "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor",
      "scoring_func", "tie_word_embeddings", "topk_group", "topk_method", "torch_dtype",
      "v_head_dim", "vocab_size",
      // harmless
      "_name_or_path", "attention_dropout", "auto_map", "aux_loss_alpha", "ep_size",
      "initializer_range", "output_attentions", "output_hidden_states", "output_router_logits",
      "pad_token_id", "pretraining_tp", "return_dict", "router_aux_loss_coef", "seq_aux",
      "transformers_version", "use_cache"};
  return keys;
}

bool present(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && !at->is_null();
}

int64_t in_range(int64_t value, const char* key, int64_t low, int64_t high) {
  if (value < low || value > high)
    fail("{}: field '{}': expected {} to {}, found {}", kWhat, key, low, high, value);
  return value;
}

int32_t get_size(const Json& c, const char* key, int64_t high = kMaxSize, int64_t low = 1) {
  if (const auto at = c.find(key); at != c.end() && at->is_null())
    fail("{}: field '{}': expected an integer, found null", kWhat, key);
  return static_cast<int32_t>(in_range(get_int(c, key, kWhat), key, low, high));
}

std::optional<int32_t> find_size(const Json& c, const char* key, int64_t high, int64_t low) {
  if (!present(c, key)) return std::nullopt;
  return get_size(c, key, high, low);
}

double get_positive(const Json& object, const char* key, std::string_view what) {
  const double value = get_number(object, key, what);
  if (!(value > 0.0)) fail("{}: field '{}': expected above 0, found {}", what, key, value);
  return value;
}

float get_positive_float(const Json& c, const char* key) {
  const double value = get_positive(c, key, kWhat);
  const auto rounded = static_cast<float>(value);
  if (!(rounded > 0.0f) || !std::isfinite(rounded))
    fail("{}: field '{}': expected a number that a float holds, found {}", kWhat, key, value);
  return rounded;
}

// For fields whose only served value is what an absent field means.
void require_false(const Json& c, const char* key) {
  if (find_bool(c, key, kWhat).value_or(false))
    fail("{}: field '{}': expected false, found true", kWhat, key);
}

void require_text(const Json& c, const char* key, const char* expected) {
  const std::string found = get_string(c, key, kWhat);
  if (found != expected)
    fail("{}: field '{}': expected \"{}\", found \"{}\"", kWhat, key, expected, found);
}

void check_identity(const Json& c) {
  require_text(c, "model_type", kModelType);
  const auto list = c.find("architectures");
  if (list == c.end() || *list != Json::array({kArchitecture}))
    fail("{}: field 'architectures': expected [\"{}\"], found {}", kWhat, kArchitecture,
         list == c.end()    ? "nothing"
         : list->is_array() ? list->dump(-1, ' ', false, Json::error_handler_t::replace)
                            : describe(*list));
  if (present(c, "quantization_config")) {
    const Json& q = c["quantization_config"];
    const bool named = q.is_object() && q.contains("quant_method");
    fail("{}: field 'quantization_config': expected none (weights in BF16, F16 or F32), found {}",
         kWhat, named ? "quant_method: " + describe(q["quant_method"]) : describe(q));
  }
}

void read_sizes(const Json& c, ModelConfig& m) {
  m.vocab_size = get_size(c, "vocab_size", kMaxVocab);
  m.hidden_size = get_size(c, "hidden_size");
  m.num_layers = get_size(c, "num_hidden_layers", kMaxCount);
  m.num_heads = get_size(c, "num_attention_heads", kMaxCount);
  if (const auto heads = find_size(c, "num_key_value_heads", kMaxCount, 1);
      heads && *heads != m.num_heads)
    fail("{}: field 'num_key_value_heads': expected num_attention_heads = {}, found {}", kWhat,
         m.num_heads, *heads);
  // Null says that there is no low-rank query; absent says nothing, so it is not taken for null.
  if (!c.contains("q_lora_rank"))
    fail("{}: field 'q_lora_rank': expected an integer or null, found nothing", kWhat);
  m.q_lora_rank = find_size(c, "q_lora_rank", kMaxSize, 1).value_or(0);
  m.kv_lora_rank = get_size(c, "kv_lora_rank");
  m.qk_nope_head_dim = get_size(c, "qk_nope_head_dim");
  m.qk_rope_head_dim = get_size(c, "qk_rope_head_dim");
  if (m.qk_rope_head_dim % 2 != 0)
    fail("{}: field 'qk_rope_head_dim': expected an even number, found {}", kWhat,
         m.qk_rope_head_dim);
  m.v_head_dim = get_size(c, "v_head_dim");
  const int64_t widest =
      m.num_heads * (int64_t{m.qk_nope_head_dim} + std::max(m.qk_rope_head_dim, m.v_head_dim));
  if (widest > INT32_MAX)
    fail(
        "{}: field 'num_attention_heads': expected heads that are at most {} wide together, "
        "found {}",
        kWhat, INT32_MAX, widest);
  // Derived fields that newer writers add.
  if (const auto dim = find_int(c, "head_dim", kWhat); dim && *dim != m.qk_rope_head_dim)
    fail("{}: field 'head_dim': expected qk_rope_head_dim = {}, found {}", kWhat,
         m.qk_rope_head_dim, *dim);
  const int64_t qk = int64_t{m.qk_nope_head_dim} + m.qk_rope_head_dim;
  if (const auto dim = find_int(c, "qk_head_dim", kWhat); dim && *dim != qk)
    fail("{}: field 'qk_head_dim': expected qk_nope_head_dim + qk_rope_head_dim = {}, found {}",
         kWhat, qk, *dim);
  m.max_position_embeddings = get_size(c, "max_position_embeddings", INT32_MAX);
  m.rms_norm_eps = get_positive_float(c, "rms_norm_eps");
  require_text(c, "hidden_act", "silu");
  require_false(c, "attention_bias");
  require_false(c, "mlp_bias");
  m.tie_word_embeddings = find_bool(c, "tie_word_embeddings", kWhat).value_or(false);
}

// The layers' kinds: first_k_dense_replace, mlp_layer_types (["dense", "sparse", …]), or both.
void read_layer_kinds(const Json& c, ModelConfig& m) {
  if (!present(c, "mlp_layer_types")) {
    m.first_k_dense_replace = get_size(c, "first_k_dense_replace", kMaxSize, 0);
    return;
  }
  constexpr const char* key = "mlp_layer_types";
  const Json& kinds = c[key];
  if (!kinds.is_array() || kinds.size() != static_cast<size_t>(m.num_layers))
    fail("{}: field '{}': expected a list of num_hidden_layers = {}, found {}", kWhat, key,
         m.num_layers, kinds.is_array() ? fmt::format("{}", kinds.size()) : describe(kinds));
  int32_t dense = 0;
  while (dense < m.num_layers && kinds[static_cast<size_t>(dense)] == "dense") ++dense;
  m.first_k_dense_replace = find_size(c, "first_k_dense_replace", kMaxSize, 0).value_or(dense);
  for (int32_t layer = 0; layer < m.num_layers; ++layer) {
    const Json& kind = kinds[static_cast<size_t>(layer)];
    const char* expected = m.is_moe(layer) ? "sparse" : "dense";
    if (kind != expected)
      fail("{}: field '{}': layer {}: expected \"{}\" (first_k_dense_replace = {}), found {}",
           kWhat, key, layer, expected, m.first_k_dense_replace, describe(kind));
  }
}

void read_groups(const Json& c, ModelConfig& m) {
  const std::string method = find_string(c, "topk_method", kWhat).value_or("");
  if (method == "group_limited_greedy") {
    m.group_limited = true;
    m.num_groups = get_size(c, "n_group", m.num_experts);
    m.topk_group = get_size(c, "topk_group", m.num_groups);
    if (m.num_experts % m.num_groups != 0)
      fail("{}: field 'n_group': expected a divisor of n_routed_experts = {}, found {}", kWhat,
           m.num_experts, m.num_groups);
  } else if (method == "greedy") {
    // Greedy takes no notice of groups, whatever n_group says.
  } else if (!method.empty()) {
    fail("{}: field 'topk_method': expected \"greedy\" or \"group_limited_greedy\", found \"{}\"",
         kWhat, method);
  } else if (find_int(c, "n_group", kWhat).value_or(1) != 1) {
    fail("{}: field 'topk_method': expected \"greedy\" or \"group_limited_greedy\", found nothing",
         kWhat);
  }
  const int32_t reachable = m.num_experts / m.num_groups * m.topk_group;
  if (m.group_limited && m.num_experts_per_tok > reachable)
    fail(
        "{}: field 'num_experts_per_tok': expected at most {}, the experts of topk_group = {} "
        "groups, found {}",
        kWhat, reachable, m.topk_group, m.num_experts_per_tok);
}

void read_feed_forward(const Json& c, ModelConfig& m) {
  const int64_t freq = find_int(c, "moe_layer_freq", kWhat).value_or(1);
  if (freq != 1) fail("{}: field 'moe_layer_freq': expected 1, found {}", kWhat, freq);
  if (present(c, "scoring_func")) require_text(c, "scoring_func", "softmax");
  require_false(c, "norm_topk_prob");
  read_layer_kinds(c, m);
  if (m.first_k_dense_replace > 0) m.intermediate_size = get_size(c, "intermediate_size");
  if (m.first_k_dense_replace >= m.num_layers) return;  // no experts anywhere

  m.moe_intermediate_size = get_size(c, "moe_intermediate_size");
  m.num_experts = get_size(c, "n_routed_experts", kMaxCount);
  m.num_experts_per_tok = get_size(c, "num_experts_per_tok", m.num_experts);
  m.num_shared_experts = find_size(c, "n_shared_experts", kMaxCount, 0).value_or(0);
  if (int64_t{m.num_shared_experts} * m.moe_intermediate_size > INT32_MAX)
    fail("{}: field 'n_shared_experts': expected a shared width of at most {}, found {} x {}",
         kWhat, INT32_MAX, m.num_shared_experts, m.moe_intermediate_size);
  m.routed_scaling_factor = get_positive_float(c, "routed_scaling_factor");
  read_groups(c, m);
}

void check_rope_keys(const Json& rope, const std::set<std::string>& known, const char* type,
                     const std::string& what) {
  for (const auto& [key, value] : rope.items())
    if (!known.contains(key) && !value.is_null())
      fail("{}: field '{}': expected no such field for type \"{}\", found {}", what, key, type,
           describe(value));
}

void read_yarn(const Json& c, const Json& rope, const std::string& what, ModelConfig& m) {
  check_rope_keys(
      rope,
      {"type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "beta_fast",
       "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings", "truncate"},
      "yarn", what);
  YarnConfig& yarn = m.yarn_config;
  m.yarn = true;
  yarn.factor = get_number(rope, "factor", what);
  if (!(yarn.factor >= 1.0))
    fail("{}: field 'factor': expected 1 or more, found {}", what, yarn.factor);
  // An absent beta is 32 and 1 in the paper and in all modelling code.
  if (present(rope, "beta_fast")) yarn.beta_fast = get_positive(rope, "beta_fast", what);
  if (present(rope, "beta_slow")) yarn.beta_slow = get_positive(rope, "beta_slow", what);
  for (const auto& [key, value] :
       {std::pair("beta_fast", yarn.beta_fast), std::pair("beta_slow", yarn.beta_slow)})
    if (value < 1.0 / kMaxYarn)
      fail("{}: field '{}': expected at least {}, found {}", what, key, 1.0 / kMaxYarn, value);
  if (yarn.beta_fast < yarn.beta_slow)
    fail("{}: field 'beta_fast': expected at least beta_slow = {}, found {}", what, yarn.beta_slow,
         yarn.beta_fast);
  yarn.mscale = find_number(rope, "mscale", what).value_or(0.0);
  yarn.mscale_all_dim = find_number(rope, "mscale_all_dim", what).value_or(0.0);
  for (const auto& [key, value] :
       {std::pair("mscale", yarn.mscale), std::pair("mscale_all_dim", yarn.mscale_all_dim)}) {
    if (value < 0.0) fail("{}: field '{}': expected 0 or more, found {}", what, key, value);
    if (value > kMaxYarn)
      fail("{}: field '{}': expected at most {}, found {}", what, key, kMaxYarn, value);
  }
  // Other software puts max_position_embeddings here where it is absent, which shifts every
  // frequency; so it is required.
  const int64_t original = get_int(rope, "original_max_position_embeddings", what);
  if (original < 1 || original > INT32_MAX)
    fail("{}: field 'original_max_position_embeddings': expected 1 to {}, found {}", what,
         INT32_MAX, original);
  yarn.original_max_position_embeddings = original;
  if (const auto outer = find_int(c, "original_max_position_embeddings", kWhat);
      outer && *outer != original)
    fail("{}: field 'original_max_position_embeddings': expected {} as in {}, found {}", kWhat,
         original, what, *outer);
  if (!find_bool(rope, "truncate", what).value_or(true))
    fail("{}: field 'truncate': expected true, found false", what);
}

void read_rope(const Json& c, ModelConfig& m) {
  const bool scaling = present(c, "rope_scaling"), parameters = present(c, "rope_parameters");
  if (scaling && parameters && c["rope_scaling"] != c["rope_parameters"])
    fail("{}: expected rope_scaling or rope_parameters, found both, and they differ", kWhat);
  const char* key = parameters ? "rope_parameters" : "rope_scaling";
  const Json rope = scaling || parameters ? c[key] : Json::object();
  const std::string what = fmt::format("{}: {}", kWhat, key);
  if (!rope.is_object()) fail("{}: expected an object, found {}", what, describe(rope));

  const bool outer = present(c, "rope_theta"), inner = present(rope, "rope_theta");
  if (outer) m.rope_theta = get_number(c, "rope_theta", kWhat);
  if (inner) {
    const double theta = get_number(rope, "rope_theta", what);
    if (outer && theta != m.rope_theta)
      fail("{}: field 'rope_theta': expected {} as outside of it, found {}", what, m.rope_theta,
           theta);
    m.rope_theta = theta;
  }
  if (!outer && !inner) fail("{}: field 'rope_theta': expected a number, found nothing", kWhat);
  if (!(m.rope_theta > 1.0))
    fail("{}: field 'rope_theta': expected above 1, found {}", kWhat, m.rope_theta);
  for (const Json* object : {&c, &rope}) {
    const double part = find_number(*object, "partial_rotary_factor", kWhat).value_or(1.0);
    if (part != 1.0) fail("{}: field 'partial_rotary_factor': expected 1, found {}", kWhat, part);
  }
  if (!scaling && !parameters) return;

  const auto type = find_string(rope, "type", what),
             rope_type = find_string(rope, "rope_type", what);
  if (!type && !rope_type)
    fail("{}: field 'rope_type': expected \"yarn\" or \"default\", found nothing", what);
  if (type && rope_type && *type != *rope_type)
    fail("{}: field 'type': expected \"{}\" as in rope_type, found \"{}\"", what, *rope_type,
         *type);
  const std::string name = rope_type.value_or(type.value_or(""));
  if (name == "yarn") {
    read_yarn(c, rope, what, m);
  } else if (name == "default") {
    check_rope_keys(rope, {"type", "rope_type", "rope_theta", "partial_rotary_factor"}, "default",
                    what);
  } else {
    fail("{}: field '{}': expected \"yarn\" or \"default\", found \"{}\"", what,
         rope_type ? "rope_type" : "type", name);
  }
}

int32_t token_id(const Json& value, const char* what, const char* key, int32_t vocab) {
  const bool integer = value.is_number_unsigned();
  if (!integer || value.get<uint64_t>() >= static_cast<uint64_t>(vocab))
    fail("{}: field '{}': expected a token id from 0 to {}, found {}", what, key, vocab - 1,
         describe(value));
  return value.get<int32_t>();
}

void read_eos(const Json& object, const char* what, ModelConfig& m) {
  constexpr const char* key = "eos_token_id";
  if (!present(object, key)) return;
  const Json& value = object[key];
  if (value.is_array()) {
    for (const Json& id : value) m.eos_token_ids.push_back(token_id(id, what, key, m.vocab_size));
  } else {
    m.eos_token_ids.push_back(token_id(value, what, key, m.vocab_size));
  }
}

void read_dtype(const Json& c, ModelConfig& m) {
  const auto dtype = find_string(c, "dtype", kWhat), torch = find_string(c, "torch_dtype", kWhat);
  if (dtype && torch && *dtype != *torch)
    fail("{}: field 'dtype': expected \"{}\" as in torch_dtype, found \"{}\"", kWhat, *torch,
         *dtype);
  m.dtype = dtype.value_or(torch.value_or(""));
}

}  // namespace

DType ModelConfig::stored_dtype() const {
  for (const DType known : {DType::f32, DType::f16})
    if (dtype == name_of(known)) return known;
  return DType::bf16;
}

ModelConfig parse_config(std::string_view config_json, std::string_view generation_json) {
  const Json c = parse_json(config_json, kWhat);
  if (!c.is_object()) fail("{}: expected an object, found {}", kWhat, describe(c));
  ModelConfig m;
  check_identity(c);
  read_sizes(c, m);
  read_feed_forward(c, m);
  read_rope(c, m);
  read_dtype(c, m);
  if (present(c, "bos_token_id"))
    m.bos_token_id = token_id(c["bos_token_id"], kWhat, "bos_token_id", m.vocab_size);
  read_eos(c, kWhat, m);
  if (!generation_json.empty()) {
    constexpr const char* what = "generation_config.json";
    const Json generation = parse_json(generation_json, what);
    if (!generation.is_object())
      fail("{}: expected an object, found {}", what, describe(generation));
    read_eos(generation, what, m);
  }
  std::sort(m.eos_token_ids.begin(), m.eos_token_ids.end());
  m.eos_token_ids.erase(std::unique(m.eos_token_ids.begin(), m.eos_token_ids.end()),
                        m.eos_token_ids.end());

  std::vector<std::string> unknown;
  for (const auto& [key, value] : c.items())
    if (!known_keys().contains(key)) unknown.push_back(key);
  if (!unknown.empty())
    m.warnings.push_back(
        fmt::format("{}: unknown fields, not used: {}", kWhat, fmt::join(unknown, ", ")));
  return m;
}

ModelConfig load_config(const std::string& model_dir) {
  namespace fs = std::filesystem;
  constexpr size_t kMaxBytes = 1 << 24;
  std::error_code ignored;
  if (!fs::is_directory(model_dir, ignored))
    fail("{}: expected a folder with a Hugging Face checkpoint, found {}", model_dir,
         fs::exists(model_dir, ignored) ? "a file" : "none");
  const std::string generation = (fs::path(model_dir) / "generation_config.json").string();
  const std::string config_text =
      read_file((fs::path(model_dir) / "config.json").string(), kMaxBytes);
  return parse_config(config_text,
                      has_entry(generation) ? read_file(generation, kMaxBytes) : std::string());
}

}  // namespace mla
