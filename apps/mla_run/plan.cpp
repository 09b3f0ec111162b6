// mla-run plan: where the memory would go.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "apps/mla_run/checkpoint_setup.h"
#include "apps/mla_run/commands.h"
#include "apps/mla_run/options.h"
#include "lib/base/error.h"
#include "lib/model/shard.h"

namespace mla {

namespace {

struct PlanFlags {
  EngineFlags engine;
  std::string device_memory;  // "": that of the device
  bool json = false;

  // --device-memory in bytes; 0: not given.
  uint64_t given_memory() const {
    if (device_memory.empty()) return 0;
    const uint64_t bytes = parse_size(device_memory, "--device-memory");
    if (bytes == 0)
      usage_fail("--device-memory: expected at least a byte, found {}", device_memory);
    return bytes;
  }
};

// Only config.json is read: it says how the weights are stored.
std::vector<MemoryPlan> plans_of(const EngineFlags& flags, DeviceKind device, uint64_t given) {
  const ModelConfig config = load_config(flags.model);
  print_warnings(config.warnings);
  const DType dtype = flags.run_dtype(config);
  const auto backend = make_counting_backend(device, dtype);
  const int32_t ranks = flags.tensor_parallel;
  check_tensor_parallel(config, ranks);
  const DType stored = flags.dummy() ? DType::bf16 : config.stored_dtype();
  const size_t weights = weight_bytes(config, {.size = ranks}, *backend, stored);
  const uint64_t memory = given > 0 ? given : device_memory(device, {.ranks = ranks}).total_bytes;
  return make_memory_plans(rank_config(config, ranks), flags.engine_options(device, memory, dtype),
                           *backend, weights);
}

// Whether each plan fits what was given.
bool print_plans(const std::vector<MemoryPlan>& plans, uint64_t given, bool json) {
  bool fits = true;
  OrderedJson list = OrderedJson::array();
  for (const MemoryPlan& plan : plans) {
    list.push_back(to_json(plan));
    list.back()["chunked_prefill"] = mode_name(plan.chunked);
    if (!json) fmt::print("{}", to_text(plan));
    if (given == 0) continue;
    const bool this_fits = plan.total() <= given;
    fits &= this_fits;
    list.back()["fits"] = this_fits;
    if (!json)
      fmt::print("  {} of {} bytes: {}\n", plan.total(), given,
                 this_fits ? "fits" : "does not fit");
  }
  if (json) fmt::print("{}\n", list.dump(2));
  return fits;
}

}  // namespace

Command add_plan(CLI::App& app) {
  auto flags = std::make_shared<PlanFlags>();
  flags->engine.add_to(app);
  app.add_option("--device-memory", flags->device_memory,
                 "N[KMG]: plan for a GPU of that size, which need not be there (in a build with "
                 "CUDA); with --device cpu: say whether the plan fits, exit 1 where it "
                 "does not");
  app.add_flag("--json", flags->json, "Print the plan as JSON");
  return [flags] {
    const uint64_t given = flags->given_memory();
    const std::string& name = flags->engine.device;
    const DeviceKind device = given > 0 ? choose_planned_device(name) : choose_device(name);
    return print_plans(plans_of(flags->engine, device, given), given, flags->json) ? kExitOk
                                                                                   : kExitFatal;
  };
}

}  // namespace mla
