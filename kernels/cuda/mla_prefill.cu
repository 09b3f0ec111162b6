// Attention of prompt rows: softmax(scale·Q·Kᵀ)·V, causal, with keys of 192 columns (128 of the
// workspace, 64 of the cache) and values of 128.
//
// A block serves 128 query rows of one request for one head. Its producer warpgroup loads K and V
// in tiles of 128 keys by TMA into a ring of two stages each; each of two consumer warpgroups keeps
// 64 query rows: scores and running output in registers, softmax on them, P as the register operand
// of P·V. Q·Kᵀ of a tile is issued with P·V of the tile before, which runs on beside the softmax.
// The two warpgroups take turns at issuing, so that one multiplies while the other does softmax.
//
// Order of operations on a row, for each key tile j in order, in one pass or in many:
//   m' = max(m, scores);  p = 2^(c·score - c·m');  f = 2^(c·m - c·m'), c = scale·log2(e) > 0
//   sum = sum·f + sum of p;  O = O·f + bf16(p)·V
// with one shape of every reduction. A row's state is m, sum and O. m is the largest unscaled score
// (before `scale`), in state_max too. A tile of which a row sees nothing has f = 1 and p = 0.
#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace mla::cuda {
namespace {

constexpr int kStages = 2;
constexpr int kGroupThreads = 128;             // of a warpgroup
constexpr int kGroupRows = 64;                 // query rows of a consumer warpgroup
constexpr int kThreads = 3 * kGroupThreads;    // producer, two consumers
constexpr int kConsumers = 2 * kGroupThreads;  // threads
constexpr int kPanelBytes = 128 * 128;         // 128 rows of 64 bf16
constexpr int kPanelStep = kPanelBytes >> 4;   // the same in a matrix descriptor
constexpr int kKPanels = kQK / 64, kVPanels = kV / 64;
constexpr float kMinusInfinity = -__builtin_huge_valf();
static_assert(kQueryTile == 2 * kGroupRows && kKeyTile == 128 && kKeyTile == 2 * kPageTokens);

// Panels begin at multiples of 1024 bytes, as the swizzle asks.
struct Shared {
  char q[kKPanels][kPanelBytes];
  char k[kStages][kKPanels][kPanelBytes];
  char v[kStages][kVPanels][kPanelBytes];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  float never;  // see hold_wait
};
static_assert(sizeof(Shared) <= 232448, "the most that a block can have");

// Named barriers; 0 is __syncthreads'. The first and the last are one for each consumer warpgroup.
constexpr int kQueryBarrier = 1, kValueBarrier = 3, kTurnBarrier = 4;

// What a block works on. Positions are of the request.
struct Work {
  int32_t rows;            // 1 to 128 query rows that exist
  int32_t first_row;       // of the step
  int32_t first_position;  // of the first row
  int32_t key_begin, key_end;
  int32_t workspace_row;  // of key_begin
  int32_t table_begin;
  int32_t last_page;  // of the request
  int32_t tiles;      // key tiles, from key_begin, that any of the rows sees; may be 0
  bool last;          // the pass has the request's last key
};

__device__ __forceinline__ Work work_of(const MlaPrefillParams& p) {
  const WorkTile tile = p.tiles[blockIdx.x];
  const KeySpan span = p.spans[tile.span];
  const PrefillSpan request = p.prefill[span.prefill];
  const int32_t keys = request.context + request.q_len;
  Work work;
  work.rows = min(kQueryTile, request.q_len - tile.begin);
  work.first_row = request.row_begin + tile.begin;
  work.first_position = request.context + tile.begin;
  work.key_begin = span.key_begin;
  work.key_end = span.key_end;
  work.workspace_row = span.workspace_row;
  work.table_begin = request.table_begin;
  work.last_page = (keys - 1) / kPageTokens;
  const int32_t seen = min(span.key_end, work.first_position + work.rows) - span.key_begin;
  work.tiles = (max(seen, 0) + kKeyTile - 1) / kKeyTile;
  work.last = span.key_end == keys;
  return work;
}

// One thread. Loads in the order in which the consumers release: K of tile j, V of tile j - 1.
__device__ __forceinline__ void produce(const Work& work, const int32_t* page_table, int head,
                                        const CUtensorMap& workspace, const CUtensorMap& cache,
                                        Shared& shared) {
  const int32_t* table = page_table + work.table_begin;
  const int column = head * kKV;
  Ring k, v;
  for (int tile = 0; tile <= work.tiles; ++tile) {
    const int row = work.workspace_row + tile * kKeyTile;
    if (tile < work.tiles) {
      // A last tile may lack its second page: the first stands in, and its scores are masked.
      const int page = work.key_begin / kPageTokens + tile * 2;
      const int cache_row = table[page] * kPageTokens;
      const int cache_row_64 = table[page < work.last_page ? page + 1 : page] * kPageTokens;
      uint64_t* full = &shared.k_full[k.stage];
      char(&to)[kKPanels][kPanelBytes] = shared.k[k.stage];
      barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
      barrier_expect(full, kKPanels * kPanelBytes);
      tma_load(to[0], workspace, full, column, row, 0);
      tma_load(to[1], workspace, full, column + 64, row, 0);
      tma_load(to[2], cache, full, kL, cache_row, 0);
      tma_load(to[2] + kPanelBytes / 2, cache, full, kL, cache_row_64, 0);
      k.next(kStages);
    }
    if (tile > 0) {
      uint64_t* full = &shared.v_full[v.stage];
      char(&to)[kVPanels][kPanelBytes] = shared.v[v.stage];
      barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
      barrier_expect(full, kVPanels * kPanelBytes);
      tma_load(to[0], workspace, full, column + kP, row - kKeyTile, 0);
      tma_load(to[1], workspace, full, column + kP + 64, row - kKeyTile, 0);
      v.next(kStages);
    }
  }
}

// The 64 query rows of a warpgroup into their part of the Q panels, in the 128-byte swizzle: 16
// bytes `chunk` of row r are at chunk ^ (r % 8). Rows that do not exist are zero.
__device__ __forceinline__ void load_queries(const MlaPrefillParams& p, const Work& work, int head,
                                             int group, Shared& shared) {
  constexpr int kChunks = kQK / 8;  // of 16 bytes in a row
  constexpr int kLoads = kGroupRows * kChunks / kGroupThreads;
  const int thread = threadIdx.x % kGroupThreads;
  const __nv_bfloat16* q = static_cast<const __nv_bfloat16*>(p.q) + head * kQK;
  uint4 loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int chunk = (i * kGroupThreads + thread) % kChunks;
    const int row = group * kGroupRows + (i * kGroupThreads + thread) / kChunks;
    loaded[i] = make_uint4(0, 0, 0, 0);
    if (row < work.rows)
      loaded[i] = __ldg(reinterpret_cast<const uint4*>(
          q + (int64_t{work.first_row} + row) * p.q_stride + chunk * 8));
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int chunk = (i * kGroupThreads + thread) % kChunks;
    const int row = group * kGroupRows + (i * kGroupThreads + thread) / kChunks;
    *reinterpret_cast<uint4*>(shared.q[chunk / 8] + row * 128 + ((chunk % 8) ^ (row % 8)) * 16) =
        loaded[i];
  }
  fence_async();
  named_barrier(kQueryBarrier + group, kGroupThreads);
}

// s = Q·Kᵀ, [64, 128]: 12 steps of 16 columns, four a panel.
__device__ __forceinline__ void start_scores(float (&s)[64], uint64_t q, uint64_t k) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kQK / 16; ++i) {
    const uint64_t step = i / 4 * kPanelStep + i % 4 * kStepK;
    wgmma<128>(s, q + step, k + step, i > 0);
  }
  wgmma_commit();
}

// o += P·V, [64, 128]: 8 steps of 16 keys.
__device__ __forceinline__ void start_output(float (&o)[64], uint32_t (&p)[8][4], uint64_t v) {
  pin(o);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(p[i][j])::"memory");
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kKeyTile / 16; ++i) wgmma_rs<128, Major::mn>(o, p[i], v + i * kStepMn, 1);
  wgmma_commit();
}

// Scores of columns at or beyond limit[h] of the thread's row h are -inf; `limit` counts from the
// thread's first column.
__device__ __forceinline__ void mask_scores(float (&s)[64], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = i / 4 * 8 + i % 2 < limit[i / 2 % 2] ? s[i] : kMinusInfinity;
}

// Turns scores into p; moves max and sum on; sets the factor of the running output.
__device__ __forceinline__ void softmax(float (&s)[64], float scale_log2, float (&row_max)[2],
                                        float (&row_sum)[2], float (&factor)[2]) {
  float new_max[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float a = s[2 * h], b = s[2 * h + 1];
#pragma unroll
    for (int i = 4; i < 64; i += 4) {
      a = fmaxf(a, s[i + 2 * h]);
      b = fmaxf(b, s[i + 2 * h + 1]);
    }
    new_max[h] = fmaxf(a, b);
  }
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      new_max[h] = fmaxf(new_max[h], __shfl_xor_sync(0xFFFFFFFF, new_max[h], lanes));
  float tile_sum[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    new_max[h] = fmaxf(row_max[h], new_max[h]);
    // A row that has seen no key yet: 0 in place of -inf, so that p is 0 and not NaN.
    const float offset = new_max[h] == kMinusInfinity ? 0.0f : __fmul_rn(new_max[h], scale_log2);
    factor[h] = exp2_fast(__fsub_rn(__fmul_rn(row_max[h], scale_log2), offset));
    row_max[h] = new_max[h];
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int i = 2 * h; i < 64; i += 4) {
      s[i] = exp2_fast(__fmaf_rn(s[i], scale_log2, -offset));
      s[i + 1] = exp2_fast(__fmaf_rn(s[i + 1], scale_log2, -offset));
      a = __fadd_rn(a, s[i]);
      b = __fadd_rn(b, s[i + 1]);
    }
    tile_sum[h] = __fadd_rn(a, b);
  }
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      tile_sum[h] = __fadd_rn(tile_sum[h], __shfl_xor_sync(0xFFFFFFFF, tile_sum[h], lanes));
#pragma unroll
  for (int h = 0; h < 2; ++h) row_sum[h] = __fmaf_rn(row_sum[h], factor[h], tile_sum[h]);
}

__device__ __forceinline__ void scale_output(float (&o)[64], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) o[i] = __fmul_rn(o[i], factor[i / 2 % 2]);
}

// p rounded, as the A operands of the 8 steps of P·V.
__device__ __forceinline__ void pack_probabilities(const float (&s)[64], uint32_t (&p)[8][4]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Keeps the assembler from hoisting the next wgmma_wait above the softmax that is to overlap with
// the product: it moves a wait across arithmetic, not across a store. A sum is never negative.
__device__ __forceinline__ void hold_wait(const float (&row_sum)[2], Shared& shared) {
  if (__fadd_rn(row_sum[0], row_sum[1]) < 0.0f)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared_address(&shared.never)), "f"(row_sum[0])
                 : "memory");
}

// Zeroes V rows [first, 128) of a stage, which may hold NaN: 0·NaN is NaN. Both warpgroups.
__device__ __forceinline__ void zero_values(char (&v)[kVPanels][kPanelBytes], int first,
                                            int consumer_thread) {
  for (int i = first * 8 + consumer_thread; i < kKeyTile * 8; i += kConsumers)
#pragma unroll
    for (int panel = 0; panel < kVPanels; ++panel)
      reinterpret_cast<uint4*>(v[panel])[i] = make_uint4(0, 0, 0, 0);
  fence_async();
  named_barrier(kValueBarrier, kConsumers);
}

// A warpgroup's turn to issue products, one a key tile. Group 0 begins, by a pass of group 1, which
// does not pass after its last turn: every pass is waited for, no barrier is left half full.
__device__ __forceinline__ void pass_turn(int to_group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(kTurnBarrier + to_group), "n"(kConsumers) : "memory");
}
__device__ __forceinline__ void take_turn(int group) {
  named_barrier(kTurnBarrier + group, kConsumers);
}

// One consumer warpgroup. A thread has rows 16·warp + lane/4 + {0, 8} of the warpgroup's 64, and of
// each 8 columns the two at 2·(lane%4).
__device__ __forceinline__ void consume(const MlaPrefillParams& p, const Work& work, int head,
                                        Shared& shared) {
  const int consumer_thread = threadIdx.x - kGroupThreads;
  const int group = consumer_thread / kGroupThreads;
  const int lane = threadIdx.x % 32;
  const int tile_row = consumer_thread / 32 * 16 + lane / 4;  // the thread's first, of 128
  const int column = lane % 4 * 2;
  const float scale_log2 = __fmul_rn(p.scale, kLog2E);

  float o[64], row_max[2], row_sum[2];
#pragma unroll
  for (int i = 0; i < 64; ++i) o[i] = 0.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row_max[h] = kMinusInfinity;
    row_sum[h] = 0.0f;
    if (work.key_begin == 0 || tile_row + 8 * h >= work.rows) continue;
    const int64_t cell = (int64_t{work.first_row} + tile_row + 8 * h) * p.N + head;
    row_max[h] = p.state_max[cell];
    row_sum[h] = p.state_sum[cell];
    const float* from = p.state_out + cell * kV + column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(from + 8 * i);
      o[4 * i + 2 * h] = pair.x;
      o[4 * i + 2 * h + 1] = pair.y;
    }
  }

  if (work.tiles > 0) {
    load_queries(p, work, head, group, shared);
    const uint64_t q = k_major(shared.q[0] + group * kGroupRows * 128);
    // The first position that a row of the warpgroup does not see, at the least.
    const int unseen = min(work.first_position + group * kGroupRows + 1, work.key_end);
    const int row_position = work.first_position + tile_row;
    int tile_begin = work.key_begin;
    Ring k, v;
    float s[64], factor[2];
    uint32_t probabilities[8][4];

    const auto mask_and_softmax = [&] {
      if (tile_begin + kKeyTile > unseen) {
        const int limit[2] = {min(row_position + 1, work.key_end) - tile_begin - column,
                              min(row_position + 9, work.key_end) - tile_begin - column};
        mask_scores(s, limit);
      }
      softmax(s, scale_log2, row_max, row_sum, factor);
    };

    if (group == 1) pass_turn(0);
    barrier_wait(&shared.k_full[k.stage], k.parity);
    take_turn(group);
    start_scores(s, q, k_major(shared.k[k.stage]));
    if (group == 0 || work.tiles > 1) pass_turn(group ^ 1);
    wgmma_wait<0>();
    pin(s);
    if (lane == 0) barrier_arrive(&shared.k_empty[k.stage]);
    k.next(kStages);
    mask_and_softmax();
    scale_output(o, factor);
    pack_probabilities(s, probabilities);

    for (int tile = 1; tile < work.tiles; ++tile) {
      barrier_wait(&shared.k_full[k.stage], k.parity);
      take_turn(group);
      start_scores(s, q, k_major(shared.k[k.stage]));
      barrier_wait(&shared.v_full[v.stage], v.parity);
      start_output(o, probabilities, mn_major(shared.v[v.stage], kPanelBytes));
      if (group == 0 || tile + 1 < work.tiles) pass_turn(group ^ 1);
      wgmma_wait<1>();
      pin(s);
      if (lane == 0) barrier_arrive(&shared.k_empty[k.stage]);
      k.next(kStages);
      tile_begin += kKeyTile;
      mask_and_softmax();
      hold_wait(row_sum, shared);
      // P·V reads P from registers until it is done.
      wgmma_wait<0>();
      pin(o);
      if (lane == 0) barrier_arrive(&shared.v_empty[v.stage]);
      v.next(kStages);
      scale_output(o, factor);
      pack_probabilities(s, probabilities);
    }

    barrier_wait(&shared.v_full[v.stage], v.parity);
    if (tile_begin + kKeyTile > work.key_end)
      zero_values(shared.v[v.stage], work.key_end - tile_begin, consumer_thread);
    start_output(o, probabilities, mn_major(shared.v[v.stage], kPanelBytes));
    wgmma_wait<0>();
    pin(o);
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool exists = tile_row + 8 * h < work.rows;
    const int64_t cell = (int64_t{work.first_row} + tile_row + 8 * h) * p.N + head;
    if (work.last) {
      // Four columns of a quad are turned into 16 bytes a lane.
      const float inverse = __frcp_rn(row_sum[h]);
      uint4* to = static_cast<uint4*>(p.out) + cell * (kV / 8) + lane % 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = o + 16 * i + 4 * j + 2 * h;
          x[j] = pack_bf16(__fmul_rn(pair[0], inverse), __fmul_rn(pair[1], inverse));
        }
        transpose_quad(x, lane);
        if (exists) to[4 * i] = make_uint4(x[0], x[1], x[2], x[3]);
      }
    } else if (exists) {
      if (lane % 4 == 0) {
        p.state_max[cell] = row_max[h];
        p.state_sum[cell] = row_sum[h];
      }
      float* to = p.state_out + cell * kV + column;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        *reinterpret_cast<float2*>(to + 8 * i) =
            make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
    }
  }
}

// Grid: x query tiles, longest first, y heads: blocks of a head run together and share its K and V
// in L2.
__global__ void __launch_bounds__(kThreads, 1)
    mla_prefill_kernel(const __grid_constant__ MlaPrefillParams p,
                       const __grid_constant__ CUtensorMap workspace,
                       const __grid_constant__ CUtensorMap cache) {
  begin_kernel();
  extern __shared__ __align__(1024) char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int head = blockIdx.y;
  const Work work = work_of(p);
  if (work.tiles == 0 && !work.last) return;  // the state stays as it is

  if (threadIdx.x == 0) {
    tma_prefetch(workspace);
    tma_prefetch(cache);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.k_full[i], 1);
      barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.k_empty[i], kConsumers / 32);  // a lane of each warp
      barrier_init(&shared.v_empty[i], kConsumers / 32);
    }
    barrier_init_done();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    registers_down<40>();
    if (threadIdx.x == 0) produce(work, p.page_table, head, workspace, cache, shared);
  } else {
    registers_up<232>();
    consume(p, work, head, shared);
  }
}

// A map of rows of `cols` elements without an end: a map's extent is below 2^40 bytes.
CUtensorMap endless_map(const void* base, int64_t cols, int box_rows) {
  const int64_t rows = (int64_t{1} << 39) / (cols * 2);
  return tensor_map(base, cols, rows, 1, cols, rows * cols, box_rows);
}

}  // namespace

// A key tile is loaded whole: up to 127 rows past a span's last one are read. They are those of
// other spans, or past the W rows of the pass: the workspace is allocated with kKeyTile rows more.
// What these rows hold does not matter.
void mla_prefill(const MlaPrefillParams& p, Launch launch) {
  if (p.num_tiles == 0) return;
  const CUtensorMap workspace = endless_map(p.workspace, int64_t{p.N} * kKV, kKeyTile);
  const CUtensorMap cache = endless_map(p.cache, kCacheRow, kPageTokens);
  MLA_CUDA_CHECK(cudaFuncSetAttribute(mla_prefill_kernel,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  const dim3 grid(p.num_tiles, p.N);
  launch_kernel("mla_prefill", mla_prefill_kernel, grid, kThreads, sizeof(Shared), launch.stream, p,
                workspace, cache);
}

}  // namespace mla::cuda
