// Data parallelism: a thread for each engine, requests dealt to the one with the least work.
#pragma once

#include <span>

#include "lib/engine/batch.h"

namespace mla {

// Until the batch ends. Its methods are called on this thread alone.
void run_in_parallel(Batch& batch, std::span<Engine* const> engines);

}  // namespace mla
