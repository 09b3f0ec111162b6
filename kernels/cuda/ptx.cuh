// Hopper's instructions that CUDA C++ has no names for: mbarriers, TMA loads, register hand-over.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mla::cuda {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Programmatic dependent launch: with launch_kernel() (launch_kernel.cuh) a kernel may begin while
// those before it on the stream still run. Until wait_for_inputs() it touches nothing that they
// write, and writes nothing at all; every thread calls it, so that no kernel ends before those in
// front of it. start_dependents() says that the next one may begin; called at once by most, as what
// counts is that all blocks of the kernel have a place.
//
// A kernel that settles its inputs, waiting for them before the next one may begin, gives that one
// more to do at once: what was written before the kernel in front of it is there without waiting.
__device__ inline void start_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ inline void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void settle_inputs() {
  wait_for_inputs();
  start_dependents();
}
// First thing in a kernel that has nothing to prepare.
__device__ inline void begin_kernel() {
  start_dependents();
  wait_for_inputs();
}

// A barrier of `arrivals` threads in shared memory; phases alternate 0, 1, 0 …
__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}
// After all barrier_init of a block, by the thread that made them, before __syncthreads().
__device__ inline void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives, and holds the phase back until `bytes` more have been written by TMA.
__device__ inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Returns when the phase of this parity has completed.
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Starts the load of one box; see tensor_map.h for coordinates.
__device__ inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int column,
                                int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(column), "r"(row),
      "r"(matrix)
      : "memory");
}
__device__ inline void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// Shared memory written by ordinary stores is read by wgmma or TMA next: by each writing thread,
// before the barrier.
__device__ inline void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier of `threads` threads of the block; id 0 is __syncthreads'.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int Registers>
__device__ inline void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// A ring of stages: index and parity of the turn.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace mla::cuda
