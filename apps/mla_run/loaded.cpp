#include "apps/mla_run/loaded.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <numeric>

#include "apps/mla_run/interrupt.h"
#include "lib/base/error.h"
#include "lib/model/model.h"
#include "lib/model/shard.h"
#include "lib/model/tensor_parallel.h"

namespace mla {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kDummySeed = 0;

std::atomic<bool> abandoned{false};

// Other programs may hold a part of the GPU.
void check_free_memory(const Loaded& loaded) {
  if (loaded.memory.total_bytes == 0) return;
  uint64_t most = 0;
  for (const MemoryPlan& plan : loaded.plans) most = std::max(most, plan.total());
  // What is free was asked with CUDA's context in place.
  if (most > loaded.memory.free_bytes + kContextReserve)
    usage_fail(
        "the plan takes {} bytes of the GPU, of which {} are free; lower --gpu-memory-utilization, "
        "or end what holds the rest",
        most - kContextReserve, loaded.memory.free_bytes);
}

}  // namespace

std::unique_ptr<Loaded> prepare(const EngineFlags& flags) {
  auto loaded = std::make_unique<Loaded>();
  loaded->config = load_config(flags.model);
  loaded->dtype = flags.run_dtype(loaded->config);
  loaded->device = choose_device(flags.device);
  const int32_t ranks = flags.tensor_parallel;
  check_tensor_parallel(loaded->config, ranks);
  loaded->memory = device_memory(loaded->device, {.ranks = ranks, .replicas = flags.data_parallel});
  loaded->files = hash_text_files(flags.model);
  loaded->warnings = loaded->config.warnings;
  loaded->stored = DType::bf16;
  if (flags.dummy()) {
    loaded->fingerprint = "dummy";
    loaded->warnings.push_back("--load-format dummy: the weights are random");
  } else {
    loaded->checkpoint = std::make_shared<Checkpoint>(Checkpoint::open(flags.model));
    Checkpoint& checkpoint = *loaded->checkpoint;
    checkpoint.check(tensor_specs(loaded->config));
    loaded->fingerprint = checkpoint.fingerprint();
    loaded->warnings.insert(loaded->warnings.end(), checkpoint.warnings().begin(),
                            checkpoint.warnings().end());
    loaded->stored = widest_dtype(checkpoint, loaded->config);
  }
  print_warnings(loaded->warnings);
  check_dtype(loaded->device, loaded->dtype);
  loaded->backend = flags.devices() > 1 ? make_counting_backend(loaded->device, loaded->dtype)
                                        : make_backend(loaded->device, loaded->dtype,
                                                       flags.run_threads(), !flags.enforce_eager);
  loaded->plans = make_memory_plans(
      rank_config(loaded->config, ranks),
      flags.engine_options(loaded->device, loaded->memory.total_bytes, loaded->dtype),
      *loaded->backend,
      weight_bytes(loaded->config, {.size = ranks}, *loaded->backend, loaded->stored));
  check_free_memory(*loaded);
  return loaded;
}

WorkCounter work_counter(const Loaded& loaded) {
  return {loaded.config, loaded.dtype == DType::f32 ? loaded.stored : DType::bf16, loaded.dtype};
}

bool threads_abandoned() { return abandoned; }

namespace {

// What places a rank's weights on its backend. It owns what it reads.
TensorParallelModel::Load weights_of(const Loaded& loaded) {
  return [config = loaded.config, checkpoint = loaded.checkpoint](Rank rank, Backend& backend,
                                                                  const LoadProgress& progress) {
    return checkpoint ? load_weights(config, rank, backend, tensor_source(*checkpoint), progress)
                      : dummy_weights(config, rank, backend, kDummySeed, progress);
  };
}

std::unique_ptr<ModelRunner> load_single(const StepLimits& limits, const LoadProgress& progress,
                                         Loaded& loaded) {
  loaded.weights = weights_of(loaded)({}, *loaded.backend, progress);
  auto model = std::make_unique<Model>(loaded.config, loaded.weights, *loaded.backend, limits);
  loaded.backend->synchronize();
  return model;
}

// One of the models, on devices of its own.
std::unique_ptr<ModelRunner> load_replica(const EngineFlags& flags, int32_t replica,
                                          const StepLimits& limits, const LoadProgress& progress,
                                          const Loaded& loaded) {
  auto model = std::make_unique<TensorParallelModel>(
      loaded.config,
      TensorParallelModel::Options{
          .size = limits.ranks,
          .make_backend =
              [device = loaded.device, dtype = loaded.dtype, threads = flags.threads_of_each(),
               graphs = !flags.enforce_eager, first = replica * limits.ranks](int32_t rank) {
                return make_backend(device, dtype, threads, graphs, first + rank);
              },
          .make_comm = make_comms(loaded.device, loaded.dtype, limits.ranks, flags.rank_timeout,
                                  !flags.no_custom_all_reduce),
          .timeout_seconds = flags.rank_timeout,
          .join_seconds = std::min(10.0, flags.rank_timeout),
          .abandoned = [] { abandoned = true; }});
  model->load(weights_of(loaded), limits, progress);
  return model;
}

// All of them side by side. `progress` gets the sum, in this thread, and may throw.
void load_replicas(const EngineFlags& flags, const StepLimits& limits, const LoadProgress& progress,
                   Loaded& loaded) {
  const auto count = static_cast<size_t>(flags.data_parallel);
  loaded.models.resize(count);
  std::vector<std::atomic<uint64_t>> bytes(count);
  std::atomic<bool> stopped{false};
  std::mutex mutex;
  std::exception_ptr error;  // the first: others are told to stop
  std::vector<std::future<void>> loads;
  for (size_t i = 0; i < count; ++i)
    loads.push_back(std::async(std::launch::async, [&, i] {
      const LoadProgress mine = [&](uint64_t done) {
        if (stopped) fail("loading was stopped");
        bytes[i] = done;
      };
      try {
        loaded.models[i] = load_replica(flags, static_cast<int32_t>(i), limits, mine, loaded);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        stopped = true;
      }
    }));
  const auto sum = [&] { return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}); };
  try {
    for (const std::future<void>& load : loads)
      while (load.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready)
        progress(sum());
  } catch (...) {
    stopped = true;
    for (std::future<void>& load : loads) load.wait();
    throw;
  }
  for (std::future<void>& load : loads) load.wait();
  if (error) std::rethrow_exception(error);
  progress(sum());
}

// Bytes that all ranks of all models read.
uint64_t bytes_to_read(const Loaded& loaded, int32_t ranks, int32_t replicas) {
  if (ranks * replicas == 1) return loaded.checkpoint->total_bytes();
  uint64_t bytes = 0;
  for (int32_t rank = 0; rank < ranks; ++rank)
    bytes += source_bytes(loaded.config, {.index = rank, .size = ranks},
                          tensor_source(*loaded.checkpoint));
  return bytes * static_cast<uint64_t>(replicas);
}

}  // namespace

void load(const EngineFlags& flags, bool quiet, Progress& progress, Loaded& loaded) {
  const auto start = Clock::now();
  if (!quiet)
    for (const MemoryPlan& plan : loaded.plans) say("{}", to_text(plan));
  if (!loaded.text.tokenizer) loaded.text = load_text_files(flags.model);
  const StepLimits limits = largest(loaded.plans);
  const bool files = loaded.checkpoint != nullptr;
  const uint64_t bytes = files ? bytes_to_read(loaded, limits.ranks, flags.data_parallel) : 0;
  const auto weights_start = Clock::now();
  if (files) progress.loading(bytes);
  const LoadProgress show = [&](uint64_t done) {
    check_interrupt();
    if (files) progress.loaded(done);
  };
  if (flags.devices() > 1) {
    load_replicas(flags, limits, show, loaded);
  } else {
    loaded.models.push_back(load_single(limits, show, loaded));
  }
  if (files) progress.clear();
  const double seconds = seconds_since(weights_start);
  if (files && !quiet)
    say("loaded {} bytes of weights in {:.2f} s ({:.1f} GB/s)\n", bytes, seconds,
        static_cast<double>(bytes) / seconds / 1e9);
  loaded.checkpoint.reset();
  loaded.load_seconds = seconds_since(start);
  const auto warm_up_start = Clock::now();
  for (const auto& model : loaded.models) model->warm_up();
  loaded.warm_up_seconds = seconds_since(warm_up_start);
}

}  // namespace mla
