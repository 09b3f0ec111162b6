// The reference backend: plain loops, fp32 accumulation, OpenMP. The oracle for every other one.
#pragma once

#include <memory>

#include "kernels/ops.h"

namespace mla {

// `threads` >= 1. Throws Error where the processor lacks the instructions this build uses, or for a
// dtype other than bfloat16 and float32.
std::unique_ptr<Backend> make_cpu_backend(DType dtype, int threads);

}  // namespace mla
