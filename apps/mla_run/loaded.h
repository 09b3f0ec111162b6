// What is loaded once and serves every run of the process: what run, eval and bench share.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/mla_run/checkpoint_setup.h"
#include "apps/mla_run/options.h"
#include "apps/mla_run/progress.h"
#include "lib/engine/memory_plan.h"
#include "lib/engine/work_count.h"
#include "lib/model/runner.h"

namespace mla {

struct Loaded {
  ModelConfig config;
  DType dtype;
  DType stored;  // of the weights: what a float32 run keeps
  DeviceKind device;
  DeviceMemory memory;
  std::string fingerprint;  // of the weights
  OrderedJson files;        // hash_text_files
  TextFiles text;
  std::vector<MemoryPlan> plans;  // one a mode
  // Until the weights are loaded; null with dummy ones. Before the backend, whose threads read it.
  // Ranks share it.
  std::shared_ptr<Checkpoint> checkpoint;
  std::unique_ptr<Backend> backend;  // of several devices one that only counts: each has its own
  ModelWeights weights;              // of a single device
  std::vector<std::unique_ptr<ModelRunner>> models;  // of data parallelism; at least one
  double load_seconds = 0, warm_up_seconds = 0;
  std::vector<std::string> warnings;
};

// Opens the checkpoint, makes the backend and plans its memory. What can be refused without weights
// is refused here.
std::unique_ptr<Loaded> prepare(const EngineFlags& flags);

// Of the whole model, whatever the ranks.
WorkCounter work_counter(const Loaded& loaded);

// Whether threads of a failed run were left behind: the process has to end without destructors.
bool threads_abandoned();

// Loads the weights and, where it is not there yet, the tokenizer, makes the models and warms them
// up. Prints the plans unless `quiet`. Throws Interrupted after a signal.
void load(const EngineFlags& flags, bool quiet, Progress& progress, Loaded& loaded);

}  // namespace mla
