// Attention core of the absorbed decode path: O_lat = softmax(q·cacheᵀ·scale)·latent, 16 heads a
// block, persistent over items of work.
//
// Operands are swapped: the 64 cache rows of a page are wgmma's M and the heads its N = 16, so a
// page is read from memory and from shared memory once for all heads. A tile is one page, [64, 576]
// as 9 panels [64, 64] in the 128-byte swizzle: panels 0 to 7 the latent, 8 the rope key.
//   Sᵀ [64 keys, 16] = K [64, 576] · Qᵀ       36 products, K and Q K-major
//   Oᵀ [512, 16] += latentᵀ [512, 64] · Pᵀ     8 × 4 products, the same panels read MN-major
// Softmax runs down the columns. A split of 4 tiles starts fresh; its tiles are taken in order with
// a running max. The maxima are of raw scores q·k: the scale and log2 e enter with the exponent.
// The splits of a group are folded in order, and so are the groups of a row.
//
// An item is a group, whose splits are folded in registers, or a split: the operations are the
// same, and so are the bits. Splits spread better, groups need no partials. With little work all
// items are splits, with much they are groups, but for the last few, which would keep few blocks
// busy. A block takes the next item when it is free. What does not hold a whole row leaves fp32
// partials; the block that arrives last folds them.
//
// Two warpgroups compute, each half of the latent's columns. Each multiplies the scores over its
// part of the 576 columns; the parts are exchanged and added, and both run the softmax. One warp
// more takes the items and streams their pages, and one loads queries.
#include <cuda_bf16.h>

#include <algorithm>
#include <climits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/mla_decode_fold.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace mla::cuda {
namespace {

using namespace decode;

constexpr int kTile = kPageTokens;
constexpr int kSplitTiles = kDecodeSplit / kTile;
constexpr int kPanels = kCacheRow / 64;
constexpr int kRowBytes = 128;  // of a panel
constexpr int kPanelBytes = kTile * kRowBytes;
constexpr int kSlotPanels = 3;  // a tile is 3 slots of the ring, in order
constexpr int kTileSlots = kPanels / kSlotPanels;
constexpr int kSlotBytes = kSlotPanels * kPanelBytes;
constexpr int kSlots = 8;  // 192 KB; a tile may wrap around
constexpr int kTold = 4;   // items on their way to the warp that loads queries
constexpr int kConsumers = kTeams * kTeamThreads;
constexpr int kThreads = kConsumers + 128;  // the last warpgroup has the two that load
constexpr int kTeamBarrier = 1;             // and one for each further team
constexpr int kConsumerBarrier = kTeamBarrier + kTeams;

static_assert(kTile == 64 && kPanels == kTileSlots * kSlotPanels);

struct Args {
  CUtensorMap cache;  // [slots, 576], boxes of 64 rows
  CUtensorMap q_lat;  // [D, N, 512], boxes of 16 heads
  CUtensorMap q_pe;   // [D, N, 64], the same
  const int32_t* page_table;
  const DecodeRow* rows;
  const DecodeSplit* splits;
  const DecodeSplit* groups;
  const int32_t* num_splits;  // splits, groups
  __nv_bfloat16* o_lat;       // [D, N, L]
  float* partial;             // [max_splits, N, L] unnormalised; of a group at its first split
  float2* state;              // [max_splits, N] max of raw scores, sum
  int32_t* arrivals;          // [D], zero between calls
  int32_t* taken;             // [blocks of heads], zero between calls
  int N;
  float scale;  // softmax scale · log2 e
};

// An item: `splits` splits of a row at most, from `split` on.
struct alignas(16) Job {
  int32_t row;  // -1: there are no more
  int32_t split, splits;
  int32_t key_len, split_begin, table_begin;  // the row's
  int32_t grouped;  // of the row's splits, those whose groups are items: the first

  __device__ int keys() const { return key_len - split * kDecodeSplit; }
  __device__ int row_splits() const { return (key_len + kDecodeSplit - 1) / kDecodeSplit; }
  // 0: of padding, which has no keys.
  __device__ int tiles() const { return min(splits * kSplitTiles, (keys() + kTile - 1) / kTile); }
};

// The work of the step: first groups, then splits.
struct Items {
  int groups;          // items that are groups
  int split_distance;  // item i behind them is the step's split i + split_distance
  int count;
  DecodeSplit border;  // the first split of these

  __device__ explicit Items(const Args& a)
      : groups(a.num_splits[1]), split_distance(0), border{INT_MAX, 0} {
    const int blocks = static_cast<int>(gridDim.x), all = groups, rest = all % blocks;
    if (a.num_splits[0] < 2 * blocks) {
      groups = 0;
    } else if (all > blocks && rest * 4 <= blocks) {
      groups -= rest;
    }
    count = groups;
    if (groups == all) return;
    border = groups == 0 ? DecodeSplit{0, 0} : a.groups[groups];
    const int first = groups == 0 ? 0 : a.rows[border.row].split_begin + border.split;
    split_distance = first - groups;
    count += a.num_splits[0] - first;
  }

  __device__ Job job(const Args& a, int item) const {
    const bool group = item < groups;
    const DecodeSplit work = group ? a.groups[item] : a.splits[item + split_distance];
    const DecodeRow row = a.rows[work.row];
    Job job{work.row,        work.split, group ? kDecodeGroup : 1, row.key_len, row.split_begin,
            row.table_begin, 0};
    if (work.row <= border.row)
      job.grouped = work.row < border.row ? job.row_splits() : border.split;
    return job;
  }
};

struct alignas(1024) Shared {
  unsigned char ring[kSlots][kSlotBytes];
  unsigned char q[kPanels][kHeads * kRowBytes];  // [16 heads, 64] K-major
  struct alignas(1024) Team {
    unsigned char p[kHeads * kRowBytes];  // [16 heads, 64 keys] K-major
    float4 tile_max[kHeads];              // of each warp
    float4 sum[kHeads];
  } teams[kTeams];
  float4 parts[kTeams][2][kTeamThreads];  // of the scores, as the threads have them
  uint64_t full[kSlots], empty[kSlots];
  uint64_t q_full, q_empty;
  uint64_t told[kTold], heard[kTold];
  Job jobs[kTold];  // guarded by these
  Job job[2];       // of this item and the next, guarded by q_full and q_empty as q is
  int32_t is_last;
};
// The kernel has no other shared memory, so that it begins at a multiple of 1024 bytes.
static_assert(sizeof(Shared) <= 232448);

__device__ unsigned char* panel(Shared& s, int stage, int index) {
  return s.ring[(stage + index / kSlotPanels) % kSlots] + index % kSlotPanels * kPanelBytes;
}

// By one thread: takes the block's items and loads every tile of them, as far ahead as the ring
// allows. The first tiles do not wait: the product that makes q_lat settles its inputs (ptx.cuh),
// and the rows of the cache were written before it.
__device__ void load_pages(const Args& a, Shared& s, const Items& items) {
  constexpr int kAhead = kSlots / kTileSlots;  // tiles that the empty ring holds
  tma_prefetch(a.cache);
  Ring ring, told;
  const auto tell = [&](const Job& job) {
    barrier_wait(&s.heard[told.stage], told.parity ^ 1);
    s.jobs[told.stage] = job;
    barrier_arrive(&s.told[told.stage]);
    told.next(kTold);
  };
  int32_t* taken = a.taken + blockIdx.y;
  bool first = true;
  // The block's first item has the block's number; `taken` counts the others. A block asks once for
  // each item that it has, so that `count` asks are all.
  for (int item = blockIdx.x, asked = 0; item < items.count; item = gridDim.x + asked) {
    const Job job = items.job(a, item);
    tell(job);
    const int tiles = job.tiles(), ask_at = first ? min(tiles, kAhead) : 0;
    first = false;
    const int32_t* table =
        a.page_table + (int64_t{job.table_begin} + int64_t{job.split} * kSplitTiles);
    int32_t page = tiles > 0 ? table[0] : 0;
#pragma unroll 1
    for (int t = 0; true; ++t) {
      if (t == ask_at) {
        wait_for_inputs();  // the kernel before may be one of these
        asked = atomicAdd(taken, 1);
      }
      if (t == tiles) break;
      const int first_slot = page * kTile;  // row of the cache
      if (t + 1 < tiles) page = table[t + 1];
#pragma unroll 1
      for (int group = 0; group < kTileSlots; ++group) {
        barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        barrier_expect(&s.full[ring.stage], kSlotBytes);
#pragma unroll
        for (int i = 0; i < kSlotPanels; ++i)
          tma_load(s.ring[ring.stage] + i * kPanelBytes, a.cache, &s.full[ring.stage],
                   (group * kSlotPanels + i) * 64, first_slot, 0);
        ring.next(kSlots);
      }
    }
    if (asked == items.count - 1) *taken = 0;  // nobody asks any more
  }
  Job none{};
  none.row = -1;
  tell(none);
}

// By one thread: the query of each item, once the last product with the one before is done.
__device__ void load_queries(const Args& a, Shared& s) {
  tma_prefetch(a.q_lat);
  tma_prefetch(a.q_pe);
  Ring told;
  uint32_t parity = 0;
  const int first_head = blockIdx.y * kHeads;
  wait_for_inputs();
  while (true) {
    barrier_wait(&s.told[told.stage], told.parity);
    const Job job = s.jobs[told.stage];
    barrier_arrive(&s.heard[told.stage]);
    told.next(kTold);
    barrier_wait(&s.q_empty, parity ^ 1);
    s.job[parity] = job;
    parity ^= 1;
    if (job.row < 0) return barrier_arrive(&s.q_full);
    barrier_expect(&s.q_full, sizeof(s.q));
#pragma unroll
    for (int i = 0; i < kLatentPanels; ++i)
      tma_load(s.q[i], a.q_lat, &s.q_full, i * 64, first_head, job.row);
    tma_load(s.q[kLatentPanels], a.q_pe, &s.q_full, 0, first_head, job.row);
  }
}

// The team's part of the scores of the tile at the ring's place, over panels [First, Last), which
// are in whole or partly in some slots.
template <int First, int Last>
__device__ void multiply_scores(Shared& s, Ring ring, float (&scores)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) scores[i] = 0.0f;
  pin(scores);
#pragma unroll
  for (int group = 0; group < kTileSlots; ++group) {
    constexpr auto clamp = [](int x) { return x < First ? First : x > Last ? Last : x; };
    const int begin = clamp(group * kSlotPanels), end = clamp((group + 1) * kSlotPanels);
    if (begin < end) {
      barrier_wait(&s.full[ring.stage], ring.parity);
      wgmma_fence();  // in each group: without it ptxas serialises the products (C7520)
      const uint64_t keys = k_major(s.ring[ring.stage]);
      const uint64_t query = k_major(s.q[group * kSlotPanels]);
#pragma unroll
      for (int i = begin - group * kSlotPanels; i < end - group * kSlotPanels; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<kHeads, Major::k, Major::k>(scores, keys + i * (kPanelBytes >> 4) + k * kStepK,
                                            query + i * (kHeads * kRowBytes >> 4) + k * kStepK, 1);
      wgmma_commit();
    }
    ring.next(kSlots);
  }
  wgmma_wait<0>();
  pin(scores);
}

// The scores of the tile at the ring's place; moves the ring on. They are the sum of the teams'
// parts, in order of the teams. The parts may be written anew behind another barrier of both.
__device__ void make_scores(Shared& s, Ring& ring, float (&scores)[8]) {
  constexpr int kHalf = (kPanels + 1) / 2;
  const int team = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads;
  if (team == 0) {
    multiply_scores<0, kHalf>(s, ring, scores);
  } else {
    multiply_scores<kHalf, kPanels>(s, ring, scores);
  }
#pragma unroll
  for (int group = 0; group < kTileSlots; ++group) ring.next(kSlots);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    s.parts[team][i][thread] =
        make_float4(scores[4 * i], scores[4 * i + 1], scores[4 * i + 2], scores[4 * i + 3]);
  named_barrier(kConsumerBarrier, kConsumers);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 a = s.parts[0][i][thread], b = s.parts[1][i][thread];
    scores[4 * i] = a.x + b.x;
    scores[4 * i + 1] = a.y + b.y;
    scores[4 * i + 2] = a.z + b.z;
    scores[4 * i + 3] = a.w + b.w;
  }
}

// One tile: `visible` of its keys, at least one, are the row's. The last tile of an item gives the
// query's buffer back.
__device__ void attend_tile(Shared& s, Ring& ring, int visible, bool last, float scale,
                            Accumulator& acc) {
  const int team = threadIdx.x / kTeamThreads, warp = threadIdx.x / 32 % kWarps;
  const int thread = threadIdx.x % kTeamThreads, lane = threadIdx.x % 32;
  Shared::Team& own = s.teams[team];
  const int stage = ring.stage;

  float scores[8];
  make_scores(s, ring, scores);
  if (last) {
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.q_empty);
  }

  // Scores of the thread: keys row and row + 8 of its four columns.
  const int row = 16 * warp + lane / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    scores[i] = row + 8 * (i / 2 % 2) < visible ? scores[i] : kMinusInfinity;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = 4 * (j / 2) + j % 2;
    const float warp_max =
        reduce_lanes(fmaxf(scores[i], scores[i + 2]), [](float x, float y) { return fmaxf(x, y); });
    if (lane < 4) (&own.tile_max[column_head(j, lane)].x)[warp] = warp_max;
  }
  // From here on no product reads keys of this tile or P of the one before, and the parts of the
  // scores have been read.
  named_barrier(kConsumerBarrier, kConsumers);

  float factor[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int i = 4 * (j / 2) + j % 2, head = column_head(j, lane);
    const float4 of_warps = own.tile_max[head];
    const float max =
        fmaxf(fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w)), acc.max[j]);
    factor[j] = exp2_fast((acc.max[j] - max) * scale);
    acc.max[j] = max;
    const float offset = -(max * scale);
    const float p0 = exp2_fast(fmaf(scores[i], scale, offset));
    const float p1 = exp2_fast(fmaf(scores[i + 2], scale, offset));
    acc.sum[j] = acc.sum[j] * factor[j] + (p0 + p1);
    // The swizzle exchanges the 16-byte chunks, 8 keys each, of a row by the row's number.
    unsigned char* to = own.p + head * kRowBytes + lane / 4 * 2;
    *reinterpret_cast<__nv_bfloat16*>(to + ((2 * warp) ^ (head % 8)) * 16) =
        __float2bfloat16_rn(p0);
    *reinterpret_cast<__nv_bfloat16*>(to + ((2 * warp + 1) ^ (head % 8)) * 16) =
        __float2bfloat16_rn(p1);
  }
  // Rows past the row's last key may hold anything, and 0·NaN is NaN. A row of a panel is 128
  // contiguous bytes under the swizzle too.
  if (visible < kTile) {
#pragma unroll
    for (int m = 0; m < kTeamPanels; ++m) {
      unsigned char* from = panel(s, stage, team * kTeamPanels + m);
#pragma unroll 1
      for (int at = visible * kRowBytes + thread * 16; at < kPanelBytes; at += kTeamThreads * 16)
        *reinterpret_cast<uint4*>(from + at) = uint4{0, 0, 0, 0};
    }
  }
  fence_async();
#pragma unroll
  for (int m = 0; m < kTeamPanels; ++m)
#pragma unroll
    for (int i = 0; i < 8; ++i) acc.o[m][i] *= factor[2 * (i / 4) + i % 2];
  named_barrier(kTeamBarrier + team, kTeamThreads);

#pragma unroll
  for (int m = 0; m < kTeamPanels; ++m) pin(acc.o[m]);
  wgmma_fence();
  const uint64_t p = k_major(own.p);
  uint64_t values[kTeamPanels];
#pragma unroll
  for (int m = 0; m < kTeamPanels; ++m)
    values[m] = mn_major(panel(s, stage, team * kTeamPanels + m), kPanelBytes);
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
    for (int m = 0; m < kTeamPanels; ++m)
      wgmma<kHeads, Major::mn, Major::k>(acc.o[m], values[m] + k * kStepMn, p + k * kStepK, 1);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < kTeamPanels; ++m) pin(acc.o[m]);
  __syncwarp();
  if (lane < kTileSlots) barrier_arrive(&s.empty[(stage + lane) % kSlots]);
}

// The sums of a split's threads become those of its keys.
__device__ void sum_threads(Shared& s, Accumulator& acc) {
  const int team = threadIdx.x / kTeamThreads, warp = threadIdx.x / 32 % kWarps;
  const int lane = threadIdx.x % 32;
  auto& sum = s.teams[team].sum;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float warp_sum = reduce_lanes(acc.sum[j], [](float x, float y) { return x + y; });
    if (lane < 4) (&sum[column_head(j, lane)].x)[warp] = warp_sum;
  }
  named_barrier(kTeamBarrier + team, kTeamThreads);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 of_warps = sum[column_head(j, lane)];
    acc.sum[j] = of_warps.x + of_warps.y + of_warps.z + of_warps.w;
  }
}

// All tiles of an item, at least one; the row has `keys` keys from its first on.
__device__ void attend_item(Shared& s, Ring& ring, int tiles, int keys, float scale,
                            Accumulator& group) {
  Accumulator acc;
  group.clear();
  acc.clear();
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    const bool last = t + 1 == tiles;
    attend_tile(s, ring, min(kTile, keys - t * kTile), last, scale, acc);
    if (!last && (t + 1) % kSplitTiles != 0) continue;
    sum_threads(s, acc);
    fold(group, acc, scale);
    acc.clear();
  }
}

// Counts the arrival; returns how many came before. What was written before an arrival can be read
// behind a later one.
__device__ int arrive(int32_t* arrivals) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(arrivals)
               : "memory");
  return before;
}

// By the computing warps.
__device__ void attend(const Args& a, Shared& s) {
  const int lane = threadIdx.x % 32;
  const int first_head = blockIdx.y * kHeads, heads = min(kHeads, a.N - first_head);
  Ring ring;
  for (uint32_t parity = 0; true; parity ^= 1) {
    barrier_wait(&s.q_full, parity);
    const Job& job = s.job[parity];  // not kept in registers
    if (job.row < 0) return;
    const int tiles = job.tiles();
    __nv_bfloat16* out = a.o_lat + int64_t{job.row} * a.N * kL;
    if (tiles == 0) {
      __syncwarp();
      if (lane == 0) barrier_arrive(&s.q_empty);
      uint4* to = reinterpret_cast<uint4*>(out + first_head * kL);
      for (int i = threadIdx.x; i < heads * kL / 8; i += kConsumers) to[i] = uint4{0, 0, 0, 0};
      continue;
    }

    Accumulator acc;
    attend_item(s, ring, tiles, job.keys(), a.scale, acc);

    const Partials parts(job.row_splits(), job.grouped);
    if (parts.count == 1) {
      write_output(acc, out + first_head * kL, heads);
      continue;
    }
    const int64_t at = int64_t{job.split_begin + job.split} * a.N + first_head;
    write_partial(acc, a.partial + at * kL, a.state + at, heads);
    named_barrier(kConsumerBarrier, kConsumers);
    // The barrier makes the block's writes this thread's own, whose arrival carries them to the
    // block that arrives last, and there the other way.
    if (threadIdx.x == 0)
      s.is_last = arrive(&a.arrivals[job.row]) + 1 == parts.count * static_cast<int>(gridDim.y);
    named_barrier(kConsumerBarrier, kConsumers);
    if (!s.is_last) continue;
    const int64_t first = int64_t{job.split_begin} * a.N;
    fold_partials(a.partial + first * kL, a.state + first, parts, a.N, a.scale, out);
    if (threadIdx.x == 0) a.arrivals[job.row] = 0;
  }
}

__global__ void __launch_bounds__(kThreads, 1) mla_decode_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  start_dependents();
  // The plan of the step was there before its first kernel.
  const Items items(a);
  if (static_cast<int>(blockIdx.x) >= items.count) return wait_for_inputs();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kTeams * kWarps);
    }
    barrier_init(&s.q_full, 1);
    barrier_init(&s.q_empty, kTeams * kWarps);
    for (int i = 0; i < kTold; ++i) {
      barrier_init(&s.told[i], 1);
      barrier_init(&s.heard[i], 1);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    registers_up<232>();
    wait_for_inputs();
    attend(a, s);
  } else {
    registers_down<40>();
    if (threadIdx.x == kConsumers) {
      load_pages(a, s, items);
    } else if (threadIdx.x == kConsumers + 32) {
      load_queries(a, s);
    } else {
      wait_for_inputs();
    }
  }
}

}  // namespace

void mla_decode(const MlaDecodeParams& p, float* partial, int64_t max_splits, int32_t* arrivals,
                int32_t* taken, Launch launch) {
  if (p.D == 0) return;
  // The params do not say how many slots the cache has; this many are beyond any memory (618 GB),
  // and their stride within TMA's 2^40 bytes.
  constexpr int64_t kMaxSlots = int64_t{1} << 29;
  const __nv_bfloat16* q = static_cast<const __nv_bfloat16*>(p.q);
  const Args args{
      tensor_map(p.cache, kCacheRow, kMaxSlots, 1, kCacheRow, kMaxSlots * kCacheRow, kTile),
      tensor_map(p.q_lat, kL, p.N, p.D, kL, int64_t{p.N} * kL, kHeads),
      tensor_map(q + kP, kR, p.N, p.D, kQK, p.q_stride, kHeads),
      p.page_table,
      p.rows,
      p.splits,
      p.groups,
      p.num_splits,
      static_cast<__nv_bfloat16*>(p.o_lat),
      partial,
      reinterpret_cast<float2*>(partial + max_splits * p.N * kL),
      arrivals,
      taken,
      p.N,
      p.scale * kLog2E};
  const int groups = (p.N + kHeads - 1) / kHeads;
  const dim3 grid(
      static_cast<unsigned>(std::min<int64_t>(max_splits, std::max(1, launch.sms / groups))),
      groups);
  MLA_CUDA_CHECK(cudaFuncSetAttribute(mla_decode_kernel,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  launch_kernel("mla_decode", mla_decode_kernel, grid, kThreads, sizeof(Shared), launch.stream,
                args);
}

}  // namespace mla::cuda
