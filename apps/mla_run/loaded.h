// What is loaded once and serves every run of the process: what run and bench share.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/mla_run/checkpoint_setup.h"
#include "apps/mla_run/options.h"
#include "apps/mla_run/progress.h"
#include "lib/engine/memory_plan.h"
#include "lib/model/model.h"

namespace mla {

struct Loaded {
  ModelConfig config;
  DType dtype;
  DType stored;  // of the weights: what a float32 run keeps
  DeviceKind device;
  DeviceMemory memory;
  std::string fingerprint;
  TextFiles text;
  std::vector<MemoryPlan> plans;  // one a mode
  // Until the weights are loaded; absent with dummy ones. Before the backend, whose threads read
  // it.
  std::optional<Checkpoint> checkpoint;
  std::unique_ptr<Backend> backend;
  ModelWeights weights;
  std::unique_ptr<Model> model;
  double load_seconds = 0, warm_up_seconds = 0;
  std::vector<std::string> warnings;
};

// Opens the checkpoint, makes the backend and plans its memory. What can be refused without weights
// is refused here.
std::unique_ptr<Loaded> prepare(const EngineFlags& flags);

// Loads the weights and, where it is not there yet, the tokenizer, makes the model and warms it up.
// Prints the plans unless `quiet`. Throws Interrupted after a signal.
void load(const EngineFlags& flags, bool quiet, Progress& progress, Loaded& loaded);

}  // namespace mla
