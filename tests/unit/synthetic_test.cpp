#include "tests/support/synthetic.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "lib/base/error.h"
#include "lib/model/config.h"
#include "lib/model/tensor_table.h"
#include "tests/support/catch.h"
#include "weights_loader/checkpoint.h"

namespace mla::test::synthetic_test {
namespace {

const std::string kRoot = source_path("tests/data/expected");

TEST_CASE("Synthetic weights have the bits that the Python script computes", "[synthetic]") {
  struct Case {
    const char* name;
    std::vector<int64_t> shape;
    uint64_t seed;
    uint16_t bits[4];  // elements 0, 1, 2 and the last
  };
  // weight_bits() of tests/reference/synthetic_weights.py.
  const Case cases[] = {
      {"model.layers.1.mlp.gate.weight", {8, 64}, 1, {0xbe95, 0xbe1f, 0xbe72, 0x3d2b}},
      {"model.layers.1.mlp.gate.weight", {8, 64}, 7, {0x3ec8, 0xbef7, 0x3eae, 0xbeab}},
      {"model.layers.0.self_attn.kv_a_layernorm.weight",
       {512},
       1,
       {0x3f74, 0x3f81, 0x3f8f, 0x3f85}},
      {"model.embed_tokens.weight", {128, 64}, 7, {0x3de1, 0xbe66, 0x3e74, 0x3f05}},
      {"model.layers.0.self_attn.kv_b_proj.weight",
       {512, 512},
       1,
       {0xbd13, 0x3c7b, 0x3c05, 0x3d3e}},
      {"lm_head.weight", {128, 64}, 7, {0xbea6, 0x3ecf, 0xbe3b, 0xbd82}},
  };
  for (const Case& c : cases) {
    INFO(c.name << " seed " << c.seed);
    const std::vector<bf16> all = synthetic_tensor(c.name, c.shape, c.seed);
    const size_t at[] = {0, 1, 2, all.size() - 1};
    for (size_t i = 0; i < 4; ++i) {
      CHECK(all[at[i]].bits == c.bits[i]);
      CHECK(synthetic_weight(c.name, at[i], c.shape, c.seed) == to_f32(bf16{c.bits[i]}));
    }
  }
}

TEST_CASE("A synthetic checkpoint opens and holds the same values in any number of shards",
          "[synthetic]") {
  TempDir dir;
  const std::string config_dir = kRoot + "/odd_groups";
  const std::vector<TensorEntry> table = tensor_table(load_config(config_dir));
  const uint64_t seed = load_expected(kRoot, "odd_groups").seed;
  for (const int shards : {1, 2, 5}) {
    INFO(shards << " shards");
    const std::string out = dir / std::to_string(shards);
    CHECK(write_synthetic_checkpoint(config_dir, out, shards).size() ==
          static_cast<size_t>(shards));
    CHECK(std::filesystem::exists(out + "/model.safetensors.index.json") == (shards > 1));
    CHECK(std::filesystem::exists(out + "/config.json"));
    Checkpoint checkpoint = Checkpoint::open(out);
    std::vector<TensorSpec> specs;
    for (const TensorEntry& entry : table) specs.push_back({entry.name, entry.shape});
    checkpoint.check(specs);
    CHECK(checkpoint.warnings().empty());
    CHECK(checkpoint.num_tensors() == table.size());
    for (const TensorEntry& entry : table) {
      const TensorView view = checkpoint.tensor(entry.name);
      float last = 0.0f;
      view.read_f32(view.elements() - 1, 1, &last);
      CHECK(last == synthetic_weight(entry.name, static_cast<uint64_t>(view.elements() - 1),
                                     entry.shape, seed));
    }
  }
}

TEST_CASE("A synthetic checkpoint of no shard or of more shards than tensors is refused",
          "[synthetic]") {
  TempDir dir;
  CHECK_THROWS_AS(write_synthetic_checkpoint(kRoot + "/odd_tied", dir / "a", 0), Error);
  CHECK_THROWS_AS(write_synthetic_checkpoint(kRoot + "/odd_tied", dir / "b", 100000), Error);
}

TEST_CASE("The expected values cover the variants of the architecture", "[synthetic]") {
  const std::vector<std::string> names = expected_names(kRoot);
  CHECK(names.size() >= 8);
  int lite = 0, yarn = 0, plain = 0, all_dim = 0, no_all_dim = 0, q_lora = 0, groups = 0;
  int one_shared = 0, two_shared = 0, dense_first = 0, dense_none = 0, dense_all = 0;
  int old_form = 0, new_form = 0;
  for (const std::string& name : names) {
    const ModelConfig c = load_config(kRoot + "/" + name);
    lite += c.kv_lora_rank == 512 && c.qk_nope_head_dim == 128 && c.qk_rope_head_dim == 64 &&
            c.v_head_dim == 128;
    (c.yarn ? yarn : plain) += 1;
    if (c.yarn) (c.yarn_config.mscale_all_dim != 0.0 ? all_dim : no_all_dim) += 1;
    q_lora += c.q_lora_rank > 0;
    groups += c.group_limited && c.num_groups > 1;
    one_shared += c.num_shared_experts == 1;
    two_shared += c.num_shared_experts == 2;
    dense_none += c.first_k_dense_replace == 0;
    dense_first += c.first_k_dense_replace == 1;
    dense_all += c.first_k_dense_replace == c.num_layers;
    CHECK(c.dtype == "bfloat16");
    std::ifstream file(kRoot + "/" + name + "/config.json");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    (text.find("rope_parameters") != std::string::npos ? new_form : old_form) += 1;
  }
  CHECK(lite >= 5);
  for (const int count : {yarn, plain, all_dim, no_all_dim, q_lora, groups, one_shared, two_shared,
                          dense_first, dense_none, dense_all, old_form, new_form}) {
    CHECK(count >= 1);
  }
}

}  // namespace
}  // namespace mla::test::synthetic_test
