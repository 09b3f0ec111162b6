#include "lib/model/tensor_table.h"

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/catch.h"
#include "tests/support/safetensors_writer.h"
#include "weights_loader/checkpoint.h"

namespace mla::tensor_table_test {
namespace {

std::vector<TensorEntry> table_of(const std::string& name) {
  return tensor_table(load_config(test::source_path("tests/data/expected/" + name)));
}

std::map<std::string, TensorEntry> by_name(const std::vector<TensorEntry>& table) {
  std::map<std::string, TensorEntry> map;
  for (const TensorEntry& entry : table) {
    INFO(entry.name);
    CHECK(map.emplace(entry.name, entry).second);
  }
  return map;
}

TEST_CASE("The table of DeepSeek-V2-Lite is the released index and its sizes") {
  if (test::assets().empty()) MLA_SKIP("no assets");
  const std::string dir = test::assets() + "/configs/DeepSeek-V2-Lite";
  const std::vector<TensorEntry> table = tensor_table(load_config(dir));
  CHECK(table.size() == 5291);
  CHECK(total_parameters(table) == 15706484224);
  std::vector<TensorSpec> expected;
  for (const TensorEntry& entry : table) expected.push_back({entry.name, entry.shape});
  const IndexReport report =
      check_index(read_index(dir + "/model.safetensors.index.json"), expected);
  CHECK(report.missing.empty());
  CHECK(report.unexpected.empty());
  CHECK(report.expected_bytes == 31412968448u);
  CHECK(report.total_size == 31412968448u);
  CHECK(report.size_agrees());
}

TEST_CASE("The table of the full DeepSeek-V2 counts its published parameters") {
  if (test::assets().empty()) MLA_SKIP("no assets");
  const auto table = tensor_table(load_config(test::assets() + "/configs/DeepSeek-V2"));
  CHECK(total_parameters(table) == 235741434880);
}

TEST_CASE("A model with a query of full rank has these tensors") {
  const std::vector<TensorEntry> table = table_of("odd_plain");
  CHECK(table.front().name == "model.embed_tokens.weight");
  CHECK(table.back().name == "lm_head.weight");
  const auto map = by_name(table);
  // H 60, N 3, P 24, R 16, V 20, L 40, E 8, I 28, two shared experts, layer 0 dense of width 84.
  const auto check = [&](const std::string& name, std::vector<int64_t> shape, ShardAxis shard) {
    INFO(name);
    REQUIRE(map.contains(name + ".weight"));
    CHECK(map.at(name + ".weight").shape == shape);
    CHECK(map.at(name + ".weight").shard == shard);
  };
  check("model.embed_tokens", {96, 60}, ShardAxis::none);
  check("model.layers.0.input_layernorm", {60}, ShardAxis::none);
  check("model.layers.0.self_attn.q_proj", {120, 60}, ShardAxis::rows);
  check("model.layers.0.self_attn.kv_a_proj_with_mqa", {56, 60}, ShardAxis::none);
  check("model.layers.0.self_attn.kv_a_layernorm", {40}, ShardAxis::none);
  check("model.layers.0.self_attn.kv_b_proj", {132, 40}, ShardAxis::rows);
  check("model.layers.0.self_attn.o_proj", {60, 60}, ShardAxis::columns);
  check("model.layers.0.post_attention_layernorm", {60}, ShardAxis::none);
  check("model.layers.0.mlp.gate_proj", {84, 60}, ShardAxis::rows);
  check("model.layers.0.mlp.up_proj", {84, 60}, ShardAxis::rows);
  check("model.layers.0.mlp.down_proj", {60, 84}, ShardAxis::columns);
  check("model.layers.1.mlp.gate", {8, 60}, ShardAxis::none);
  check("model.layers.1.mlp.experts.0.gate_proj", {28, 60}, ShardAxis::rows);
  check("model.layers.2.mlp.experts.7.up_proj", {28, 60}, ShardAxis::rows);
  check("model.layers.2.mlp.experts.7.down_proj", {60, 28}, ShardAxis::columns);
  check("model.layers.2.mlp.shared_experts.gate_proj", {56, 60}, ShardAxis::rows);
  check("model.layers.2.mlp.shared_experts.down_proj", {60, 56}, ShardAxis::columns);
  check("model.norm", {60}, ShardAxis::none);
  check("lm_head", {96, 60}, ShardAxis::rows);
  // Embedding, head, last norm; 7 a layer outside the mlp; 3 dense; gate, 8·3 and 3 in each MoE.
  CHECK(map.size() == 3 + 3 * 7 + 3 + 2 * (1 + 24 + 3));
}

TEST_CASE("A low-rank query has two projections and a norm between them") {
  const auto map = by_name(table_of("odd_groups"));
  CHECK(map.at("model.layers.0.self_attn.q_a_proj.weight").shape == std::vector<int64_t>{20, 60});
  CHECK(map.at("model.layers.0.self_attn.q_a_proj.weight").shard == ShardAxis::none);
  CHECK(map.at("model.layers.0.self_attn.q_a_layernorm.weight").shape == std::vector<int64_t>{20});
  CHECK(map.at("model.layers.0.self_attn.q_b_proj.weight").shape == std::vector<int64_t>{120, 20});
  CHECK(map.at("model.layers.0.self_attn.q_b_proj.weight").shard == ShardAxis::rows);
  CHECK_FALSE(map.contains("model.layers.0.self_attn.q_proj.weight"));
}

TEST_CASE("Tied embeddings leave no head and dense layers alone leave no experts") {
  CHECK_FALSE(by_name(table_of("odd_tied")).contains("lm_head.weight"));
  for (const TensorEntry& entry : table_of("lite_dense")) {
    INFO(entry.name);
    CHECK(entry.name.find("experts") == std::string::npos);
    CHECK(entry.name.find("mlp.gate.") == std::string::npos);
  }
}

TEST_CASE("A model without shared experts has no tensors for them") {
  ModelConfig c = load_config(test::source_path("tests/data/expected/odd_plain"));
  const int64_t with = total_parameters(tensor_table(c));
  c.num_shared_experts = 0;
  const auto table = tensor_table(c);
  for (const TensorEntry& entry : table)
    CHECK(entry.name.find("shared_experts") == std::string::npos);
  CHECK(with - total_parameters(table) == 2 * 3 * 56 * 60);
}

}  // namespace
}  // namespace mla::tensor_table_test
