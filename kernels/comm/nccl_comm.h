// Communication of CUDA backends through NCCL, and for few rows over the GPUs' own memory. Plain
// C++: no header of CUDA or NCCL.
#pragma once

#include <memory>

#include "kernels/comm/comm.h"
#include "kernels/ops.h"

namespace mla {

// What the ranks of a group have in common.
class NcclGroup;

// Turns NVLink multicast off, in the environment too. Call it before the ranks' threads are there.
// `fused`: whether to use a fused all-reduce where it is the faster one.
std::shared_ptr<NcclGroup> make_nccl_group(int32_t size, bool fused);

// A rank's end. To be called by each of the ranks in its own thread, with the CUDA backend that it
// has made there: it waits for all of them, without a bound of its own, and measures. The end uses
// the backend's stream and memory: destroy the backend, whose graphs have recorded it, first.
// Throws Error.
std::shared_ptr<Comm> make_nccl_comm(const std::shared_ptr<NcclGroup>& group, int32_t rank,
                                     Backend& backend);

}  // namespace mla
