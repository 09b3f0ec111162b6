#include "lib/model/config.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/safetensors_writer.h"

namespace mla::config_test {
namespace {

using nlohmann::json;
using test::error_text;

// A small config as the released ones are written.
json base() {
  return json::parse(R"({
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 112, "kv_lora_rank": 32,
    "max_position_embeddings": 4096, "model_type": "deepseek_v2", "moe_intermediate_size": 48,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2,
    "norm_topk_prob": false, "num_attention_heads": 2, "num_experts_per_tok": 3,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "pretraining_tp": 1, "q_lora_rank": null,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
      "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
    "v_head_dim": 16, "vocab_size": 128})");
}

ModelConfig parse(const json& config, const std::string& generation = "") {
  return parse_config(config.dump(), generation);
}

// The message, without "config.json: ", of the base config with a field set (null: to null).
std::string set_error(const std::string& key, const json& value) {
  json c = base();
  c[key] = value;
  const std::string message = error_text([&] { parse(c); });
  const std::string prefix = "config.json: ";
  return message.starts_with(prefix) ? message.substr(prefix.size()) : message;
}

std::string erase_error(const std::string& key) {
  json c = base();
  c.erase(key);
  return error_text([&] { parse(c); });
}

std::string rope_error(const std::string& key, const json& value) {
  json rope = base()["rope_scaling"];
  rope[key] = value;
  return set_error("rope_scaling", rope);
}

TEST_CASE("The released configs of the family are accepted without a warning") {
  if (test::assets().empty()) MLA_SKIP("no assets");
  for (const std::string name :
       {"DeepSeek-V2-Lite", "DeepSeek-Coder-V2-Lite", "DeepSeek-V2", "DeepSeek-V2.5"}) {
    INFO(name);
    const ModelConfig c = load_config(test::assets() + "/configs/" + name);
    CHECK(c.warnings.empty());
    const bool lite = name.find("Lite") != std::string::npos;
    CHECK(c.vocab_size == 102400);
    CHECK(c.num_layers == (lite ? 27 : 60));
    CHECK(c.num_heads == (lite ? 16 : 128));
    CHECK(c.q_lora_rank == (lite ? 0 : 1536));
    CHECK(c.group_limited == !lite);
    CHECK(c.num_groups == (lite ? 1 : 8));
    CHECK(c.topk_group == (lite ? 1 : 3));
    CHECK(c.routed_scaling_factor == (lite ? 1.0f : 16.0f));
    CHECK(c.yarn);
    CHECK(c.yarn_config.mscale_all_dim == (name == "DeepSeek-V2.5" ? 1.0 : 0.707));
    CHECK(c.bos_token_id == 100000);
    CHECK(c.eos_token_ids == std::vector<int32_t>{100001});
    CHECK(c.dtype == "bfloat16");
  }
}

TEST_CASE("Configs of other families are refused by name") {
  if (test::assets().empty()) MLA_SKIP("no assets");
  for (const auto& [name, type] :
       {std::pair("DeepSeek-V3", "deepseek_v3"), std::pair("GLM-4.7-Flash", "glm4_moe_lite"),
        std::pair("Moonlight-16B-A3B-Instruct", "deepseek_v3")})
    CHECK(error_text([&] { load_config(test::assets() + "/configs/" + name); }) ==
          std::string("config.json: field 'model_type': expected \"deepseek_v2\", found \"") +
              type + "\"");
}

TEST_CASE("Every config of the expected logits is accepted without a warning") {
  // Four of them are as transformers 5 writes them: rope_parameters and derived fields.
  int found = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(test::source_path("tests/data/expected"))) {
    if (!entry.is_directory()) continue;
    INFO(entry.path().string());
    CHECK(load_config(entry.path().string()).warnings.empty());
    ++found;
  }
  CHECK(found >= 10);
}

TEST_CASE("The fields become the members that the algorithm names") {
  const ModelConfig c = parse(base());
  CHECK(c.hidden_size == 64);
  CHECK(c.kv_lora_rank == 32);
  CHECK(c.q_dim() == 48);
  CHECK(c.kv_a_dim() == 40);
  CHECK(c.kv_b_dim() == 64);
  CHECK(c.intermediate_size == 112);
  CHECK(c.moe_intermediate_size == 48);
  CHECK(c.num_experts == 8);
  CHECK(c.num_experts_per_tok == 3);
  CHECK(c.num_shared_experts == 2);
  CHECK_FALSE(c.is_moe(0));
  CHECK(c.is_moe(1));
  CHECK(c.rms_norm_eps == 1e-6f);
  CHECK(c.rope_theta == 10000.0);
  CHECK(c.yarn_config.factor == 40.0);
  CHECK(c.yarn_config.original_max_position_embeddings == 4096);
  CHECK(c.max_position_embeddings == 4096);
  CHECK(c.warnings.empty());
}

TEST_CASE("What transformers 5 writes for the same model gives the same config") {
  // The keys and the rope object are those of DeepseekV2Config.save_pretrained of 5.24.0.
  json c = base();
  for (const char* key : {"auto_map", "ep_size", "rope_theta", "torch_dtype"}) c.erase(key);
  json rope = c["rope_scaling"];
  c.erase("rope_scaling");
  rope["rope_theta"] = 10000;
  rope["rope_type"] = "yarn";
  c["rope_parameters"] = rope;
  c["dtype"] = "bfloat16";
  c["head_dim"] = 8;
  c["mlp_bias"] = false;
  c["output_router_logits"] = false;
  c["pad_token_id"] = nullptr;
  c["qk_head_dim"] = 24;
  c["transformers_version"] = "5.24.0";
  for (const char* key : {"moe_layer_freq", "scoring_func", "seq_aux"}) {
    const ModelConfig m = parse(c);
    CHECK(m.warnings.empty());
    CHECK(m.yarn);
    CHECK(m.yarn_config.factor == 40.0);
    CHECK(m.rope_theta == 10000.0);
    CHECK(m.dtype == "bfloat16");
    c.erase(key);  // it writes them only where they were read
  }
  c["head_dim"] = 24;
  CHECK(error_text([&] { parse(c); }) ==
        "config.json: field 'head_dim': expected qk_rope_head_dim = 8, found 24");
  c["head_dim"] = 8;
  c["qk_head_dim"] = 8;
  CHECK(error_text([&] { parse(c); }) ==
        "config.json: field 'qk_head_dim': expected qk_nope_head_dim + qk_rope_head_dim = 24, "
        "found 8");
}

TEST_CASE("Unknown fields are one warning that names them all") {
  json c = base();
  c["zebra"] = 1;
  c["apple"] = "x";
  const ModelConfig m = parse(c);
  REQUIRE(m.warnings.size() == 1);
  CHECK(m.warnings[0] == "config.json: unknown fields, not used: apple, zebra");
}

TEST_CASE("Another architecture is refused by name") {
  CHECK(set_error("model_type", "deepseek_v3") ==
        "field 'model_type': expected \"deepseek_v2\", found \"deepseek_v3\"");
  CHECK(set_error("architectures", json::array({"DeepseekV3ForCausalLM"})) ==
        "field 'architectures': expected [\"DeepseekV2ForCausalLM\"], found "
        "[\"DeepseekV3ForCausalLM\"]");
  CHECK(set_error("architectures", "DeepseekV2ForCausalLM") ==
        "field 'architectures': expected [\"DeepseekV2ForCausalLM\"], found the string "
        "\"DeepseekV2ForCausalLM\"");
  CHECK(erase_error("architectures") ==
        "config.json: field 'architectures': expected [\"DeepseekV2ForCausalLM\"], found nothing");
}

TEST_CASE("What is not served is refused by name") {
  CHECK(set_error("quantization_config", {{"quant_method", "fp8"}}) ==
        "field 'quantization_config': expected none (weights in BF16, F16 or F32), found "
        "quant_method: the string \"fp8\"");
  CHECK(set_error("quantization_config", nullptr) == "(no error)");
  CHECK(set_error("norm_topk_prob", true) == "field 'norm_topk_prob': expected false, found true");
  CHECK(set_error("moe_layer_freq", 2) == "field 'moe_layer_freq': expected 1, found 2");
  CHECK(set_error("scoring_func", "sigmoid") ==
        "field 'scoring_func': expected \"softmax\", found \"sigmoid\"");
  CHECK(set_error("hidden_act", "gelu") == "field 'hidden_act': expected \"silu\", found \"gelu\"");
  CHECK(set_error("attention_bias", true) == "field 'attention_bias': expected false, found true");
  CHECK(set_error("mlp_bias", true) == "field 'mlp_bias': expected false, found true");
  CHECK(set_error("topk_method", "noaux_tc") ==
        "field 'topk_method': expected \"greedy\" or \"group_limited_greedy\", found "
        "\"noaux_tc\"");
  CHECK(set_error("partial_rotary_factor", 0.5) ==
        "field 'partial_rotary_factor': expected 1, found 0.5");
  CHECK(set_error("num_key_value_heads", 1) ==
        "field 'num_key_value_heads': expected num_attention_heads = 2, found 1");
  CHECK(erase_error("num_key_value_heads") == "(no error)");
}

TEST_CASE("Sizes that are missing or null or not positive are refused") {
  for (const std::string key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
        "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok",
        "max_position_embeddings", "first_k_dense_replace"}) {
    INFO(key);
    const std::string field = "field '" + key + "': expected ";
    CHECK(erase_error(key) == "config.json: " + field + "an integer, found nothing");
    CHECK(set_error(key, nullptr) == field + "an integer, found null");
    CHECK(set_error(key, "7") == field + "an integer, found the string \"7\"");
    CHECK(set_error(key, true) == field + "an integer, found true");
    CHECK(set_error(key, 2.5) == field + "an integer, found the number 2.5");
    CHECK(set_error(key, -1).ends_with(", found -1"));
    if (key != "first_k_dense_replace") CHECK(set_error(key, 0).ends_with(", found 0"));
    CHECK(set_error(key, int64_t{1} << 40).ends_with(", found 1099511627776"));
  }
  CHECK(set_error("hidden_size", 0) == "field 'hidden_size': expected 1 to 1048576, found 0");
  CHECK(set_error("hidden_size", 64.0) == "(no error)");
  CHECK(erase_error("q_lora_rank") ==
        "config.json: field 'q_lora_rank': expected an integer or null, found nothing");
  CHECK(set_error("q_lora_rank", 0) == "field 'q_lora_rank': expected 1 to 1048576, found 0");
  CHECK(erase_error("rms_norm_eps") ==
        "config.json: field 'rms_norm_eps': expected a number, found nothing");
  CHECK(set_error("rms_norm_eps", 0) == "field 'rms_norm_eps': expected above 0, found 0");
  CHECK(erase_error("rope_theta") ==
        "config.json: field 'rope_theta': expected a number, found nothing");
  CHECK(set_error("rope_theta", 1) == "field 'rope_theta': expected above 1, found 1");
  CHECK(set_error("qk_rope_head_dim", 7) ==
        "field 'qk_rope_head_dim': expected an even number, found 7");
  json c = base();
  c["num_attention_heads"] = c["num_key_value_heads"] = 4096;
  c["qk_nope_head_dim"] = 1 << 20;
  CHECK(error_text([&] { parse(c); }) ==
        "config.json: field 'num_attention_heads': expected heads that are at most 2147483647 "
        "wide together, found 4295032832");
}

TEST_CASE("Groups and experts must fit together") {
  json c = base();
  c["topk_method"] = "group_limited_greedy";
  c["n_group"] = 4;
  c["topk_group"] = 2;
  CHECK(parse(c).group_limited);
  CHECK(parse(c).num_groups == 4);
  CHECK(parse(c).topk_group == 2);
  const auto error = [&](const char* key, const json& value) {
    json changed = c;
    changed[key] = value;
    return error_text([&] { parse(changed); });
  };
  CHECK(error("n_group", 3) ==
        "config.json: field 'n_group': expected a divisor of n_routed_experts = 8, found 3");
  CHECK(error("n_group", nullptr) ==
        "config.json: field 'n_group': expected an integer, found null");
  CHECK(error("topk_group", 5) == "config.json: field 'topk_group': expected 1 to 4, found 5");
  CHECK(error("topk_group", 1) ==
        "config.json: field 'num_experts_per_tok': expected at most 2, the experts of topk_group "
        "= 1 groups, found 3");
  CHECK(error("num_experts_per_tok", 9) ==
        "config.json: field 'num_experts_per_tok': expected 1 to 8, found 9");
  // Greedy takes no notice of groups; without a method they would be a guess.
  c["topk_method"] = "greedy";
  CHECK_FALSE(parse(c).group_limited);
  CHECK(parse(c).num_groups == 1);
  c.erase("topk_method");
  CHECK(error_text([&] { parse(c); }) ==
        "config.json: field 'topk_method': expected \"greedy\" or \"group_limited_greedy\", found "
        "nothing");
  c["n_group"] = nullptr;
  CHECK(error_text([&] { parse(c); }) == "(no error)");
}

TEST_CASE("A model of dense layers alone needs no expert fields") {
  json c = base();
  c["first_k_dense_replace"] = 5;
  for (const char* key : {"moe_intermediate_size", "n_routed_experts", "n_shared_experts",
                          "num_experts_per_tok", "routed_scaling_factor", "topk_method"})
    c.erase(key);
  const ModelConfig m = parse(c);
  CHECK_FALSE(m.is_moe(2));
  CHECK(m.num_experts == 0);
}

TEST_CASE("A model of experts alone needs no dense width and shared experts may be absent") {
  json c = base();
  c["first_k_dense_replace"] = 0;
  c.erase("intermediate_size");
  for (const json& none : {json(nullptr), json(0)}) {
    c["n_shared_experts"] = none;
    CHECK(parse(c).num_shared_experts == 0);
  }
  c.erase("n_shared_experts");
  CHECK(parse(c).num_shared_experts == 0);
}

TEST_CASE("A list of layer kinds must agree with first_k_dense_replace") {
  json c = base();
  c["mlp_layer_types"] = {"dense", "sparse", "sparse"};
  CHECK(parse(c).first_k_dense_replace == 1);
  c.erase("first_k_dense_replace");
  CHECK(parse(c).first_k_dense_replace == 1);
  CHECK(set_error("mlp_layer_types", {"dense", "dense", "sparse"}) ==
        "field 'mlp_layer_types': layer 1: expected \"sparse\" (first_k_dense_replace = 1), found "
        "the string \"dense\"");
  CHECK(set_error("mlp_layer_types", {"dense", "sparse"}) ==
        "field 'mlp_layer_types': expected a list of num_hidden_layers = 3, found 2");
  c["mlp_layer_types"] = {"dense", "sparse", "dense"};
  CHECK(error_text([&] { parse(c); }) ==
        "config.json: field 'mlp_layer_types': layer 2: expected \"sparse\" "
        "(first_k_dense_replace = 1), found the string \"dense\"");
}

TEST_CASE("Rope objects of every spelling are read") {
  json c = base();
  c["rope_scaling"]["rope_type"] = "yarn";
  CHECK(parse(c).yarn);
  c["rope_scaling"].erase("type");
  CHECK(parse(c).yarn);
  c["rope_scaling"] = nullptr;
  CHECK_FALSE(parse(c).yarn);
  c.erase("rope_scaling");
  CHECK_FALSE(parse(c).yarn);
  c["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 10000.0}};
  CHECK_FALSE(parse(c).yarn);
  c.erase("rope_theta");
  c["rope_parameters"]["rope_theta"] = 5000;
  CHECK(parse(c).rope_theta == 5000.0);
  c["rope_theta"] = 10000;
  CHECK(error_text([&] { parse(c); }) ==
        "config.json: rope_parameters: field 'rope_theta': expected 10000 as outside of it, found "
        "5000");
  c = base();
  c["rope_parameters"] = {{"rope_type", "default"}};
  CHECK(error_text([&] { parse(c); }) ==
        "config.json: expected rope_scaling or rope_parameters, found both, and they differ");
}

TEST_CASE("Rope objects that are not understood are refused by name") {
  CHECK(set_error("rope_scaling", 3) == "rope_scaling: expected an object, found the number 3");
  CHECK(rope_error("type", "linear") ==
        "rope_scaling: field 'type': expected \"yarn\" or \"default\", found \"linear\"");
  CHECK(rope_error("rope_type", "longrope") ==
        "rope_scaling: field 'type': expected \"longrope\" as in rope_type, found \"yarn\"");
  CHECK(rope_error("type", nullptr) ==
        "rope_scaling: field 'rope_type': expected \"yarn\" or \"default\", found nothing");
  CHECK(rope_error("attention_factor", 1.2) ==
        "rope_scaling: field 'attention_factor': expected no such field for type \"yarn\", found "
        "the number 1.2");
  CHECK(rope_error("type", "default") ==
        "rope_scaling: field 'beta_fast': expected no such field for type \"default\", found the "
        "number 32");
  CHECK(rope_error("factor", nullptr) ==
        "rope_scaling: field 'factor': expected a number, found nothing");
  CHECK(rope_error("factor", 0.5) == "rope_scaling: field 'factor': expected 1 or more, found 0.5");
  CHECK(rope_error("beta_slow", 0) == "rope_scaling: field 'beta_slow': expected above 0, found 0");
  CHECK(rope_error("beta_slow", 64) ==
        "rope_scaling: field 'beta_fast': expected at least beta_slow = 64, found 32");
  CHECK(rope_error("mscale", -1) == "rope_scaling: field 'mscale': expected 0 or more, found -1");
  CHECK(rope_error("truncate", false) ==
        "rope_scaling: field 'truncate': expected true, found false");
  CHECK(rope_error("partial_rotary_factor", 0.5) ==
        "field 'partial_rotary_factor': expected 1, found 0.5");
  CHECK(set_error("original_max_position_embeddings", 64) ==
        "field 'original_max_position_embeddings': expected 4096 as in config.json: rope_scaling, "
        "found 64");
}

TEST_CASE("Numbers that a float does not hold are refused") {
  for (const char* key : {"rms_norm_eps", "routed_scaling_factor"}) {
    CHECK(set_error(key, 1e39) ==
          fmt::format("field '{}': expected a number that a float holds, found 1e+39", key));
    CHECK(set_error(key, 1e-60) ==
          fmt::format("field '{}': expected a number that a float holds, found 1e-60", key));
  }
  // Their product with a logarithm, squared, is what scales the scores.
  CHECK(rope_error("mscale", 1e300) ==
        "rope_scaling: field 'mscale': expected at most 1000000, found 1e+300");
  CHECK(rope_error("mscale_all_dim", 1e300) ==
        "rope_scaling: field 'mscale_all_dim': expected at most 1000000, found 1e+300");
  json rope = base()["rope_scaling"];
  rope["beta_fast"] = rope["beta_slow"] = 1e-320;  // the range began at infinity: NaN frequencies
  CHECK(set_error("rope_scaling", rope) ==
        "rope_scaling: field 'beta_fast': expected at least 1e-06, found 1e-320");
}

TEST_CASE("YaRN without the original context is refused and never filled in") {
  json c = base();
  c["rope_scaling"].erase("original_max_position_embeddings");
  CHECK(error_text([&] { parse(c); }) ==
        "config.json: rope_scaling: field 'original_max_position_embeddings': expected an "
        "integer, found nothing");
}

TEST_CASE("The ends of text of both files are merged") {
  json c = base();
  CHECK(parse(c, R"({"eos_token_id": [7, 1, 3, 7]})").eos_token_ids ==
        std::vector<int32_t>{1, 3, 7});
  CHECK(parse(c, R"({"eos_token_id": 5})").eos_token_ids == std::vector<int32_t>{1, 5});
  CHECK(parse(c, R"({"eos_token_id": null})").eos_token_ids == std::vector<int32_t>{1});
  c["eos_token_id"] = {9, 2};
  CHECK(parse(c).eos_token_ids == std::vector<int32_t>{2, 9});
  c["eos_token_id"] = nullptr;
  c["bos_token_id"] = nullptr;
  CHECK(parse(c).eos_token_ids.empty());
  CHECK(parse(c).bos_token_id == -1);
  CHECK(set_error("eos_token_id", 128) ==
        "field 'eos_token_id': expected a token id from 0 to 127, found the number 128");
  CHECK(set_error("eos_token_id", json::array({-1})) ==
        "field 'eos_token_id': expected a token id from 0 to 127, found the number -1");
  CHECK(error_text([&] { parse(base(), R"({"eos_token_id": "x"})"); }) ==
        "generation_config.json: field 'eos_token_id': expected a token id from 0 to 127, found "
        "the string \"x\"");
  CHECK(error_text([&] { parse(base(), "[]"); }) ==
        "generation_config.json: expected an object, found a list");
}

TEST_CASE("Tied embeddings are served and the dtype keys must agree") {
  json c = base();
  c["tie_word_embeddings"] = true;
  CHECK(parse(c).tie_word_embeddings);
  CHECK(set_error("dtype", "float16") ==
        "field 'dtype': expected \"bfloat16\" as in torch_dtype, found \"float16\"");
  c.erase("torch_dtype");
  CHECK(parse(c).dtype.empty());
  CHECK(parse(c).stored_dtype() == DType::bf16);
  for (const DType dtype : {DType::bf16, DType::f32, DType::f16}) {
    c["dtype"] = std::string(name_of(dtype));
    CHECK(parse(c).stored_dtype() == dtype);
  }
}

TEST_CASE("A config is read from its directory with or without the generation config") {
  const test::TempDir dir;
  CHECK(error_text([&] { load_config(dir.path()); }) ==
        dir / "config.json" + ": No such file or directory");
  test::write_file(dir / "config.json", base().dump());
  CHECK(load_config(dir.path()).eos_token_ids == std::vector<int32_t>{1});
  test::write_file(dir / "generation_config.json", R"({"eos_token_id": 4})");
  CHECK(load_config(dir.path()).eos_token_ids == std::vector<int32_t>{1, 4});
  CHECK(error_text([&] { parse_config(R"({"a":1,"a":2})", ""); }) ==
        "config.json: duplicate key 'a'");
  CHECK(error_text([&] { parse_config("[]", ""); }) ==
        "config.json: expected an object, found a list");
}

}  // namespace
}  // namespace mla::config_test
