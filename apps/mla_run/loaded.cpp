#include "apps/mla_run/loaded.h"

#include <algorithm>
#include <chrono>

#include "apps/mla_run/interrupt.h"
#include "lib/base/error.h"

namespace mla {
namespace {

using Clock = std::chrono::steady_clock;

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
  loaded->memory = device_memory(loaded->device);
  loaded->warnings = loaded->config.warnings;
  loaded->stored = DType::bf16;
  if (flags.dummy()) {
    loaded->fingerprint = "dummy";
    loaded->warnings.push_back("--load-format dummy: the weights are random");
  } else {
    Checkpoint& checkpoint = loaded->checkpoint.emplace(Checkpoint::open(flags.model));
    checkpoint.check(tensor_specs(loaded->config));
    loaded->fingerprint = checkpoint.fingerprint();
    loaded->warnings.insert(loaded->warnings.end(), checkpoint.warnings().begin(),
                            checkpoint.warnings().end());
    loaded->stored = widest_dtype(checkpoint, loaded->config);
  }
  print_warnings(loaded->warnings);
  check_dtype(loaded->device, loaded->dtype);
  loaded->backend =
      make_backend(loaded->device, loaded->dtype, flags.run_threads(), !flags.enforce_eager);
  loaded->plans = make_memory_plans(
      loaded->config,
      flags.engine_options(loaded->device, loaded->memory.total_bytes, loaded->dtype),
      *loaded->backend, weight_bytes(loaded->config, *loaded->backend, loaded->stored));
  check_free_memory(*loaded);
  return loaded;
}

void load(const EngineFlags& flags, bool quiet, Progress& progress, Loaded& loaded) {
  const auto start = Clock::now();
  if (!quiet)
    for (const MemoryPlan& plan : loaded.plans) say("{}", to_text(plan));
  if (!loaded.text.tokenizer) loaded.text = load_text_files(flags.model);
  if (loaded.checkpoint) {
    const uint64_t bytes = loaded.checkpoint->total_bytes();
    const auto weights_start = Clock::now();
    progress.loading(bytes);
    loaded.weights = load_weights(loaded.config, *loaded.backend, tensor_source(*loaded.checkpoint),
                                  [&](uint64_t done) {
                                    check_interrupt();
                                    progress.loaded(done);
                                  });
    progress.clear();
    const double seconds = seconds_since(weights_start);
    if (!quiet)
      say("loaded {} bytes of weights in {:.2f} s ({:.1f} GB/s)\n", bytes, seconds,
          static_cast<double>(bytes) / seconds / 1e9);
  } else {
    loaded.weights = dummy_weights(loaded.config, *loaded.backend, 0);
  }
  loaded.checkpoint.reset();
  loaded.model = std::make_unique<Model>(loaded.config, loaded.weights, *loaded.backend,
                                         largest(loaded.plans));
  loaded.backend->synchronize();
  loaded.load_seconds = seconds_since(start);
  const auto warm_up_start = Clock::now();
  loaded.model->warm_up();
  loaded.warm_up_seconds = seconds_since(warm_up_start);
}

}  // namespace mla
