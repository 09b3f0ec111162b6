// mla-run merge -o OUT DIR DIR…
#include <CLI/CLI.hpp>
#include <memory>

#include "apps/mla_run/commands.h"
#include "apps/mla_run/options.h"
#include "lib/batch/merge.h"
#include "lib/batch/output.h"

namespace mla {

Command add_merge(CLI::App& app) {
  auto options = std::make_shared<MergeOptions>();
  auto quiet = std::make_shared<bool>(false);
  app.add_option("DIR", options->dirs, "Folders of the shards, in any order")->required();
  app.add_option("-o,--output", options->output, "Folder for outputs.jsonl and run.json")
      ->required();
  app.add_flag("--overwrite", options->overwrite, "Replace the outputs of an earlier run");
  app.add_flag("--quiet", *quiet, "Say nothing of what was written");
  return [options, quiet] {
    const MergeOutcome outcome = merge_shards(*options);
    if (!*quiet)
      say("wrote {}/{}: {} records, {} failed\n", options->output, kOutputsName, outcome.records,
          outcome.failed);
    return outcome.failed == 0 ? kExitOk : kExitSomeFailed;
  };
}

}  // namespace mla
