// Sampling of one token a row, in two kernels. scan_kernel reads the logits once, in chunks of
// fixed boundaries, and leaves greedy rows done; draw_kernel serves the rows of a temperature. What
// a row needs is read from its spec in device memory. A row's bits depend on its logits and spec
// alone: fp32 sums have a fixed shape, and everything whose order is free is an integer sum or a
// maximum.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

namespace mla::cuda {
namespace {

constexpr int kMaxRows = kMaxSamples;  // as many arrival counters begin the scratch
constexpr int kMaxTop = 32;            // top logprobs of a row: one a lane
constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / 32;
constexpr int kPerThread = 16;  // logits of a chunk or of a tile that a thread has
constexpr int kChunk = kScanThreads * kPerThread;
constexpr int kMaxChunks = kChunk / kMaxTop;  // so that the lists of a row's chunks fit a block
static_assert(kMaxChunks * kChunk == kMaxVocab);
constexpr int kDrawThreads = 512;
constexpr int kDrawWarps = kDrawThreads / 32;
constexpr int kTile = kDrawThreads * kPerThread;

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

int64_t chunks_of(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }
int64_t tiles_of(int64_t vocab) { return (vocab + kTile - 1) / kTile; }

// Lays the scratch out from `base`; returns its size in bytes. Every part is a multiple of 16.
size_t lay_out(char* base, int64_t rows, int64_t vocab, Scratch& out) {
  size_t used = 0;
  const auto take = [&](auto*& part, int64_t n) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(base + used);
    used += static_cast<size_t>(n) * sizeof(*part);
  };
  take(out.scan_arrivals, kMaxRows);
  take(out.draw_arrivals, kMaxRows);
  take(out.states, rows);
  take(out.chunks, rows * chunks_of(vocab));
  take(out.draws, rows * tiles_of(vocab));
  take(out.tops, rows * chunks_of(vocab) * kMaxTop);
  return used;
}

// Floats but NaN as integers of the same order; above 0. -0 must have become +0.
__device__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ float key_value(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

// Four neighbouring logits of a row from `id` on, -infinity past the vocabulary; -0 becomes +0, so
// that the two compare equal as integers. `aligned`: rows begin at multiples of 16 bytes.
__device__ float4 load_logits(const float* row, int id, int vocab, bool aligned) {
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

// One bit for each id of [first, first + 32·words) that the spec bans. All threads of the block.
__device__ void mark_bans(const SampleParams& p, const SampleSpec& spec, int first, int words,
                          uint32_t* banned) {
  for (int i = threadIdx.x; i < words; i += blockDim.x) banned[i] = 0;
  __syncthreads();
  for (int b = spec.ban_begin + static_cast<int>(threadIdx.x); b < spec.ban_end; b += blockDim.x) {
    const uint32_t at = static_cast<uint32_t>(p.bans[b] - first);
    if (at < static_cast<uint32_t>(words) * 32) atomicOr(&banned[at / 32], 1u << at % 32);
  }
  __syncthreads();
}
__device__ bool is_marked(const uint32_t* banned, int at) { return banned[at / 32] >> at % 32 & 1; }

// True in all threads of the block that comes last of `blocks`: what the others wrote before is
// then in the L2 cache. `flag` is shared memory. The counter returns to zero.
__device__ bool arrive_last(int32_t* counter, int blocks, int* flag) {
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

__device__ float logprob(float x, float max, double log_sum) {
  return static_cast<float>(static_cast<double>(x) - static_cast<double>(max) - log_sum);
}

__device__ void give(const SampleParams& p, int s, int32_t token, float value) {
  p.tokens[s] = token;
  p.logprobs[s] = value;
  const int32_t slot = p.specs[s].token_slot;
  if (p.sampled && slot >= 0) p.sampled[slot] = max(token, 0);
}

// The n best entries of a warp, best first: give(rank, key, id) by lane `rank`. Keys become 0 as
// they are taken; ids ascend within a lane where keys are equal.
template <int N, class IdOf, class Give>
__device__ void top_of_warp(uint32_t (&keys)[N], int n, IdOf id_of_key, Give give_entry) {
  const int lane = threadIdx.x % 32;
  uint32_t my_key = 0;
  int32_t my_id = INT32_MAX;
  const auto find = [&] {
    my_key = 0, my_id = INT32_MAX;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int32_t id = id_of_key(i);
      if (keys[i] > my_key || (keys[i] == my_key && id < my_id)) my_key = keys[i], my_id = id;
    }
  };
  find();
  uint32_t key = 0;
  int32_t id = 0;
  for (int rank = 0; rank < n; ++rank) {
    const uint32_t best = __reduce_max_sync(~0u, my_key);
    const int32_t best_id = __reduce_min_sync(~0u, my_key == best ? my_id : INT32_MAX);
    if (lane == rank) key = best, id = best_id;
    if (my_id == best_id && my_key == best) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (id_of_key(i) == best_id) keys[i] = 0;
      find();
    }
    __syncwarp();
  }
  if (lane < n) give_entry(lane, key, id);
}

// The n best of a block: of each warp, then of those. `lists` is shared memory.
template <class IdOf, class Give>
__device__ void top_of_block(uint32_t (&keys)[kPerThread], int n, IdOf id_of_key,
                             Entry (&lists)[kScanWarps][kMaxTop], Give give_entry) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  top_of_warp(keys, n, id_of_key, [&](int rank, uint32_t key, int32_t id) {
    lists[warp][rank] = {key, id};
  });
  __syncthreads();
  if (warp > 0) return;
  uint32_t best_keys[kScanWarps];
  int32_t best_ids[kScanWarps];
#pragma unroll
  for (int w = 0; w < kScanWarps; ++w) {
    best_keys[w] = lane < n ? lists[w][lane].key : 0;
    best_ids[w] = lane < n ? lists[w][lane].id : INT32_MAX;
  }
  top_of_warp(
      best_keys, n, [&](int i) { return best_ids[i]; }, give_entry);
}

// One block a chunk of a row; the last of a row puts its chunks together.
__global__ void __launch_bounds__(kScanThreads, 4)
    scan_kernel(SampleParams p, Scratch scratch, int chunks, bool aligned) {
  begin_kernel();
  __shared__ uint32_t banned[kChunk / 32];
  __shared__ float maxima[kScanWarps], sums[kScanWarps];
  __shared__ Entry bests[kScanWarps];
  __shared__ Entry lists[kScanWarps][kMaxTop];
  __shared__ RowState row;
  __shared__ int flag;
  const int s = blockIdx.x / chunks, c = blockIdx.x % chunks, first = c * kChunk;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SampleSpec& spec = p.specs[s];
  const bool bans = spec.ban_begin < spec.ban_end;
  const int num_top = min(min(spec.num_top, p.max_top), p.vocab);

  float x[kPerThread];
  load_part<kScanThreads>(p.logits + int64_t{s} * p.vocab, first, p.vocab, aligned, x);
  if (bans) mark_bans(p, spec, first, kChunk / 32, banned);

  uint32_t out = 0;  // bit i: logit i of this thread is banned
  if (bans) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      out |= static_cast<uint32_t>(is_marked(banned, id_of<kScanThreads>(0, i))) << i;
  }
  float max = -INFINITY, best = -INFINITY;
  bool nan = false;
  int32_t best_id = id_of<kScanThreads>(first, 0);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    nan |= x[i] != x[i];
    max = fmaxf(max, x[i]);
    if (x[i] > best && (out >> i & 1) == 0) {
      best = x[i];
      best_id = id_of<kScanThreads>(first, i);
    }
  }
  if (nan) max = INFINITY;
  max = key_value(__reduce_max_sync(~0u, order_key(max)));
  const uint32_t key = order_key(best), warp_key = __reduce_max_sync(~0u, key);
  const int32_t warp_id = __reduce_min_sync(~0u, key == warp_key ? best_id : INT32_MAX);
  if (lane == 0) {
    maxima[warp] = max;
    bests[warp] = {warp_key, warp_id};
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kScanWarps; ++w) max = fmaxf(max, maxima[w]);
  const bool finite = fabsf(max) < INFINITY;
  float sum = 0.0f;
  if (finite) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) sum += exp_fast(x[i] - max);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    Chunk chunk = {max, sums[0], bests[0].key, bests[0].id};
#pragma unroll
    for (int w = 1; w < kScanWarps; ++w) {
      chunk.sum += sums[w];
      if (bests[w].key > chunk.best_key ||
          (bests[w].key == chunk.best_key && bests[w].id < chunk.best_id)) {
        chunk.best_key = bests[w].key;
        chunk.best_id = bests[w].id;
      }
    }
    scratch.chunks[int64_t{s} * chunks + c] = chunk;
  }
  Entry* tops = scratch.tops + int64_t{s} * chunks * kMaxTop;
  if (num_top > 0) {
    uint32_t keys[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) keys[i] = order_key(x[i]);
    top_of_block(
        keys, num_top, [&](int i) { return id_of<kScanThreads>(first, i); }, lists,
        [&](int rank, uint32_t top_key, int32_t id) {
          tops[c * kMaxTop + rank] = {top_key, id};
        });
  }
  if (!arrive_last(&scratch.scan_arrivals[s], chunks, &flag)) return;

  // The row. Its sum: chunks of a lane in order, then over the lanes.
  if (warp == 0) {
    const Chunk* of_row = scratch.chunks + int64_t{s} * chunks;
    const auto load = [&](int i) {
      const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(of_row + i));
      return Chunk{__uint_as_float(bits.x), __uint_as_float(bits.y), bits.z,
                   static_cast<int32_t>(bits.w)};
    };
    float row_max = -INFINITY;
    uint32_t row_key = 0;
    int32_t row_id = INT32_MAX;
#pragma unroll 1
    for (int i = lane; i < chunks; i += 32) {
      const Chunk chunk = load(i);
      row_max = fmaxf(row_max, chunk.max);
      if (chunk.best_key > row_key) row_key = chunk.best_key, row_id = chunk.best_id;
    }
    row_max = key_value(__reduce_max_sync(~0u, order_key(row_max)));
    const uint32_t best_key = __reduce_max_sync(~0u, row_key);
    row_id = __reduce_min_sync(~0u, row_key == best_key ? row_id : INT32_MAX);
    double total = 0.0;
    const bool good = fabsf(row_max) < INFINITY;
    if (good) {
#pragma unroll 1
      for (int i = lane; i < chunks; i += 32) {
        const Chunk chunk = load(i);
        if (chunk.sum > 0.0f)
          total += static_cast<double>(chunk.sum) *
                   exp(static_cast<double>(chunk.max) - static_cast<double>(row_max));
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    if (lane == 0) {
      row.log_sum = good ? log(total) : 0.0;
      row.max = row_max;
      row.best = key_value(best_key);
      row.best_id = good && row.best > -INFINITY ? row_id : -1;
      if (row.best_id < 0)
        give(p, s, -1, 0.0f);
      else if (spec.temperature == 0.0f)
        give(p, s, row.best_id, logprob(row.best, row.max, row.log_sum));
      scratch.states[s] = row;
    }
  }
  if (num_top <= 0) return;
  __syncthreads();
  if (fabsf(row.max) == INFINITY) return;
  // List entries i of the row: chunk i / num_top, rank i % num_top.
  uint32_t keys[kPerThread];
  int32_t ids[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int at = i * kScanThreads + threadIdx.x, chunk = at / num_top;
    keys[i] = 0, ids[i] = INT32_MAX;
    if (chunk < chunks) {
      const uint2 entry =
          __ldcg(reinterpret_cast<const uint2*>(tops + chunk * kMaxTop + at % num_top));
      keys[i] = entry.x, ids[i] = static_cast<int32_t>(entry.y);
    }
  }
  top_of_block(
      keys, num_top, [&](int i) { return ids[i]; }, lists,
      [&](int rank, uint32_t top_key, int32_t id) {
        p.top_ids[int64_t{s} * p.max_top + rank] = id;
        p.top_logprobs[int64_t{s} * p.max_top + rank] =
            logprob(key_value(top_key), row.max, row.log_sum);
      });
}

// The first word of philox4x32({token, position, choice, 0}, seed) of kernels/philox.h.
__device__ uint32_t philox_word(const SampleSpec& spec, int32_t token) {
  uint32_t c0 = static_cast<uint32_t>(token), c1 = spec.position, c2 = spec.choice, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(spec.seed), k1 = static_cast<uint32_t>(spec.seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

__device__ double gumbel(uint32_t bits) {
  return -log(-log((static_cast<double>(bits) + 0.5) * 0x1p-32));
}

// At least gumbel(bits), up to kBoundError: -log(-log u) <= -log(1 - u).
__device__ float gumbel_bound(uint32_t bits) {
  return -__logf((static_cast<float>(~bits) + 0.5f) * 0x1p-32f);
}
constexpr float kBoundError = 0.01f;  // beyond the rounding of every float that it is used with
// Noise is in (kLeastNoise, kMostNoise). The best logit, scaled to 0, is always kept, so that a
// token scaled below their difference never wins.
constexpr float kLeastNoise = -3.15f, kMostNoise = 22.9f;

struct Drawn {
  double score = -INFINITY;
  int32_t id = -1;
  __device__ void consider(double other, int32_t other_id) {
    if (other_id >= 0 && (other > score || (other == score && other_id < id) || id < 0)) {
      score = other;
      id = other_id;
    }
  }
};

struct WarpDraw {
  Drawn mine;                 // of this lane
  float floor = kLeastNoise;  // of the warp: the row's best score is not below
};

// Draws among kPerThread tokens a lane; -infinity is none. The exact score, two logarithms in
// double, is computed only where its upper bound reaches the floor, so that the winner is exact.
template <class IdOf>
__device__ void draw_of_warp(const SampleSpec& spec, const float (&scaled)[kPerThread],
                             IdOf id_of_token, WarpDraw& draw) {
  float bound[kPerThread], most = -INFINITY;
  int most_at = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    bound[i] = -INFINITY;
    if (scaled[i] + kMostNoise + kBoundError >= draw.floor)
      bound[i] = scaled[i] + gumbel_bound(philox_word(spec, id_of_token(i)));
    if (bound[i] > most) most = bound[i], most_at = i;
  }
  const auto consider = [&](int at) {
    float its_scaled = scaled[0];
#pragma unroll
    for (int i = 1; i < kPerThread; ++i)
      if (i == at) its_scaled = scaled[i];
    const int32_t id = id_of_token(at);
    const double score = static_cast<double>(its_scaled) + gumbel(philox_word(spec, id));
    draw.mine.consider(score, id);
    return __double2float_rd(score);
  };
  // The token of the largest bound raises the floor before the others are tried.
  const uint32_t key = order_key(most + 0.0f), best = __reduce_max_sync(~0u, key);
  if (key_value(best) + kBoundError < draw.floor) return;
  const float score = key == best ? consider(most_at) : -INFINITY;
  draw.floor = fmaxf(draw.floor, key_value(__reduce_max_sync(~0u, order_key(score + 0.0f))));
  uint32_t left = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (bound[i] + kBoundError >= draw.floor && !(key == best && i == most_at)) left |= 1u << i;
  for (; left != 0; left &= left - 1) consider(__ffs(static_cast<int>(left)) - 1);
}

// Tokens in order: a larger scaled logit first, then the lower id. Scaled logits are not positive,
// so the bits of their magnitudes ascend in that order; the id follows.
constexpr int kIdBits = 24;
__device__ uint64_t rank_key(float magnitude, int32_t id) {
  return uint64_t{__float_as_uint(magnitude)} << kIdBits | static_cast<uint32_t>(id);
}

constexpr int kBins = 2048;
constexpr float kBinsPerUnit = 128.0f;  // of the first level: linear up to 16, then one bin
constexpr int kBinsPerThread = kBins / kDrawThreads;
constexpr float kMassUnit = 0x1p40f;  // probability, relative to the best token's, as an integer

struct Bins {
  uint32_t count[kBins];
  uint32_t mass_low[kBins], mass_high[kBins];
};

struct Found {
  int bin;  // -1: the target is beyond all
  uint32_t count;
  uint64_t target;  // what is left of it for this bin
};

struct DrawShared {
  Bins bins;
  uint64_t warp_sums[kDrawWarps];
  Found found;
  Draw draws[kDrawWarps];
  int flag;
};

__device__ void add_mass(Bins& bins, int bin, uint64_t mass) {
  const uint32_t low = static_cast<uint32_t>(mass);
  uint32_t high = static_cast<uint32_t>(mass >> 32);
  if (low != 0 && atomicAdd(&bins.mass_low[bin], low) > ~low) ++high;
  if (high != 0) atomicAdd(&bins.mass_high[bin], high);
}

// The first bin at which the running sum reaches the target: `target` tokens, or with by_mass the
// share top_p of the mass of all bins (top_p 0: the mass `target`).
__device__ Found find_bin(DrawShared& shared, bool by_mass, uint64_t target, float top_p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint64_t part[kBinsPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    const int bin = threadIdx.x * kBinsPerThread + i;
    part[i] = by_mass ? uint64_t{shared.bins.mass_high[bin]} << 32 | shared.bins.mass_low[bin]
                      : shared.bins.count[bin];
    sum += part[i];
  }
  uint64_t running = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, running, step);
    if (lane >= step) running += other;
  }
  if (lane == 31) shared.warp_sums[warp] = running;
  if (threadIdx.x == 0) shared.found = {-1, 0, 0};
  __syncthreads();
  uint64_t before = running - sum, all = 0;
#pragma unroll
  for (int w = 0; w < kDrawWarps; ++w) {
    if (w < warp) before += shared.warp_sums[w];
    all += shared.warp_sums[w];
  }
  if (top_p > 0.0f) {
    const double share = ceil(static_cast<double>(top_p) * static_cast<double>(all));
    target = min(max(static_cast<uint64_t>(share), uint64_t{1}), all);
  }
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    const int bin = threadIdx.x * kBinsPerThread + i;
    if (before < target && target <= before + part[i])
      shared.found = {bin, shared.bins.count[bin], target - before};
    before += part[i];
  }
  __syncthreads();
  return shared.found;
}

// The logits of one row as draw_kernel sees them.
struct Row {
  const float* logits;
  const uint32_t* banned;  // or null
  float best, temperature;
  int vocab;
  bool aligned;

  // Of the tile that begins at `first`: (x - best) / temperature; -infinity where it is banned.
  __device__ void load(int first, float (&scaled)[kPerThread]) const {
    load_part<kDrawThreads>(logits, first, vocab, aligned, scaled);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int id = id_of<kDrawThreads>(first, i);
      scaled[i] = __fdiv_rn(scaled[i] - best, temperature);
      if (banned && id < vocab && is_marked(banned, id)) scaled[i] = -INFINITY;
    }
  }
};

// The rank_key of the last token kept of those up to `limit`: the first k, or with k = 0 the
// shortest run whose mass reaches top_p of all. Bins of keys, finer from level to level.
__device__ uint64_t select(const Row& row, DrawShared& shared, uint64_t limit, uint32_t k,
                           float top_p) {
  const bool by_mass = k == 0;
  const int lane = threadIdx.x % 32;
  uint64_t low = 0, target = k;
  int shift = -1;  // of the keys of this level; -1: the first, linear
  while (true) {
    for (int i = threadIdx.x; i < kBins; i += kDrawThreads)
      shared.bins.count[i] = shared.bins.mass_low[i] = shared.bins.mass_high[i] = 0;
    __syncthreads();
    uint32_t rest = 0;  // of the first level's last bin
    uint64_t rest_mass = 0;
    for (int first = 0; first < row.vocab; first += kTile) {
      float scaled[kPerThread];
      row.load(first, scaled);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const float magnitude = fabsf(scaled[i]);
        const uint64_t key = rank_key(magnitude, id_of<kDrawThreads>(first, i));
        if (magnitude == INFINITY || key > limit || key < low) continue;
        uint64_t bin;
        if (shift < 0)
          bin = static_cast<uint32_t>(fminf(magnitude * kBinsPerUnit, kBins - 1.0f));
        else
          bin = (key - low) >> shift;
        if (bin >= kBins) continue;
        const uint64_t mass =
            by_mass ? __float2ull_rz(exp_fast(scaled[i]) * kMassUnit) : uint64_t{0};
        if (shift < 0 && bin == kBins - 1) {
          ++rest;
          rest_mass += mass;
          continue;
        }
        atomicAdd(&shared.bins.count[bin], 1u);
        if (by_mass) add_mass(shared.bins, static_cast<int>(bin), mass);
      }
    }
    if (shift < 0) {
      rest = __reduce_add_sync(~0u, rest);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) rest_mass += __shfl_xor_sync(~0u, rest_mass, step);
      if (lane == 0 && rest > 0) {
        atomicAdd(&shared.bins.count[kBins - 1], rest);
        add_mass(shared.bins, kBins - 1, rest_mass);
      }
    }
    __syncthreads();
    const Found found = find_bin(shared, by_mass, target, by_mass && shift < 0 ? top_p : 0.0f);
    if (found.bin < 0) return limit;
    target = found.target;
    // The keys of the bin: [low, end).
    uint64_t end;
    if (shift < 0) {
      const float from = static_cast<float>(found.bin) / kBinsPerUnit;
      const float to =
          found.bin == kBins - 1 ? INFINITY : static_cast<float>(found.bin + 1) / kBinsPerUnit;
      low = rank_key(from, 0);
      end = rank_key(to, 0);
    } else {
      low += static_cast<uint64_t>(found.bin) << shift;
      end = low + (uint64_t{1} << shift);
    }
    limit = min(limit, end - 1);
    if (shift == 0 || found.count == 1 || (!by_mass && target == found.count)) return limit;
    shift = max(64 - __clzll(static_cast<long long>(end - 1 - low)) - 11, 0);
  }
}

// Rows of a temperature. Blocks (row, part): without top-k and top-p a part takes every parts-th
// tile, and the last block of the row puts them together; otherwise part 0 does it all.
__global__ void __launch_bounds__(kDrawThreads)
    draw_kernel(SampleParams p, Scratch scratch, int parts, int tiles, bool aligned) {
  begin_kernel();
  extern __shared__ uint32_t banned[];  // [vocab / 32]
  __shared__ DrawShared shared;
  const int s = blockIdx.x / parts, part = blockIdx.x % parts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SampleSpec spec = p.specs[s];
  if (spec.temperature == 0.0f) return;
  const RowState state = scratch.states[s];
  if (state.best_id < 0) return;
  const bool by_k = spec.top_k > 0 && spec.top_k < p.vocab, by_p = spec.top_p < 1.0f;
  const bool whole = !by_k && !by_p;
  if (!whole && part > 0) return;
  const bool bans = spec.ban_begin < spec.ban_end;
  if (bans) mark_bans(p, spec, 0, (p.vocab + 31) / 32, banned);
  const Row row = {p.logits + int64_t{s} * p.vocab,
                   bans ? banned : nullptr,
                   state.best,
                   spec.temperature,
                   p.vocab,
                   aligned};

  uint64_t limit = ~uint64_t{0};
  if (by_k) limit = select(row, shared, limit, static_cast<uint32_t>(spec.top_k), 0.0f);
  if (by_p) limit = select(row, shared, limit, 0, spec.top_p);

  WarpDraw draw;
  for (int tile = part; tile < tiles; tile += whole ? parts : 1) {
    float scaled[kPerThread];
    row.load(tile * kTile, scaled);
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
        if (rank_key(fabsf(scaled[i]), id_of<kDrawThreads>(tile * kTile, i)) > limit)
          scaled[i] = -INFINITY;
    }
    draw_of_warp(
        spec, scaled, [&](int i) { return id_of<kDrawThreads>(tile * kTile, i); }, draw);
  }
  const auto merge_lanes = [](Drawn& drawn) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const double score = __shfl_xor_sync(~0u, drawn.score, step);
      const int32_t id = __shfl_xor_sync(~0u, drawn.id, step);
      drawn.consider(score, id);
    }
  };
  merge_lanes(draw.mine);
  if (lane == 0) shared.draws[warp] = {draw.mine.score, draw.mine.id};
  __syncthreads();
  Drawn of_block;
  if (threadIdx.x == 0) {
    for (int w = 0; w < kDrawWarps; ++w)
      of_block.consider(shared.draws[w].score, shared.draws[w].id);
    if (whole && parts > 1)
      scratch.draws[int64_t{s} * tiles + part] = {of_block.score, of_block.id};
  }
  if (whole && parts > 1) {
    if (!arrive_last(&scratch.draw_arrivals[s], parts, &shared.flag)) return;
    if (warp > 0) return;
    of_block = {};
    for (int i = lane; i < parts; i += 32) {
      const Draw* from = scratch.draws + int64_t{s} * tiles + i;
      of_block.consider(__ldcg(&from->score), __ldcg(&from->id));
    }
    merge_lanes(of_block);
  }
  if (threadIdx.x == 0)
    give(p, s, of_block.id, logprob(row.logits[of_block.id], state.max, state.log_sum));
}

}  // namespace

size_t sample_scratch_bytes(int64_t max_samples, int64_t vocab) {
  Scratch scratch;
  return lay_out(nullptr, max_samples, vocab, scratch);
}

void sample(const SampleParams& p, void* scratch_base, Launch launch) {
  if (p.S == 0) return;
  if (p.S > kMaxRows || p.max_top > kMaxTop || p.vocab > kMaxChunks * kChunk)
    fail("CUDA: sampling {} rows of {} logits, {} top logprobs: at most {} of {}, {}", p.S, p.vocab,
         p.max_top, kMaxRows, kMaxChunks * kChunk, kMaxTop);
  Scratch scratch;
  lay_out(static_cast<char*>(scratch_base), p.S, p.vocab, scratch);
  const bool aligned = p.vocab % 4 == 0 && reinterpret_cast<uintptr_t>(p.logits) % 16 == 0;
  const int chunks = static_cast<int>(chunks_of(p.vocab));
  const int tiles = static_cast<int>(tiles_of(p.vocab));
  launch_kernel("sample: scan", scan_kernel,
                static_cast<unsigned>(p.S) * static_cast<unsigned>(chunks), kScanThreads, 0,
                launch.stream, p, scratch, chunks, aligned);
  // Few rows share the SMs by parts; a part changes no bit.
  const int parts = std::clamp(2 * launch.sms / p.S, 1, tiles);
  const size_t bans_bytes = static_cast<size_t>((p.vocab + 31) / 32) * sizeof(uint32_t);
  if (sizeof(DrawShared) + bans_bytes > 48 * 1024)
    MLA_CUDA_CHECK(cudaFuncSetAttribute(draw_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bans_bytes)));
  launch_kernel("sample: draw", draw_kernel,
                static_cast<unsigned>(p.S) * static_cast<unsigned>(parts), kDrawThreads, bans_bytes,
                launch.stream, p, scratch, parts, tiles, aligned);
}

}  // namespace mla::cuda
