// Tensor-parallel communication: what the ranks of a group do together. A single rank has none (a
// null pointer); kernels/comm/thread_comm.h has that of CPU backends of one process,
// kernels/comm/nccl_comm.h that of GPUs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/ops.h"

namespace mla {

// Elements of a group's all-reduce that are gathered at once where more than two ranks add.
inline constexpr int64_t kReduceChunk = int64_t{1} << 23;

// Elements of scratch, run dtype, that an all-reduce of up to `count` elements needs. A sum of two
// does not depend on their order; more are gathered, so that they can be added in order of ranks.
constexpr int64_t reduce_scratch(int32_t ranks, int64_t count) {
  return ranks <= 2 ? 0 : ranks * std::min(count, kReduceChunk);
}

// One rank's end of the group. It belongs to the thread of the rank, but for abort(), name() and
// calls(). The ranks make the same calls with the same counts. Calls are in order with the ops of
// the rank's backend, and may be recorded by Backend::replay. Every rank gets the same bits, and an
// element's do not depend on the count. Pointers are device pointers.
class Comm {
 public:
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  virtual std::string name() const = 0;  // "threads", "nccl"
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }

  // data [count], run dtype: the sum over ranks, in order of ranks in fp32, rounded once.
  // `scratch`: [reduce_scratch(size, count)]; null where that is 0.
  void all_reduce(void* data, int64_t count, void* scratch) {
    ++calls_;
    reduce(data, count, scratch);
  }
  // all [size, count]: `local` [count] of each rank.
  void all_gather(const float* local, float* all, int64_t count) {
    ++calls_;
    gather(local, all, count);
  }

  // Whether a fused all-reduce, over the devices' own memory, is to serve [rows, H]. The same of
  // every rank; its bits are those of all_reduce.
  virtual bool fuses(int64_t /*rows*/, int64_t /*H*/) const { return false; }
  // Where the partials of a fused call are to be, [rows, H] run dtype. The fused calls of a step
  // are numbered from 0. Two buffers take turns, as other ranks may still read the last call's
  // while the next is filled. So a step makes an even number of calls, two a layer: buffer 0 of the
  // next step has to follow buffer 1 of this one.
  virtual void* fused_partial(int64_t /*turn*/) { return nullptr; }
  // p.residual += the sum of the ranks' partials, then RMSNorm; p's deltas and rows are not looked
  // at.
  void fused_add_norm(int64_t turn, const AddNormParams& p) {
    ++calls_;
    reduce_add_norm(turn, p);
  }
  // sum [rows, H], run dtype, alone.
  void fused_reduce(int64_t turn, void* sum, int64_t rows, int64_t H) {
    ++calls_;
    reduce_rows(turn, sum, rows, H);
  }

  // What was measured when the group was made, for people.
  virtual std::string description() const { return name(); }

  // Ends every call of this rank that waits for others, and lets later ones fail: they throw Error
  // with `why`. From any thread. Never throws.
  virtual void abort(const std::string& why) = 0;

  // Calls that were begun: a rank that waits for nothing else shows with it that it lives.
  uint64_t calls() const { return calls_; }

 protected:
  Comm(int32_t rank, int32_t size) : rank_(rank), size_(size) {}
  virtual void reduce(void* data, int64_t count, void* scratch) = 0;
  virtual void gather(const float* local, float* all, int64_t count) = 0;
  virtual void reduce_add_norm(int64_t /*turn*/, const AddNormParams&) {}
  virtual void reduce_rows(int64_t /*turn*/, void* /*sum*/, int64_t /*rows*/, int64_t /*H*/) {}

 private:
  int32_t rank_, size_;
  std::atomic<uint64_t> calls_{0};
};

}  // namespace mla
