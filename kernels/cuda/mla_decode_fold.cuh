// What a thread of the decode kernel holds of a row, where it leaves it, and how splits and groups
// are folded: in registers or from partials the same operations in the same order, so that the bits
// do not depend on who does it.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

namespace mla::cuda::decode {

inline constexpr int kHeads = 16;  // of a block; heads past N are zero
inline constexpr int kTeams = 2;   // warpgroups that compute, each its part of the latent's columns
inline constexpr int kWarps = 4;   // of a team
inline constexpr int kTeamThreads = kWarps * 32;
inline constexpr int kLatentPanels = kL / 64;  // of 64 columns
inline constexpr int kTeamPanels = kLatentPanels / kTeams;
inline constexpr int kFoldBatch = 3;  // partials in flight together, of two heads
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

static_assert(kL % (64 * kTeams) == 0);

// A thread's part of a running softmax. Column j of 4 is head column_head(j, lane) of the block.
struct Accumulator {
  float max[4];             // of all keys so far
  float sum[4];             // of this thread's keys until the split ends, then of all
  float o[kTeamPanels][8];  // of the team's latent columns

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      max[j] = kMinusInfinity;
      sum[j] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kTeamPanels; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) o[m][i] = 0.0f;
  }
};

__device__ inline int column_head(int j, int lane) { return 8 * (j / 2) + 2 * (lane % 4) + j % 2; }

// Over the lanes that share their columns: all get the result.
template <class Op>
__device__ float reduce_lanes(float x, Op op) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// A fold's factors of what is there and of what joins it. From nothing they are 2^-inf = 0 and
// 2^0 = 1.
struct FoldStep {
  float old_factor, new_factor;

  __device__ FoldStep(float& max, float& sum, float next_max, float next_sum, float scale) {
    const float new_max = fmaxf(max, next_max);
    old_factor = exp2_fast((max - new_max) * scale);
    new_factor = exp2_fast((next_max - new_max) * scale);
    max = new_max;
    sum = sum * old_factor + next_sum * new_factor;
  }
  __device__ float operator()(float o, float next) const {
    return fmaf(new_factor, next, o * old_factor);
  }
};

// `split` joins the group, unnormalised.
__device__ inline void fold(Accumulator& group, const Accumulator& split, float scale) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const FoldStep step(group.max[j], group.sum[j], split.max[j], split.sum[j], scale);
#pragma unroll
    for (int m = 0; m < kTeamPanels; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * (j / 2) + 2 * half + j % 2;
        group.o[m][i] = step(group.o[m][i], split.o[m][i]);
      }
  }
}

// First latent column of the thread's team.
__device__ inline int team_column() { return threadIdx.x / kTeamThreads * kTeamPanels * 64; }

// O_lat [heads, L] of a row with a single item, from the accumulators. Lanes 4 apart hold
// neighbours in L: they exchange one column of a pair so that each stores two bf16 of one head.
__device__ inline void write_output(const Accumulator& acc, __nv_bfloat16* to, int heads) {
  const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32, odd = lane / 4 % 2;
  float inverse[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) inverse[j] = 1.0f / acc.sum[j];
  const int first_head = 2 * (lane % 4) + odd;
  to += first_head * kL + team_column() + 16 * warp + (lane / 4 - odd);
#pragma unroll
  for (int m = 0; m < kTeamPanels; ++m)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int pair = i / 4;
      const float x = acc.o[m][i] * inverse[2 * pair], y = acc.o[m][i + 1] * inverse[2 * pair + 1];
      const float other = __shfl_xor_sync(~0u, odd ? x : y, 4);
      const uint32_t packed = odd ? pack_bf16(other, y) : pack_bf16(x, other);
      if (first_head + 8 * pair < heads)
        *reinterpret_cast<uint32_t*>(to + 8 * pair * kL + 64 * m + 8 * (i / 2 % 2)) = packed;
    }
}

// The same unnormalised, [heads, L] fp32, and the max and sum of each head. 8 lanes store one
// 32-byte sector.
__device__ inline void write_partial(const Accumulator& acc, float* to, float2* state, int heads) {
  const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32;
  to += 2 * (lane % 4) * kL + team_column() + 16 * warp + lane / 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int head = column_head(j, lane);
    if (head >= heads) continue;
    if (threadIdx.x < 4) state[head] = float2{acc.max[j], acc.sum[j]};
#pragma unroll
    for (int m = 0; m < kTeamPanels; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[(8 * (j / 2) + j % 2) * kL + 64 * m + 8 * half] =
            acc.o[m][4 * (j / 2) + 2 * half + j % 2];
  }
}

// What a row leaves behind: a partial of each group of its first `grouped` splits, then one of each
// split.
struct Partials {
  int grouped, groups, count;

  __device__ Partials(int splits, int grouped)
      : grouped(grouped),
        groups((grouped + kDecodeGroup - 1) / kDecodeGroup),
        count(groups + splits - grouped) {}
  // Its split, or the first of its group.
  __device__ int split(int i) const { return i < groups ? i * kDecodeGroup : grouped + i - groups; }
  __device__ bool ends_group(int i) const {
    return i < groups || i + 1 == count || (split(i) + 1) % kDecodeGroup == 0;
  }
};

// A head's part of a lane, four float4 128 floats apart, while a row's partials are folded.
struct HeadFold {
  static constexpr int kParts = kL / 128;
  float group_max = kMinusInfinity, group_sum = 0.0f, max = kMinusInfinity, sum = 0.0f;
  float group[kParts][4] = {}, o[kParts][4] = {};

  __device__ void add(float2 state, const float4 (&values)[kParts], float scale) {
    const FoldStep step(group_max, group_sum, state.x, state.y, scale);
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      group[c][0] = step(group[c][0], values[c].x);
      group[c][1] = step(group[c][1], values[c].y);
      group[c][2] = step(group[c][2], values[c].z);
      group[c][3] = step(group[c][3], values[c].w);
    }
  }
  __device__ void end_group(float scale) {
    const FoldStep join(max, sum, group_max, group_sum, scale);
    group_max = kMinusInfinity;
    group_sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kParts; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        o[c][e] = join(o[c][e], group[c][e]);
        group[c][e] = 0.0f;
      }
  }
  __device__ void write(__nv_bfloat16* to) const {
    const float inverse = 1.0f / sum;
#pragma unroll
    for (int c = 0; c < kParts; ++c)
      *reinterpret_cast<uint2*>(to + c * 128) =
          uint2{pack_bf16(o[c][0] * inverse, o[c][1] * inverse),
                pack_bf16(o[c][2] * inverse, o[c][3] * inverse)};
  }
};

// O_lat [N, L] of a row from its partials, in order, whoever does it. A warp takes every eighth
// head, two at a time. Reads pass by the L1 cache, which other blocks' writes do not reach.
__device__ inline void fold_partials(const float* partial, const float2* state,
                                     const Partials& parts, int N, float scale, __nv_bfloat16* to) {
  constexpr int kStep = kTeams * kWarps, kTogether = 2;
  const int warp = threadIdx.x / 32, column = threadIdx.x % 32 * 4;
#pragma unroll 1
  for (int first_head = warp; first_head < N; first_head += kTogether * kStep) {
    HeadFold folds[kTogether];
#pragma unroll 1
    for (int first = 0; first < parts.count; first += kFoldBatch) {
      float4 values[kFoldBatch][kTogether][HeadFold::kParts];
      float2 of[kFoldBatch][kTogether];
#pragma unroll
      for (int i = 0; i < kFoldBatch; ++i)
#pragma unroll
        for (int h = 0; h < kTogether; ++h) {
          // Past the last partial or head the last one again, which is not added.
          const int64_t at = int64_t{parts.split(min(first + i, parts.count - 1))} * N +
                             min(first_head + h * kStep, N - 1);
          of[i][h] = __ldcg(state + at);
#pragma unroll
          for (int c = 0; c < HeadFold::kParts; ++c)
            values[i][h][c] =
                __ldcg(reinterpret_cast<const float4*>(partial + at * kL + column + c * 128));
        }
#pragma unroll
      for (int i = 0; i < kFoldBatch; ++i) {
        if (first + i >= parts.count) continue;
#pragma unroll
        for (int h = 0; h < kTogether; ++h) {
          folds[h].add(of[i][h], values[i][h], scale);
          if (parts.ends_group(first + i)) folds[h].end_group(scale);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kTogether; ++h)
      if (first_head + h * kStep < N)
        folds[h].write(to + int64_t{first_head + h * kStep} * kL + column);
  }
}

}  // namespace mla::cuda::decode
