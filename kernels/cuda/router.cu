// Routing of tokens to experts: ids and weights from logits, slots grouped by expert.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

namespace mla::cuda {
namespace {

constexpr int kMaxExperts = 256;
constexpr int kMaxK = 16;

// Keys of one warp: lane i has those of experts i, i + 32, … A key is the bits of a score, which is
// not negative, so that integers compare as the scores do; kTaken is below all.
constexpr int32_t kTaken = -1;

struct Pick {
  int32_t key, expert;
};

// The largest key of the warp, of the lowest expert that has it.
template <int PerLane>
__device__ Pick best_of_warp(const int32_t (&keys)[PerLane], int lane) {
  int32_t key = keys[0], expert = lane;
#pragma unroll
  for (int i = 1; i < PerLane; ++i)
    if (keys[i] > key) key = keys[i], expert = lane + 32 * i;
  const int32_t best = __reduce_max_sync(~0u, key);
  return {best, __reduce_min_sync(~0u, key == best ? expert : kMaxExperts)};
}

constexpr int kRouteThreads = 128;

// One warp a token.
template <int PerLane>
__global__ void __launch_bounds__(kRouteThreads) route_kernel(RouterParams p) {
  begin_kernel();
  const int64_t t = int64_t{blockIdx.x} * (kRouteThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (t >= p.T) return;
  if (p.positions && p.positions[t] < 0) {
    if (lane < p.K) {
      p.ids[t * p.K + lane] = -1;
      p.weights[t * p.K + lane] = 0.0f;
    }
    return;
  }
  float x[PerLane], max = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PerLane; ++i) {
    const int e = lane + 32 * i;
    x[i] = e < p.E ? p.logits[t * p.E + e] : -INFINITY;
    max = fmaxf(max, x[i]);  // passes over NaN
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
#pragma unroll
  for (int i = 0; i < PerLane; ++i) {
    x[i] = lane + 32 * i < p.E ? exp_fast(x[i] - max) : 0.0f;
    sum += x[i];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  // A sum that is NaN makes all scores NaN, of which none is larger than another.
  const bool nan = sum != sum;
  int32_t keys[PerLane];
#pragma unroll
  for (int i = 0; i < PerLane; ++i) {
    const float score = nan ? 1.0f : __fdiv_rn(x[i], sum);
    keys[i] = lane + 32 * i < p.E ? __float_as_int(score) : kTaken;
  }
  if (p.groups > 1) {
    // The best expert outside the kept groups is in the next group to keep; of equals, the lower
    // expert is in the lower group. The scores of the other groups become 0.
    const int size = p.E / p.groups;
    int32_t left[PerLane];
#pragma unroll
    for (int i = 0; i < PerLane; ++i) left[i] = keys[i];
    for (int round = 0; round < p.kept_groups; ++round) {
      const int group = best_of_warp(left, lane).expert / size;
#pragma unroll
      for (int i = 0; i < PerLane; ++i)
        if ((lane + 32 * i) / size == group) left[i] = kTaken;
    }
#pragma unroll
    for (int i = 0; i < PerLane; ++i)
      if (left[i] != kTaken) keys[i] = 0;
  }
  int32_t id = 0;
  float weight = 0.0f;
  for (int k = 0; k < p.K; ++k) {
    const Pick pick = best_of_warp(keys, lane);
#pragma unroll
    for (int i = 0; i < PerLane; ++i)
      if (lane + 32 * i == pick.expert) keys[i] = kTaken;
    if (lane == k) {
      id = pick.expert;
      weight = (nan ? sum : __int_as_float(pick.key)) * p.scaling_factor;
    }
  }
  if (lane < p.K) {
    p.ids[t * p.K + lane] = id;
    p.weights[t * p.K + lane] = weight;
  }
}

constexpr int kPlaceThreads = 512;
constexpr int kPlaceWarps = kPlaceThreads / 32;
constexpr int kMaxRounds = kGroupBlock * kMaxK / kPlaceThreads;

// The slots of the kGroupBlock tokens from t = blockIdx.x · kGroupBlock on go to their groups. A
// warp takes a run of neighbouring slots, 32 a round, so that a slot's rank in its expert is a sum
// over warps before, rounds before and lanes before. Alone (one block has all the tokens): groups
// begin where the counts say, and `begin` is written; otherwise `counts` has where the slots of
// this block begin.
template <bool Alone>
__global__ void __launch_bounds__(kPlaceThreads)
    place_kernel(const int32_t* ids, int64_t T, int E, int K, int width, Grouping grouping) {
  begin_kernel();
  __shared__ int32_t counts[kPlaceWarps * kMaxExperts];  // [warp, E]; then where its slots begin
  __shared__ int32_t sums[kPlaceWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = int64_t{blockIdx.x} * kGroupBlock;
  const int n = static_cast<int>(min(T - first, int64_t{kGroupBlock})) * K;
  const int rounds = (n + kPlaceThreads - 1) / kPlaceThreads;
  const int run = warp * rounds * 32 + lane;

  int32_t id[kMaxRounds], rank[kMaxRounds];
#pragma unroll
  for (int r = 0; r < kMaxRounds; ++r) {
    const int i = run + r * 32;
    id[r] = r < rounds && i < n ? ids[first * K + i] : -1;
  }
  int32_t base = 0;
  if (!Alone && threadIdx.x < E) base = grouping.counts[int64_t{blockIdx.x} * E + threadIdx.x];
  for (int i = lane; i < E; i += 32) counts[warp * E + i] = 0;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kMaxRounds; ++r) {
    if (r >= rounds) break;
    const uint32_t same = __match_any_sync(~0u, id[r]), before = same & ((1u << lane) - 1);
    if (id[r] >= 0) rank[r] = counts[warp * E + id[r]] + __popc(before);
    __syncwarp();
    if (id[r] >= 0 && before == 0) counts[warp * E + id[r]] += __popc(same);
    __syncwarp();
  }
  __syncthreads();

  // Thread e: the expert's slots of the warps before.
  int32_t total = 0;
  if (threadIdx.x < E) {
#pragma unroll
    for (int w = 0; w < kPlaceWarps; ++w) {
      const int32_t count = counts[w * E + threadIdx.x];
      counts[w * E + threadIdx.x] = base + total;
      total += count;
    }
  }
  if (Alone) {
    int32_t sum = total;  // of the experts of this warp up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int32_t begin = sum - total;
    for (int w = 0; w < warp; ++w) begin += sums[w];
    if (threadIdx.x < E) {
      grouping.begin[threadIdx.x] = begin;
      if (threadIdx.x == E - 1) grouping.begin[E] = begin + total;
#pragma unroll
      for (int w = 0; w < kPlaceWarps; ++w) counts[w * E + threadIdx.x] += begin;
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kMaxRounds; ++r) {
    if (r >= rounds) break;
    if (id[r] < 0) continue;
    const int i = run + r * 32;
    grouping.slots[counts[warp * E + id[r]] + rank[r]] =
        static_cast<int32_t>((first + i / K) * width + i % K);
  }
}

// counts [block, E]: slots of each expert in a block of tokens.
__global__ void __launch_bounds__(kPlaceThreads)
    count_kernel(const int32_t* ids, int64_t T, int E, int K, int32_t* counts) {
  begin_kernel();
  __shared__ int32_t count[kMaxExperts];
  const int64_t first = int64_t{blockIdx.x} * kGroupBlock;
  const int n = static_cast<int>(min(T - first, int64_t{kGroupBlock})) * K;
  if (threadIdx.x < E) count[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kPlaceThreads) {
    const int32_t id = ids[first * K + i];
    if (id >= 0) atomicAdd(&count[id], 1);
  }
  __syncthreads();
  if (threadIdx.x < E) counts[int64_t{blockIdx.x} * E + threadIdx.x] = count[threadIdx.x];
}

constexpr int kScanThreads = 1024;

// One block: counts [blocks, E] become where the slots of each block begin in their expert's group.
// Thread (part, e) has a run of blocks of one expert.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(int32_t* counts, int32_t* begin, int blocks, int E) {
  begin_kernel();
  __shared__ int32_t sums[kScanThreads];  // [part, E]
  __shared__ int32_t warp_sums[kMaxExperts / 32];
  const int parts = kScanThreads / E, part = threadIdx.x / E, e = threadIdx.x % E;
  const int each = (blocks + parts - 1) / parts;
  const int from = min(part * each, blocks), to = part < parts ? min(from + each, blocks) : from;
  int32_t sum = 0;
#pragma unroll 8
  for (int b = from; b < to; ++b) sum += counts[int64_t{b} * E + e];
  if (part < parts) sums[part * E + e] = sum;
  __syncthreads();

  // The first threads, one an expert: parts before, then experts before.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t total = 0, running = 0;
  if (threadIdx.x < kMaxExperts) {
    if (threadIdx.x < E)
      for (int i = 0; i < parts; ++i) total += sums[i * E + threadIdx.x];
    running = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, running, step);
      if (lane >= step) running += other;
    }
    if (lane == 31) warp_sums[warp] = running;
  }
  __syncthreads();
  if (threadIdx.x < E) {
    int32_t start = running - total;
    for (int w = 0; w < warp; ++w) start += warp_sums[w];
    begin[threadIdx.x] = start;
    if (threadIdx.x == E - 1) begin[E] = start + total;
    for (int i = 0; i < parts; ++i) {
      const int32_t count = sums[i * E + threadIdx.x];
      sums[i * E + threadIdx.x] = start;
      start += count;
    }
  }
  __syncthreads();
  if (part >= parts) return;
  int32_t start = sums[part * E + e];
#pragma unroll 8
  for (int b = from; b < to; ++b) {
    const int32_t count = counts[int64_t{b} * E + e];
    counts[int64_t{b} * E + e] = start;
    start += count;
  }
}

constexpr int kGatherThreads = 128;
constexpr int kGatherVectors = 8;  // 16-byte loads of a lane in flight

// One warp a row.
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const uint4* x, const int32_t* slots, const int32_t* rows, uint4* to, int vectors,
                  int width, int64_t most) {
  settle_inputs();  // the groups, from which the product behind lists its jobs
  const int64_t i = int64_t{blockIdx.x} * (kGatherThreads / 32) + threadIdx.x / 32;
  if (i >= most || i >= *rows) return;
  const uint4* from = x + int64_t{slots[i] / width} * vectors;
  for (int first = threadIdx.x % 32; first < vectors; first += 32 * kGatherVectors) {
    uint4 part[kGatherVectors];
#pragma unroll
    for (int j = 0; j < kGatherVectors; ++j)
      if (first + 32 * j < vectors) part[j] = from[first + 32 * j];
#pragma unroll
    for (int j = 0; j < kGatherVectors; ++j)
      if (first + 32 * j < vectors) to[i * vectors + first + 32 * j] = part[j];
  }
}

unsigned blocks_for(int64_t n, int64_t each) {
  return static_cast<unsigned>((n + each - 1) / each);
}

}  // namespace

void route(const RouterParams& p, Launch launch) {
  if (p.T == 0) return;
  if (p.E > kMaxExperts || p.K > kMaxK || p.K > p.E)
    fail("CUDA: routing to {} of {} experts: at most {} of {}", p.K, p.E, kMaxK, kMaxExperts);
  const auto kernel = p.E <= 32    ? route_kernel<1>
                      : p.E <= 64  ? route_kernel<2>
                      : p.E <= 128 ? route_kernel<4>
                                   : route_kernel<8>;
  launch_kernel("route", kernel, blocks_for(p.T, kRouteThreads / 32), kRouteThreads, 0,
                launch.stream, p);
}

void group_slots(const ExpertsParams& p, const Grouping& grouping, Launch launch) {
  if (p.T == 0) return;
  if (p.E > kMaxExperts || p.K > kMaxK)
    fail("CUDA: grouping {} of {} experts: at most {} of {}", p.K, p.E, kMaxK, kMaxExperts);
  const int width = p.K + p.S;
  if (p.T * width > std::numeric_limits<int32_t>::max())
    fail("CUDA: {} rows of {} expert slots: more than fit 32 bits", p.T, width);
  if (p.T <= kGroupBlock) {
    launch_kernel("group_slots", place_kernel<true>, 1, kPlaceThreads, 0, launch.stream, p.ids, p.T,
                  p.E, p.K, width, grouping);
    return;
  }
  const unsigned blocks = blocks_for(p.T, kGroupBlock);
  launch_kernel("count_kernel", count_kernel, blocks, kPlaceThreads, 0, launch.stream, p.ids, p.T,
                p.E, p.K, grouping.counts);
  launch_kernel("scan_kernel", scan_kernel, 1, kScanThreads, 0, launch.stream, grouping.counts,
                grouping.begin, static_cast<int>(blocks), p.E);
  launch_kernel("group_slots", place_kernel<false>, blocks, kPlaceThreads, 0, launch.stream, p.ids,
                p.T, p.E, p.K, width, grouping);
}

void gather_rows(const ExpertsParams& p, const Grouping& grouping, void* to, Launch launch) {
  if (p.T == 0) return;
  const int64_t H = p.gate_up.cols;
  if (H % 8 != 0) fail("CUDA: rows of {} values: want a multiple of 8", H);
  launch_kernel("gather_rows", gather_kernel, blocks_for(p.T * p.K, kGatherThreads / 32),
                kGatherThreads, 0, launch.stream, static_cast<const uint4*>(p.x), grouping.slots,
                grouping.begin + p.E, static_cast<uint4*>(to), static_cast<int>(H / 8), p.K + p.S,
                p.T * p.K);
}

}  // namespace mla::cuda
