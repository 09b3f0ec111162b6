// What the two sampling kernels share: scan_kernel reads the logits once, in chunks of fixed
// boundaries, makes the edits and leaves greedy rows done; draw_kernel serves the rows of a
// temperature. What a row needs is read from its spec in device memory. A row's bits depend on its
// logits, spec and edits alone: fp32 sums have a fixed shape, and everything whose order is free is
// an integer sum or a maximum.
#pragma once

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

namespace mla::cuda::sampling {

inline constexpr int kMaxRows = kMaxSamples;  // as many arrival counters begin the scratch
inline constexpr int kMaxTop = 32;            // top logprobs of a row: one a lane
inline constexpr int kPerThread = 16;         // logits of a chunk or of a tile that a thread has
inline constexpr int kScanThreads = 256;
inline constexpr int kScanWarps = kScanThreads / 32;
inline constexpr int kChunk = kScanThreads * kPerThread;
inline constexpr int kMaxChunks =
    kChunk / kMaxTop;  // so that the lists of a row's chunks fit a block
static_assert(kMaxChunks * kChunk == kMaxVocab);
inline constexpr int kDrawThreads = 512;
inline constexpr int kDrawWarps = kDrawThreads / 32;
inline constexpr int kTile = kDrawThreads * kPerThread;

// What scan_kernel finds of a chunk.
struct Chunk {
  float max;          // of the raw logits; +infinity also where one is NaN
  float sum;          // of exp(x - max); 0 where max is infinite
  uint32_t best_key;  // order_key of the best logit that may be sampled, and its id
  int32_t best_id;
};
struct Entry {
  uint32_t key;
  int32_t id;
};
// What scan_kernel hands to draw_kernel.
struct alignas(16) RowState {
  double log_sum;
  float max;        // of the raw logits
  float best;       // the best logit that may be sampled
  int32_t best_id;  // -1: there is none, the row is done
};
struct alignas(16) Draw {
  double score;
  int32_t id;  // -1: none
};

struct Scratch {
  int32_t* scan_arrivals;  // [kMaxRows]; both zero between calls, at one place in all calls
  int32_t* draw_arrivals;  // [kMaxRows]
  RowState* states;        // [S]
  Chunk* chunks;           // [S, chunks]
  Draw* draws;             // [S, tiles]
  Entry* tops;             // [S, chunks, kMaxTop]
};

inline int64_t chunks_of(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }
inline int64_t tiles_of(int64_t vocab) { return (vocab + kTile - 1) / kTile; }

// Floats but NaN as integers of the same order; above 0. -0 must have become +0.
__device__ inline uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float key_value(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

// Four neighbouring logits of a row from `id` on, -infinity past the vocabulary; -0 becomes +0, so
// that the two compare equal as integers. `aligned`: rows begin at multiples of 16 bytes.
__device__ inline float4 load_logits(const float* row, int id, int vocab, bool aligned) {
  float4 x = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  if (aligned) {
    if (id < vocab) x = *reinterpret_cast<const float4*>(row + id);
  } else {
    if (id < vocab) x.x = row[id];
    if (id + 1 < vocab) x.y = row[id + 1];
    if (id + 2 < vocab) x.z = row[id + 2];
    if (id + 3 < vocab) x.w = row[id + 3];
  }
  return {x.x + 0.0f, x.y + 0.0f, x.z + 0.0f, x.w + 0.0f};
}

// The id of logit i of this thread, in a chunk or tile that begins at `first`: rounds of a float4 a
// thread.
template <int Threads>
__device__ int id_of(int first, int i) {
  return first + (i / 4 * Threads + static_cast<int>(threadIdx.x)) * 4 + i % 4;
}

template <int Threads>
__device__ void load_part(const float* row, int first, int vocab, bool aligned,
                          float (&x)[kPerThread]) {
#pragma unroll
  for (int i = 0; i < kPerThread; i += 4) {
    const float4 four = load_logits(row, id_of<Threads>(first, i), vocab, aligned);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

// True in all threads of the block that comes last of `blocks`: what the others wrote before is
// then in the L2 cache. `flag` is shared memory. The counter returns to zero.
__device__ inline bool arrive_last(int32_t* counter, int blocks, int* flag) {
  __syncthreads();
  if (blocks == 1) return true;
  if (threadIdx.x == 0) {
    __threadfence();
    const bool last = atomicAdd(counter, 1) == blocks - 1;
    if (last) *counter = 0;
    __threadfence();
    *flag = last;
  }
  __syncthreads();
  return *flag;
}

__device__ inline float logprob(float x, float max, double log_sum) {
  return static_cast<float>(static_cast<double>(x) - static_cast<double>(max) - log_sum);
}

__device__ inline void give(const SampleParams& p, int s, int32_t token, float value) {
  p.tokens[s] = token;
  p.logprobs[s] = value;
  const int32_t slot = p.specs[s].token_slot;
  if (p.sampled && slot >= 0) p.sampled[slot] = max(token, 0);
}

// The logit of a token before its row's edits; `logit` is the one after them. All lanes of a warp,
// with one token.
__device__ inline float raw_logit(const SampleParams& p, const SampleSpec& spec, float logit,
                                  int32_t token) {
  float raw = logit;
  bool found = false;
  for (int e = spec.edit_begin + static_cast<int>(threadIdx.x) % 32; e < spec.edit_end; e += 32) {
    if (__ldcg(&p.edits[e].token) != token) continue;
    raw = __ldcg(&p.edits[e].raw);
    found = true;
  }
  const uint32_t finders = __ballot_sync(~0u, found);
  return finders ? __shfl_sync(~0u, raw, __ffs(static_cast<int>(finders)) - 1) : logit;
}

void launch_scan(const SampleParams& p, const Scratch& scratch, Launch launch);
void launch_draw(const SampleParams& p, const Scratch& scratch, Launch launch);

// Whether rows begin at multiples of 16 bytes.
inline bool rows_aligned(const SampleParams& p) {
  return p.vocab % 4 == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
}

}  // namespace mla::cuda::sampling
