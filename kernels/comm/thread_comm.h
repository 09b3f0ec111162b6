// Communication of CPU backends in threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "kernels/comm/comm.h"
#include "lib/base/dtype.h"

namespace mla {

// The ends of a group of `size` >= 2 ranks, by rank. A call that other ranks do not join within
// `timeout_seconds` throws Error that names them, and so do all later calls of the group.
std::vector<std::shared_ptr<Comm>> make_thread_comms(int32_t size, DType dtype,
                                                     double timeout_seconds);

}  // namespace mla
