#include "lib/model/rope.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/support/catch.h"
#include "tests/support/safetensors_writer.h"

namespace mla::rope_test {
namespace {

ModelConfig expected_config(const std::string& name) {
  return load_config(test::source_path("tests/data/expected/" + name));
}

double worst_relative(const std::vector<float>& found, const std::vector<double>& expected) {
  REQUIRE(found.size() == expected.size());
  double worst = 0.0;
  for (size_t i = 0; i < found.size(); ++i) {
    REQUIRE(std::isfinite(found[i]));
    worst = std::max(worst, std::fabs(found[i] - expected[i]) / std::fabs(expected[i]));
  }
  return worst;
}

TEST_CASE("Frequencies and scales of DeepSeek-V2-Lite are the reference's") {
  if (test::assets().empty()) MLA_SKIP("no assets");
  const std::string dir = test::assets() + "/configs/DeepSeek-V2-Lite";
  const auto reference = nlohmann::json::parse(test::read_whole(dir + "/yarn_reference.json"));
  const ModelConfig c = load_config(dir);
  const auto inv_freq = reference["inv_freq_f64"].get<std::vector<double>>();
  // Rounded once from double: half a unit in the last place.
  CHECK(worst_relative(rope_inv_freq(c), inv_freq) <= 6.0e-8);
  const double scale = reference["softmax_scale"].get<double>();
  CHECK(std::fabs(softmax_scale(c) - scale) <= 1e-6 * scale);
  CHECK(rope_multiplier(c) == 1.0f);
}

struct Case {
  const char* name;
  std::vector<double> inv_freq;
  double multiplier;
  double scale;
};

// DeepseekV2RotaryEmbedding(config).inv_freq and attention_scaling, and yarn_apply_mscale, of
// transformers 5.24.0 (float32) for the configs under tests/data/expected.
std::vector<Case> transformers_cases() {
  return {
      {"odd_plain",
       {1.0, 0.3448488414287567, 0.1189207136631012, 0.04100966826081276, 0.014142136089503765,
        0.004876898601651192, 0.0016817927826195955, 0.0005799642531201243},
       1.0,
       0.15811388300841897},
      {"odd_yarn",
       {1.0, 0.2239946573972702, 0.0416666641831398, 0.0039528473280370235, 0.0012499999720603228,
        0.00039528473280370235, 0.0001250000059371814, 3.9528473280370235e-05},
       0.9465143725909757,
       0.2150957136695623},
      // An original context of 6 positions: the range is [0, 0] and its upper end + 0.001.
      {"odd_tied",
       {1.0, 0.07905694097280502, 0.02500000037252903, 0.007905694656074047, 0.0024999999441206455,
        0.0007905694656074047, 0.0002500000118743628, 7.905694656074047e-05},
       1.0,
       0.19062655316300045},
      {"odd_groups",
       {1.0, 0.19764235615730286, 0.02500000037252903, 0.007905694656074047, 0.0024999999441206455,
        0.0007905694656074047, 0.0002500000118743628, 7.905694656074047e-05},
       1.0,
       0.19062655316300045},
      {"lite_yarn_no_all_dim",
       {1.0,
        0.6958152651786804,
        0.4812344014644623,
        0.33046409487724304,
        0.22500821948051453,
        0.15163110196590424,
        0.10088316351175308,
        0.0660349577665329,
        0.042307689785957336,
        0.026318401098251343,
        0.015680668875575066,
        0.008717763237655163,
        0.004256912507116795,
        0.0014821084914729,
        0.0011114246444776654,
        0.0008334509329870343,
        0.0006249999860301614,
        0.0004686838947236538,
        0.00035146332811564207,
        0.00026356030139140785,
        0.00019764236640185118,
        0.00014821086369920522,
        0.00011114246444776654,
        8.334509038832039e-05,
        6.25000029685907e-05,
        4.6868386561982334e-05,
        3.5146331356372684e-05,
        2.6356030502938665e-05,
        1.9764236640185118e-05,
        1.4821086551819462e-05,
        1.1114246262877714e-05,
        8.33450940262992e-06},
       1.2772588722239782,
       0.07216878364870322},
      {"lite_yarn_one_shared",
       {1.0,
        0.7498942017555237,
        0.5623413324356079,
        0.4216965138912201,
        0.3162277638912201,
        0.23713736236095428,
        0.167568638920784,
        0.11796536296606064,
        0.08269231021404266,
        0.057684168219566345,
        0.04001274332404137,
        0.02757246419787407,
        0.01885204017162323,
        0.012768934480845928,
        0.008549420163035393,
        0.005641821771860123,
        0.003653846215456724,
        0.0023073668126016855,
        0.0014058533124625683,
        0.0010542412055656314,
        0.0007905694656074047,
        0.0005928434547968209,
        0.00044456985779106617,
        0.00033338036155328155,
        0.0002500000118743628,
        0.00018747354624792933,
        0.00014058532542549074,
        0.00010542412201175466,
        7.905694656074047e-05,
        5.928434620727785e-05,
        4.4456985051510856e-05,
        3.333803761051968e-05},
       1.0,
       0.09356516759751214},
  };
}

TEST_CASE("Frequencies and scales of small models are those of transformers") {
  for (const Case& expected : transformers_cases()) {
    INFO(expected.name);
    const ModelConfig c = expected_config(expected.name);
    CHECK(worst_relative(rope_inv_freq(c), expected.inv_freq) <= 1e-6);
    CHECK(std::fabs(rope_multiplier(c) - expected.multiplier) <= 1e-7 * expected.multiplier);
    CHECK(std::fabs(softmax_scale(c) - expected.scale) <= 1e-7 * expected.scale);
  }
}

TEST_CASE("The scale has m squared only where mscale_all_dim is there") {
  ModelConfig c = expected_config("lite_yarn");
  const double plain = 1.0 / std::sqrt(192.0);
  const double m = 0.1 * 0.707 * std::log(40.0) + 1.0;
  CHECK(softmax_scale(c) == static_cast<float>(plain * m * m));
  c.yarn_config.mscale_all_dim = 0.0;
  CHECK(softmax_scale(c) == static_cast<float>(plain));
  CHECK(rope_multiplier(c) == static_cast<float>(0.1 * std::log(40.0) + 1.0));
  c.yarn_config.mscale_all_dim = 0.707;
  c.yarn_config.factor = 1.0;  // no extension: no scale
  CHECK(softmax_scale(c) == static_cast<float>(plain));
  CHECK(rope_multiplier(c) == 1.0f);
  c.yarn = false;
  c.yarn_config.factor = 40.0;
  CHECK(softmax_scale(c) == static_cast<float>(plain));
  CHECK(rope_multiplier(c) == 1.0f);
}

TEST_CASE("A row of the table is cosines and then sines of the float angles") {
  const ModelConfig c = expected_config("odd_yarn");  // a multiplier other than 1
  const std::vector<float> inv_freq = rope_inv_freq(c);
  const float multiplier = rope_multiplier(c);
  const size_t half = inv_freq.size(), R = 2 * half;
  const std::vector<float> table = rope_table(c, 300);
  REQUIRE(table.size() == 300 * R);
  for (size_t i = 0; i < half; ++i) {
    CHECK(table[i] == multiplier);
    CHECK(table[half + i] == 0.0f);
    for (const size_t position : {1u, 299u}) {
      const double angle = static_cast<float>(position) * inv_freq[i];
      CHECK(std::fabs(table[position * R + i] - multiplier * std::cos(angle)) <= 1e-7);
      CHECK(std::fabs(table[position * R + half + i] - multiplier * std::sin(angle)) <= 1e-7);
    }
  }
  CHECK(rope_table(c, 0).empty());
}

}  // namespace
}  // namespace mla::rope_test
