#include "tests/support/runner.h"

#include <numeric>

#include "kernels/comm/thread_comm.h"
#include "kernels/cpu/cpu_backend.h"
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif
#ifdef MLA_WITH_NCCL
#include "kernels/comm/nccl_comm.h"
#endif
#include "lib/base/error.h"
#include "lib/model/shard.h"
#include "lib/model/tensor_table.h"
#include "tests/support/devices.h"

namespace mla::test {

namespace {

std::unique_ptr<Backend> make_backend(BackendKind kind, DType dtype, int threads,
                                      [[maybe_unused]] int32_t rank) {
#ifdef MLA_WITH_CUDA
  if (kind == BackendKind::cuda) return make_cuda_backend({.device = rank});
#endif
  if (kind == BackendKind::cuda) fail("{}", cuda_absence());
  return make_cpu_backend(dtype, threads);
}

using MakeComm = std::function<std::shared_ptr<Comm>(int32_t rank, Backend&)>;

MakeComm make_comms(BackendKind kind, DType dtype, int32_t ranks) {
  if (ranks == 1) return [](int32_t, Backend&) { return std::shared_ptr<Comm>(); };
#ifdef MLA_WITH_NCCL
  if (kind == BackendKind::cuda)
    return [group = make_nccl_group(ranks, true)](int32_t rank, Backend& backend) {
      return make_nccl_comm(group, rank, backend);
    };
#endif
  if (kind == BackendKind::cuda) fail("{}", cuda_ranks_absence(ranks));
  return [comms = make_thread_comms(ranks, dtype, 100)](int32_t rank, Backend&) {
    return comms[static_cast<size_t>(rank)];
  };
}

TensorSource source_of(const Checkpoint& checkpoint) {
  return [&checkpoint](const std::string& name) {
    const TensorView view = checkpoint.tensor(name);
    const int64_t cols = view.shape.back(), rows = view.shape.size() > 1 ? view.shape.front() : 1;
    return HostTensor{view.data, view.dtype, rows, cols, cols};
  };
}

}  // namespace

LoadedModel::LoadedModel(const std::string& dir, DType run_dtype, int num_threads,
                         BackendKind backend_kind, int32_t num_ranks)
    : config(load_config(dir)),
      dtype(run_dtype),
      threads(num_threads),
      kind(backend_kind),
      ranks(num_ranks),
      checkpoint(std::make_shared<Checkpoint>(Checkpoint::open(dir))),
      backend(make_backend(kind, run_dtype, threads, 0)) {
  std::vector<TensorSpec> specs;
  for (const TensorEntry& entry : tensor_table(config)) specs.push_back({entry.name, entry.shape});
  checkpoint->check(specs);
  if (ranks == 1) weights = load_weights(config, {}, *backend, source_of(*checkpoint), nullptr);
}

TensorParallelModel::Options LoadedModel::rank_options() const {
  TensorParallelModel::Options options;
  options.size = ranks;
  options.make_backend = [k = kind, d = dtype, t = threads](int32_t rank) {
    return make_backend(k, d, t, rank);
  };
  options.make_comm = make_comms(kind, dtype, ranks);
  options.timeout_seconds = 100;
  return options;
}

TensorParallelModel::Load LoadedModel::rank_load() const {
  return [whole = config, from = checkpoint](Rank rank, Backend& to, const LoadProgress& progress) {
    return load_weights(whole, rank, to, source_of(*from), progress);
  };
}

std::unique_ptr<ModelRunner> LoadedModel::make_model(const StepLimits& limits) {
  if (ranks == 1) return std::make_unique<Model>(config, weights, *backend, limits);
  auto model = std::make_unique<TensorParallelModel>(config, rank_options());
  model->load(rank_load(), limits, {});
  return model;
}

MemoryPlan plan_for(const LoadedModel& loaded, const RunOptions& options) {
  EngineOptions engine{
      .chunked = options.chunked, .max_seqs = options.max_seqs, .dtype = loaded.dtype};
  if (options.budget) engine.max_batched_tokens = options.budget;
  if (options.workspace_tokens) engine.workspace_tokens = options.workspace_tokens;
  // Buffers and tables for as many tokens as a model takes are long in the making.
  engine.max_model_len =
      options.max_model_len
          ? options.max_model_len
          : static_cast<int32_t>(std::min(loaded.config.max_position_embeddings, kMostTokens));
  const uint64_t page = cache_bytes_per_token(loaded.config, loaded.dtype) * kPageTokens;
  engine.kv_cache_bytes = page * static_cast<uint64_t>(options.kv_pages ? options.kv_pages : 4096);
  engine.graphs = options.graphs;
  engine.prefix_caching = options.prefix_caching;
  engine.ranks = loaded.ranks;
  return make_memory_plans(rank_config(loaded.config, loaded.ranks), {engine}, *loaded.backend, 0)
      .front();
}

LogitsRunner::LogitsRunner(LoadedModel& loaded, const RunOptions& options)
    : loaded_(loaded),
      plan_(plan_for(loaded, options)),
      model_(loaded.config, loaded.weights, *loaded.backend, plan_.limits) {}

void LogitsRunner::run(const std::vector<int32_t>& ids,
                       const std::function<void(int32_t, const float*)>& row,
                       int32_t prompt_tokens) {
  const auto total = static_cast<int32_t>(ids.size());
  if (prompt_tokens < 0 || prompt_tokens > total)
    fail("prompt tokens: expected 0 to {}, found {}", total, prompt_tokens);
  if (prompt_tokens == 0) prompt_tokens = total;
  Scheduler scheduler(plan_.scheduler_options(), plan_.limits.num_pages);
  scheduler.add(0, {ids.begin(), ids.begin() + prompt_tokens}, total - prompt_tokens + 1);
  const size_t vocab = static_cast<size_t>(loaded_.config.vocab_size);
  int32_t position = 0;
  while (position < total) {
    const StepPlan plan = scheduler.next();
    model_.forward(plan);
    for (int32_t first = 0; first < plan.rows(); first += plan_.limits.max_seqs) {
      std::vector<int32_t> rows(
          static_cast<size_t>(std::min(plan_.limits.max_seqs, plan.rows() - first)));
      std::iota(rows.begin(), rows.end(), first);
      const float* logits = model_.logits(rows);
      std::vector<float> host(rows.size() * vocab);
      loaded_.backend->download(host.data(), logits, host.size() * sizeof(float));
      for (size_t r = 0; r < rows.size(); ++r) row(position++, host.data() + r * vocab);
    }
    const int32_t next = position < total ? ids[static_cast<size_t>(position)] : 0;
    scheduler.commit(plan, std::vector<int32_t>(plan.samples.size(), next));
  }
}

std::vector<float> prompt_logprobs(LoadedModel& loaded, const RunOptions& options,
                                   const std::vector<int32_t>& ids) {
  const MemoryPlan plan = plan_for(loaded, options);
  const std::unique_ptr<ModelRunner> model = loaded.make_model(plan.limits);
  const auto vocab = static_cast<size_t>(loaded.config.vocab_size);
  std::vector<float> all(ids.size() * vocab);
  Scheduler scheduler(plan.scheduler_options(), plan.limits.num_pages);
  scheduler.add(0, ids, 1);
  for (size_t position = 0; position < ids.size();) {
    const StepPlan step = scheduler.next();
    model->launch(step, std::vector<RowSampling>(step.samples.size()));
    std::vector<int32_t> rows(static_cast<size_t>(step.rows()));
    std::iota(rows.begin(), rows.end(), 0);
    const auto found =
        model->row_logprobs(rows, std::vector<int32_t>(rows.size()), loaded.config.vocab_size);
    for (size_t i = 0; i < found.top_ids.size(); ++i)
      all[(position + i / vocab) * vocab + static_cast<size_t>(found.top_ids[i])] =
          found.top_logprobs[i];
    position += rows.size();
    scheduler.commit(step, model->collect().tokens);
  }
  return all;
}

BatchRun run_requests(LoadedModel& loaded, const RunOptions& options,
                      const std::vector<BatchRequest>& requests, const std::vector<size_t>& order) {
  const MemoryPlan plan = plan_for(loaded, options);
  const std::unique_ptr<ModelRunner> model = loaded.make_model(plan.limits);
  if (options.graphs) model->warm_up();
  Engine engine(loaded.config, *model, {}, plan, options.seed, options.pipelined);
  BatchRun run;
  run.results.resize(requests.size());
  run.choices.resize(requests.size());
  const Engine::Sink sink = [&](const Engine::Finished& item) {
    if (const auto* bad = std::get_if<BadLine>(&item)) throw Error(bad->message);
    const Result& result = std::get<Result>(item);
    const auto i = result.id.get<size_t>();
    for (const Choice& choice : result.choices) {
      BatchResult& to = run.choices[i].emplace_back(BatchResult{choice.token_ids,
                                                                choice.logprob_hash.hex(),
                                                                choice.finish_reason,
                                                                {},
                                                                result.cached_tokens});
      if (!choice.logprobs) continue;
      for (const TokenLogprob& token : *choice.logprobs)
        to.top.insert(to.top.end(), token.top.begin(), token.top.end());
    }
    run.results[i] = run.choices[i].front();
  };
  size_t place = 0;
  const auto request_at = [&](size_t at) { return order.empty() ? at : order[at]; };
  const auto add_next = [&] {
    const size_t i = request_at(place);
    Request request;
    request.index = static_cast<int64_t>(place++);
    request.line = request.index + 1;
    request.id = i;
    request.prompt = requests[i].prompt;
    request.sampling = requests[i].sampling;
    engine.add(std::move(request), sink);
  };
  // Preemption may compute tokens again, but never without end.
  for (int64_t steps = 0; place < requests.size() || engine.has_work(); ++steps) {
    if (steps > 200000) fail("the batch does not end");
    while (place < requests.size() && requests[request_at(place)].arrival <= steps) add_next();
    engine.step(sink);
  }
  run.stats = engine.scheduler_stats();
  return run;
}

}  // namespace mla::test
