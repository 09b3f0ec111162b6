// A step planned before the last one is known, and decode steps padded to a few sizes, give what
// plain steps do.
#include <random>

#include "tests/support/catch.h"
#include "tests/support/runner.h"
#include "tests/support/synthetic.h"

namespace mla::test::pipeline_test {
namespace {

// Requests that end early or late, and at a length; with bans, draws and top logprobs.
std::vector<BatchRequest> mixed_requests(const ModelConfig& config) {
  std::mt19937 random(11);
  std::vector<BatchRequest> requests;
  for (int32_t i = 0; i < 40; ++i) {
    BatchRequest request;
    // Most grow into a second page.
    const auto draw = static_cast<int32_t>(random() % 70);
    const int32_t length = i % 3 ? 50 + draw % 14 : 1 + draw;
    for (int32_t t = 0; t < length; ++t)
      request.prompt.push_back(
          static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size)));
    SamplingParams& s = request.sampling;
    s.max_tokens = 1 + i % 23;
    s.ignore_eos = i % 2 == 0;
    if (i % 3) s.temperature = 1.5f;
    // A few of the ids end a request; not before min_tokens.
    for (int32_t id = 0; i % 4 && id < std::min(config.vocab_size, 40); ++id)
      s.stop_token_ids.push_back(id);
    s.min_tokens = std::min(i % 5, *s.max_tokens);
    if (i % 7 == 0) s.logprobs = i % 6;
    requests.push_back(std::move(request));
  }
  return requests;
}

TEST_CASE("Requests that stop are the same with steps planned ahead and with padded steps") {
  TempDir dir;
  for (const std::string name : {"lite_yarn", "odd_groups"}) {
    write_synthetic_checkpoint(source_path("tests/data/expected/" + name), dir / name);
    LoadedModel loaded(dir / name, DType::bf16, 2);
    const std::vector<BatchRequest> requests = mixed_requests(loaded.config);
    const BatchRun reference = run_requests(loaded, {.max_seqs = 1, .seed = 3}, requests);
    int64_t stopped = 0, preempted = 0;
    for (const BatchResult& result : reference.results) stopped += result.finish_reason == "stop";
    CHECK(stopped > 5);
    CHECK(stopped < 35);
    for (const bool chunked : {false, true})
      for (const bool pipelined : {false, true})
        for (const bool graphs : {false, true})
          for (const int32_t pages : {0, 3}) {
            RunOptions options{.chunked = chunked, .max_seqs = 13, .kv_pages = pages, .seed = 3};
            options.pipelined = pipelined;
            options.graphs = graphs;
            if (chunked) options.budget = 33;
            if (pages) options.max_model_len = 128;
            const BatchRun run = run_requests(loaded, options, requests);
            for (size_t i = 0; i < requests.size(); ++i) {
              INFO(name << " chunked " << chunked << " pipelined " << pipelined << " graphs "
                        << graphs << " pages " << pages << " request " << i);
              CHECK(run.results[i] == reference.results[i]);
            }
            preempted += run.stats.preemptions;
          }
    CHECK(preempted > 0);
  }
}

// All decode rows of a step that is padded, and of one that is not, of every number of rows.
TEST_CASE("A padded decode step has the bits of a plain one for every number of rows") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir / "m");
  LoadedModel loaded(dir / "m", DType::bf16, 2);
  const RunOptions options{.max_seqs = 20};
  MemoryPlan plan = plan_for(loaded, options);
  const auto logits = [&](bool graphs, int32_t sequences) {
    plan.limits.graphs = graphs;
    Model model(loaded.config, loaded.weights, *loaded.backend, plan.limits);
    model.warm_up();
    Scheduler scheduler(plan.scheduler_options(), plan.limits.num_pages);
    for (int32_t i = 0; i < sequences; ++i)
      scheduler.add(i, std::vector<int32_t>(static_cast<size_t>(60 + i), 5 + i), 9);
    std::vector<float> all;
    for (int step = 0; step < 8; ++step) {
      const StepPlan next = scheduler.next();
      const StepOutput out = model.step(next, std::vector<RowSampling>(next.samples.size()));
      scheduler.commit(next, out.tokens);
      all.insert(all.end(), out.logprobs.begin(), out.logprobs.end());
      all.insert(all.end(), out.tokens.begin(), out.tokens.end());
    }
    return all;
  };
  for (const int32_t sequences : {1, 2, 3, 4, 5, 8, 9, 17, 20}) {
    INFO(sequences << " sequences");
    CHECK(logits(true, sequences) == logits(false, sequences));
  }
}

TEST_CASE("No more steps are on their way than there is room for") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_plain"), dir / "m");
  LoadedModel loaded(dir / "m", DType::bf16, 1);
  const MemoryPlan plan = plan_for(loaded, {.max_seqs = 2});
  Model model(loaded.config, loaded.weights, *loaded.backend, plan.limits);
  Scheduler scheduler(plan.scheduler_options(), plan.limits.num_pages);
  scheduler.add(0, {1, 2, 3}, 9);
  const StepPlan first = scheduler.next(), second = scheduler.next();
  model.launch(first, std::vector<RowSampling>(1));
  model.launch(second, std::vector<RowSampling>(1));
  CHECK(model.in_flight() == 2);
  CHECK_THROWS_WITH(model.launch(second, std::vector<RowSampling>(1)),
                    "2 steps are on their way already");
  model.collect();
  model.collect();
  CHECK_THROWS_WITH(model.collect(), "no step is on its way");
}

}  // namespace
}  // namespace mla::test::pipeline_test
