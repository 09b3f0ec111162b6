// The second sampling kernel: rows of a temperature, with min-p, top-k and top-p.
#include <algorithm>

#include "kernels/cuda/sample.cuh"

namespace mla::cuda::sampling {
namespace {

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
constexpr uint64_t kNoLimit = ~uint64_t{0};
static_assert(kMaxVocab <= 1 << kIdBits);
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
  float best, temperature;
  int vocab;
  bool aligned;

  // Of the tile that begins at `first`: (x - best) / temperature.
  __device__ void load(int first, float (&scaled)[kPerThread]) const {
    load_part<kDrawThreads>(logits, first, vocab, aligned, scaled);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) scaled[i] = __fdiv_rn(scaled[i] - best, temperature);
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
  const Row row = {p.logits + int64_t{s} * p.vocab, state.best, spec.temperature, p.vocab, aligned};

  uint64_t limit = kNoLimit;
  if (spec.min_scaled > -INFINITY) limit = rank_key(fabsf(spec.min_scaled), kMaxVocab - 1);
  if (by_k) limit = select(row, shared, limit, static_cast<uint32_t>(spec.top_k), 0.0f);
  if (by_p) limit = select(row, shared, limit, 0, spec.top_p);

  WarpDraw draw;
  for (int tile = part; tile < tiles; tile += whole ? parts : 1) {
    float scaled[kPerThread];
    row.load(tile * kTile, scaled);
    if (limit != kNoLimit) {
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
  if (warp > 0) return;
  const int32_t id = __shfl_sync(~0u, of_block.id, 0);
  const float raw = raw_logit(p, spec, row.logits[id], id);
  if (lane == 0) give(p, s, id, logprob(raw, state.max, state.log_sum));
}

}  // namespace

void launch_draw(const SampleParams& p, const Scratch& scratch, Launch launch) {
  const int tiles = static_cast<int>(tiles_of(p.vocab));
  // Few rows share the SMs by parts; a part changes no bit.
  const int parts = std::clamp(2 * launch.sms / p.S, 1, tiles);
  launch_kernel("sample: draw", draw_kernel,
                static_cast<unsigned>(p.S) * static_cast<unsigned>(parts), kDrawThreads, 0,
                launch.stream, p, scratch, parts, tiles, rows_aligned(p));
}

}  // namespace mla::cuda::sampling
