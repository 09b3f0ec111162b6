#include "lib/engine/memory_plan.h"

#include "kernels/comm/comm.h"
#include "kernels/cpu/cpu_backend.h"
#include "lib/base/error.h"
#include "lib/model/shard.h"
#include "lib/model/weights.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/lite_config.h"

namespace mla::memory_plan_test {
namespace {

using test::error_text;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kWeights = 31412968448;  // of V2-Lite

EngineOptions gpu(uint64_t bytes, bool chunked = true) {
  return {.chunked = chunked, .max_seqs = 256, .device_bytes = bytes, .graphs = true};
}

std::vector<MemoryPlan> plans_of(const std::vector<EngineOptions>& options) {
  const auto backend = make_cpu_backend(DType::bf16, 1);
  return make_memory_plans(test::lite_config(), options, *backend, kWeights);
}
MemoryPlan plan_of(const EngineOptions& options) { return plans_of({options}).front(); }

uint64_t bytes_of(const MemoryPlan& plan, const std::string& name) {
  for (const MemoryPlan::Entry& entry : plan.entries)
    if (entry.name == name) return entry.bytes;
  return 0;
}

uint64_t page_bytes() {
  return cache_bytes_per_token(test::lite_config(), DType::bf16) * kPageTokens;
}

TEST_CASE("A CPU's KV cache is 4 GiB unless it is given and has no entries of a GPU") {
  const MemoryPlan plan = plan_of({.max_seqs = 64});
  CHECK(plan.limits.max_model_len == 138048);
  CHECK(bytes_of(plan, "KV blocks") <= 4 * kGiB);
  CHECK(bytes_of(plan, "KV blocks") + page_bytes() > 4 * kGiB);
  CHECK(bytes_of(plan, "CUDA context reserve") == 0);
  CHECK(bytes_of(plan, "graphs") == 0);
  CHECK(plan.note ==
        "max_model_len lowered from 163840 to 138048: the KV cache holds 138048 tokens");
}

TEST_CASE("A pool for all sequences has a page more, with which the last one is admitted") {
  CHECK(plan_of({.max_model_len = 65, .max_seqs = 3}).limits.num_pages == 7);
  CHECK(plan_of({.max_model_len = 65, .max_seqs = 1}).limits.num_pages == 2);
}

TEST_CASE("A GPU's KV cache is what the rest leaves of its share") {
  for (const auto& [chunked, share, prefix_caching] : {std::tuple{false, 0.5, false},
                                                       {false, 0.92, false},
                                                       {true, 0.5, false},
                                                       {true, 0.92, false},
                                                       {false, 0.92, true},
                                                       {true, 0.92, true}}) {
    EngineOptions options = gpu(141 * kGiB, chunked);
    options.gpu_memory_utilization = share;
    options.prefix_caching = prefix_caching;
    const MemoryPlan plan = plan_of(options);
    const auto usable = static_cast<uint64_t>(static_cast<double>(141 * kGiB) * share);
    INFO(to_text(plan));
    CHECK(plan.limits.max_model_len == 163840);
    CHECK(plan.total() <= usable);
    // Nothing is left over but a page and what buffers for more pages would have taken.
    CHECK(plan.total() + (uint64_t{64} << 20) > usable);
    CHECK(bytes_of(plan, "CUDA context reserve") == kContextReserve);
    CHECK(bytes_of(plan, "graphs") == 23 * kGraphReserve);
    CHECK(plan.note.empty());
  }
}

TEST_CASE("A given KV cache is taken on a GPU if the GPU has room for the plan") {
  EngineOptions options = gpu(80 * kGiB);
  options.kv_cache_bytes = 5 * kGiB;
  const MemoryPlan plan = plan_of(options);
  CHECK(bytes_of(plan, "KV blocks") <= 5 * kGiB);
  CHECK(bytes_of(plan, "KV blocks") + page_bytes() > 5 * kGiB);
  options.kv_cache_bytes = 60 * kGiB;
  const std::string text = error_text([&] { plan_of(options); });
  CHECK(text.starts_with("the plan takes "));
  CHECK(text.ends_with("; the GPU has 85899345920"));
}

TEST_CASE("A smaller GPU lowers the model length and says so") {
  const MemoryPlan plan = plan_of(gpu(44 * kGiB, false));
  INFO(to_text(plan));
  CHECK(plan.limits.max_model_len < 163840);
  CHECK(plan.limits.max_model_len > 8192);
  CHECK(plan.limits.max_model_len % kPageTokens == 0);
  CHECK(plan.kv_tokens() >= static_cast<uint64_t>(plan.limits.max_model_len));
  CHECK(plan.note.starts_with("max_model_len lowered from 163840 to "));
  // One page more does not fit.
  EngineOptions more = gpu(44 * kGiB, false);
  more.max_model_len = plan.limits.max_model_len + kPageTokens;
  CHECK_THROWS_AS(plan_of(more), UsageError);
}

TEST_CASE("A GPU that is too small is an error with its numbers") {
  const std::string text = error_text([] { plan_of(gpu(24 * kGiB)); });
  CHECK(
      text.starts_with("a max_model_len of 64 does not fit the GPU: of its 25769803776 bytes "
                       "23708219473 may be used (--gpu-memory-utilization 0.92); weights take "
                       "31412968448, the buffers of a step and CUDA "));
  EngineOptions options = gpu(44 * kGiB, false);
  options.max_model_len = 163840;
  CHECK(error_text([&] {
          plan_of(options);
        }).starts_with("--max-model-len 163840 does not fit the GPU: of its 47244640256 bytes "));
  options.gpu_memory_utilization = 1.5;
  CHECK(error_text([&] { plan_of(options); }) ==
        "--gpu-memory-utilization: expected a number in (0, 1], found 1.5");
}

TEST_CASE("Two modes share a pool that fits the larger buffers of both") {
  const auto backend = make_cpu_backend(DType::bf16, 1);
  const EngineOptions off = gpu(80 * kGiB, false);
  EngineOptions on = gpu(80 * kGiB, true);
  on.max_batched_tokens = 200000;
  on.workspace_tokens = 4096;
  const std::vector<MemoryPlan> both = plans_of({off, on});
  REQUIRE(both.size() == 2);
  const StepLimits all = largest(both);
  CHECK(both[0].limits.num_pages == both[1].limits.num_pages);
  CHECK(both[0].limits.max_model_len == both[1].limits.max_model_len);
  CHECK(all.max_rows == 200000);
  CHECK(all.workspace_rows == both[0].limits.workspace_rows);
  CHECK(all.num_pages < plan_of(off).limits.num_pages);
  CHECK(all.num_pages < plan_of(on).limits.num_pages);
  // The model's buffers, as it allocates them.
  Arena arena;
  PlanBuffers::carve(arena, test::lite_config(), all);
  WorkspaceBuffers::carve(arena, test::lite_config(), all, DType::bf16);
  ActivationBuffers::carve(arena, test::lite_config(), all, DType::bf16);
  const uint64_t total = kWeights + arena.used() + bytes_of(both[0], "RoPE table") +
                         static_cast<uint64_t>(all.num_pages) * page_bytes() + kContextReserve +
                         bytes_of(both[0], "graphs");
  CHECK(total <= static_cast<uint64_t>(static_cast<double>(80 * kGiB) * 0.92));
}

TEST_CASE("A rank's plan has its share of the buffers, what ranks exchange, and their number") {
  const auto backend = make_cpu_backend(DType::bf16, 1);
  EngineOptions options = gpu(80 * kGiB);
  const MemoryPlan one = plan_of(options);
  CHECK(to_json(one).at("tensor_parallel_size") == 1);
  CHECK(bytes_of(one, "NCCL reserve") == 0);
  CHECK(to_text(one).starts_with("memory plan, "));
  for (const int32_t ranks : {2, 4}) {
    options.ranks = ranks;
    const ModelConfig local = rank_config(test::lite_config(), ranks);
    const size_t weights =
        weight_bytes(test::lite_config(), {.size = ranks}, *backend, DType::bf16);
    const MemoryPlan plan = make_memory_plans(local, {options}, *backend, weights).front();
    INFO(to_text(plan));
    CHECK(plan.limits.ranks == ranks);
    CHECK(to_json(plan).at("tensor_parallel_size") == ranks);
    CHECK(to_text(plan).starts_with(fmt::format("memory plan of each of {} ranks, ", ranks)));
    CHECK(bytes_of(plan, "NCCL reserve") == kCommReserve);
    // Embedding, norms, q_a, kv_a and router are whole.
    CHECK(static_cast<double>(weights) * ranks > 1.0 * kWeights);
    CHECK(static_cast<double>(weights) * ranks < 1.06 * kWeights);
    CHECK(plan.kv_tokens() > one.kv_tokens());
    // The buffers of the ranks are counted: without them there is room for less.
    StepLimits alone = plan.limits;
    alone.ranks = 1;
    Arena with, without;
    const ActivationBuffers b = ActivationBuffers::carve(with, local, plan.limits, DType::bf16);
    ActivationBuffers::carve(without, local, alone, DType::bf16);
    CHECK(b.partial == nullptr);  // counted, not there
    const int64_t B = plan.limits.max_rows, H = 2048, S = plan.limits.max_seqs, W = 102400 / ranks;
    const int64_t more = B * H * 2 - B * H * 4 + reduce_scratch(ranks, B * H) * 2 + S * W * 4 +
                         ranks * std::min<int64_t>(S, kGatherRows) * W * 4;
    CHECK(static_cast<int64_t>(with.used()) - static_cast<int64_t>(without.used()) == more);
    CHECK(bytes_of(plan, "activations") == with.used());
  }
}

TEST_CASE("There are as many decode rows as rows, or as splits that they need") {
  CHECK(decode_capacity({.max_rows = 163840, .max_seqs = 1024, .max_decode_splits = 16384}) ==
        17408);
  CHECK(decode_capacity({.max_rows = 8192, .max_seqs = 1024, .max_decode_splits = 16384}) == 8192);
}

TEST_CASE("The decode splits of a step are bounded and hold the longest row") {
  for (const int32_t rows : {1, 17, 8192})
    for (const int32_t len : {2, 256, 257, 163840}) {
      EngineOptions options = gpu(141 * kGiB);
      options.max_batched_tokens = rows;
      options.max_model_len = len;
      const MemoryPlan plan = plan_of(options);
      const int64_t longest = decode_splits(len), splits = plan.limits.max_decode_splits;
      CHECK(splits >= longest);
      CHECK(splits <= rows * longest);
      CHECK((splits == rows * longest || splits >= 16384));
      CHECK(plan.scheduler_options().max_decode_splits == splits);
    }
}

}  // namespace
}  // namespace mla::memory_plan_test
