// mla-run plan: where the memory would go.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "apps/mla_run/checkpoint_setup.h"
#include "apps/mla_run/commands.h"
#include "apps/mla_run/options.h"
#include "lib/model/shard.h"

namespace mla {

Command add_plan(CLI::App& app) {
  struct Flags {
    EngineFlags engine;
    std::string device_memory;
    bool json = false;
  };
  auto flags = std::make_shared<Flags>();
  flags->engine.add_to(app);
  app.add_option(
      "--device-memory", flags->device_memory,
      "N[KMG]: plan for a GPU of that size; cpu: say whether the plan fits, exit 1 where it "
      "does not");
  app.add_flag("--json", flags->json, "Print the plan as JSON");
  return [flags] {
    const DeviceKind device = choose_device(flags->engine.device);
    const ModelConfig config = load_config(flags->engine.model);
    print_warnings(config.warnings);
    const DType dtype = flags->engine.run_dtype(config);
    const auto backend = make_counting_backend(device, dtype);
    // Only config.json is read: it says how the weights are stored.
    const DType stored = flags->engine.dummy() ? DType::bf16 : config.stored_dtype();
    const int32_t ranks = flags->engine.tensor_parallel;
    check_tensor_parallel(config, ranks);
    const size_t weights = weight_bytes(config, {.size = ranks}, *backend, stored);
    const uint64_t given =
        flags->device_memory.empty() ? 0 : parse_size(flags->device_memory, "--device-memory");
    if (given == 0 && !flags->device_memory.empty())
      usage_fail("--device-memory: expected at least a byte, found {}", flags->device_memory);
    const uint64_t memory = given > 0 ? given : device_memory(device, {.ranks = ranks}).total_bytes;
    bool fits = true;
    OrderedJson list = OrderedJson::array();
    for (const MemoryPlan& plan : make_memory_plans(
             rank_config(config, ranks), flags->engine.engine_options(device, memory, dtype),
             *backend, weights)) {
      list.push_back(to_json(plan));
      list.back()["chunked_prefill"] = plan.chunked ? "on" : "off";
      if (!flags->json) fmt::print("{}", to_text(plan));
      if (given == 0) continue;
      const bool this_fits = plan.total() <= given;
      fits &= this_fits;
      list.back()["fits"] = this_fits;
      if (!flags->json)
        fmt::print("  {} of {} bytes: {}\n", plan.total(), given,
                   this_fits ? "fits" : "does not fit");
    }
    if (flags->json) fmt::print("{}\n", list.dump(2));
    return fits ? kExitOk : kExitFatal;
  };
}

}  // namespace mla
