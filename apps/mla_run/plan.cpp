// mla-run plan: where the memory would go.
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "apps/mla_run/checkpoint_setup.h"
#include "apps/mla_run/commands.h"
#include "apps/mla_run/options.h"
#include "kernels/cpu/cpu_backend.h"

namespace mla {

Command add_plan(CLI::App& app) {
  struct Flags {
    EngineFlags engine;
    std::string device_memory;
    bool json = false;
  };
  auto flags = std::make_shared<Flags>();
  flags->engine.add_to(app);
  app.add_option("--device-memory", flags->device_memory,
                 "N[KMG]: say whether the plan fits; exit 1 where it does not");
  app.add_flag("--json", flags->json, "Print the plan as JSON");
  return [flags] {
    flags->engine.check_device();
    const ModelConfig config = load_config(flags->engine.model);
    print_warnings(config.warnings);
    const DType dtype = flags->engine.run_dtype(config);
    const auto backend = make_cpu_backend(dtype, 1);
    // Only config.json is read: float32 weights are what a float32 config says.
    const DType stored = config.dtype == "float32" ? DType::f32 : DType::bf16;
    const size_t weights = weight_bytes(config, *backend, stored);
    bool fits = true;
    OrderedJson list = OrderedJson::array();
    for (const bool chunked : flags->engine.modes()) {
      const MemoryPlan plan =
          make_memory_plan(config, flags->engine.engine_options(chunked, dtype), weights);
      list.push_back(to_json(plan));
      list.back()["chunked_prefill"] = chunked ? "on" : "off";
      if (!flags->json) fmt::print("{}", to_text(plan));
      if (flags->device_memory.empty()) continue;
      const uint64_t device = parse_size(flags->device_memory, "--device-memory");
      const bool this_fits = plan.total() <= device;
      fits &= this_fits;
      list.back()["fits"] = this_fits;
      if (!flags->json)
        fmt::print("  {} of {} bytes: {}\n", plan.total(), device,
                   this_fits ? "fits" : "does not fit");
    }
    if (flags->json) fmt::print("{}\n", list.dump(2));
    return fits ? kExitOk : kExitFatal;
  };
}

}  // namespace mla
