// The outputs of shards, put back into the order of the input.
#pragma once

#include <string>
#include <vector>

#include "lib/base/json.h"

namespace mla {

struct MergeOptions {
  std::string output;             // a folder
  std::vector<std::string> dirs;  // of the shards, in any order
  bool overwrite = false;
};

struct MergeOutcome {
  int64_t records = 0, failed = 0;
};

// Checks that the folders are the N finished shards of one run, each once, and that every record of
// the input is there once; then writes outputs.jsonl (atomically) and run.json. Throws Error that
// names the folder: a shard that is missing, there twice, not finished, or of another run.
MergeOutcome merge_shards(const MergeOptions& options);

}  // namespace mla
