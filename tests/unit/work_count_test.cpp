#include "lib/engine/work_count.h"

#include "lib/engine/workload.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/lite_config.h"

namespace mla::work_count_test {
namespace {

using test::error_text;

bool near(double value, double expected, double share) {
  return std::abs(value - expected) <= share * expected;
}

StepPlan prompts(int32_t count, int32_t length, int32_t context = 0) {
  StepPlan plan;
  for (int32_t i = 0; i < count; ++i) {
    plan.prefill.push_back({i * length, length, context, 0});
    plan.samples.push_back({(i + 1) * length - 1, i, length, i});
  }
  plan.prefill_rows = count * length;
  plan.token_ids.resize(static_cast<size_t>(plan.prefill_rows));
  return plan;
}

StepPlan decodes(int32_t count, int32_t context) {
  StepPlan plan;
  for (int32_t i = 0; i < count; ++i) {
    plan.token_ids.push_back(0);
    plan.decode.push_back({context, 0, 0});
    plan.samples.push_back({i, i, context, i});
  }
  return plan;
}

constexpr DevicePeaks kH200{790e12, 4.3e12};

TEST_CASE("The work of V2-Lite's prompts is that of the design's table") {
  const WorkCounter count(test::lite_config(), DType::bf16, DType::bf16);
  CHECK(near(count.linear_flop(), 4.483e9, 2e-4));
  CHECK(count.prompt_pair_flop() == 27 * 10240);
  CHECK(near(count.logits_flop() / (count.linear_flop() + count.prompt_pair_flop() * 512.5 / 4),
             0.094, 0.02));
  for (const auto& [requests, length, rate] : std::vector<std::tuple<int, int, double>>{
           {16, 1024, 170.8e3}, {1, 16384, 117e3}, {1, 131072, 35.0e3}}) {
    const Work work = count.step(prompts(requests, length));
    CHECK(near(requests * length / limit_seconds(work, kH200), rate, 5e-3));
  }
  // A prompt in two pieces attends as often as in one.
  Work halves = count.step(prompts(1, 512));
  halves += count.step(prompts(1, 512, 512));
  CHECK(near(halves.flop, count.step(prompts(1, 1024)).flop + count.logits_flop(), 1e-12));
}

TEST_CASE("The bytes of V2-Lite's decode steps are those of the design's table") {
  const WorkCounter count(test::lite_config(), DType::bf16, DType::bf16);
  CHECK(count.cache_bytes() == 31104);
  CHECK(near(count.touched_experts(1), 6, 1e-12));
  CHECK(near(count.touched_experts(8), 64 * (1 - std::pow(58.0 / 64, 8)), 1e-12));
  struct Row {
    int32_t batch;
    double gigabytes, short_rate, long_rate;
  };
  for (const Row& row : {Row{1, 4.9, 871, 834}, Row{8, 17.9, 1895, 1726}, Row{32, 29.8, 4471, 3629},
                         Row{64, 30.9, 8345, 5825}, Row{256, 31.0, 28120, 11440}}) {
    INFO(row.batch);
    CHECK(std::abs(count.weight_bytes(row.batch, true) / 1e9 - row.gigabytes) < 0.05);
    const auto rate = [&](int32_t context) {
      return row.batch / limit_seconds(count.step(decodes(row.batch, context)), kH200);
    };
    CHECK(near(rate(1024), row.short_rate, 1e-3));
    CHECK(near(rate(8192), row.long_rate, 1e-3));
  }
  CHECK(near(1024 / limit_seconds(count.step(decodes(1024, 1024)), kH200), 69224, 1e-3));
  // All experts, all weights: what the checkpoint has but for the embedding and the norms.
  CHECK(near(count.weight_bytes(1e6, true), 31412968448.0 - 2.0 * 102400 * 2048, 1e-4));
}

TEST_CASE("Widths, other models and unknown peaks are counted as they are") {
  const WorkCounter narrow(test::lite_config(), DType::bf16, DType::bf16),
      wide(test::lite_config(), DType::f32, DType::f32);
  CHECK(wide.weight_bytes(3, true) == 2 * narrow.weight_bytes(3, true));
  CHECK(wide.cache_bytes() == 2 * narrow.cache_bytes());
  CHECK(narrow.generated_pair_flop() == 27.0 * 2 * 16 * (2 * 512 + 64));
  CHECK(narrow.weight_bytes(3, false) == narrow.weight_bytes(3, true) - 2.0 * 102400 * 2048);
  CHECK(narrow.step({}).flop == 0);
  CHECK(narrow.step({}).bytes == 0);
  CHECK(limit_seconds({1e12, 1e12}, {}) == 0);
  CHECK(limit_seconds({2e12, 1e9}, {1e12, 1e9}) == 2);
  CHECK(limit_seconds({1e12, 3e9}, {1e12, 1e9}) == 3);
  ModelConfig low_rank = test::lite_config();
  low_rank.q_lora_rank = 1536;
  const double q = 2048.0 * 3072, ab = 1536.0 * (2048 + 3072);
  CHECK(near(WorkCounter(low_rank, DType::bf16, DType::bf16).linear_flop() - narrow.linear_flop(),
             27 * 2 * (ab - q), 1e-9));
  ModelConfig dense = test::lite_config();
  dense.first_k_dense_replace = 27;
  dense.num_experts = dense.num_experts_per_tok = dense.num_shared_experts = 0;
  const WorkCounter plain(dense, DType::bf16, DType::bf16);
  CHECK(plain.touched_experts(5) == 0);
  CHECK(plain.weight_bytes(1, true) == plain.weight_bytes(1000, true));
}

TEST_CASE("A workload reads back from its name and what is none is refused") {
  for (const char* name : {"prefill:16x1024", "decode:64x1024x64", "mixed:256x512x128"})
    CHECK(parse_workload(name).name() == name);
  const Workload decode = parse_workload("decode:64x1000x32");
  CHECK(decode.kind == WorkloadKind::decode);
  CHECK(decode.prompts == 64);
  CHECK(decode.input_len == 1000);
  CHECK(decode.output_len == 32);
  CHECK(decode.model_len() == 1033);  // a token comes with the prompt
  CHECK(parse_workload("prefill:2x30").model_len() == 31);
  CHECK(parse_workload("mixed:2x30x5").model_len() == 35);
  for (const char* wrong :
       {"", "decode", "decode:", "decode:1", "decode:1x2", "decode:1x2x", "decode:1x2x3x4",
        "decode:0x2x3", "decode:1x-2x3", "decode:1x2x3 ", "prefill:1x2x3", "prefill:1,2",
        "mixed:1x2", "mixed:1x2x99999999999", "other:1x2x3", "1x2x3"}) {
    const std::string message = error_text([&] { parse_workload(wrong); });
    INFO(wrong << ": " << message);
    CHECK(message.find(std::string("'") + wrong + "': expected") != std::string::npos);
  }
}

TEST_CASE("A plan that is too small for a workload is told with the size that it lacks") {
  MemoryPlan plan;
  plan.limits = {.max_rows = 512,
                 .max_seqs = 8,
                 .max_model_len = 160,
                 .workspace_rows = 512,
                 .num_pages = 25,
                 .max_decode_splits = 8};
  const auto message = [&](const char* name) {
    return error_text([&] { check_fits(parse_workload(name), plan); });
  };
  check_fits(parse_workload("decode:8x120x39"), plan);
  check_fits(parse_workload("mixed:99x120x40"), plan);
  CHECK(message("mixed:1x120x41")
            .find("max_model_len of 161 (120 prompt tokens and 41 generated), "
                  "found 160") != std::string::npos);
  CHECK(message("decode:9x10x10").find("max_num_seqs of 9, found 8") != std::string::npos);
  plan.limits.num_pages = 24;
  CHECK(message("decode:8x129x20").find("25 KV pages") != std::string::npos);
  check_fits(parse_workload("decode:8x120x39"), plan);
  plan.limits.num_pages = 2;
  CHECK(message("prefill:1x150").find("3 KV pages") != std::string::npos);
  plan.limits = {.max_rows = 512, .max_seqs = 8, .max_model_len = 600, .num_pages = 100};
  plan.limits.max_decode_splits = 15;
  CHECK(message("decode:8x300x10").find("16 decode splits") != std::string::npos);
}

}  // namespace
}  // namespace mla::work_count_test
