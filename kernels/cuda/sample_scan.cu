// The first sampling kernel: log-softmax, top logprobs, edits, and the token of greedy rows.
#include "kernels/cuda/sample.cuh"
#include "kernels/sampling.h"

namespace mla::cuda::sampling {
namespace {

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

// Makes the edits of row s in the chunk that begins at `first`, of which this thread has the logits
// x: in `edited` [kChunk], shared memory, and in the row itself. All threads of the block.
__device__ void edit_chunk(const SampleParams& p, const SampleSpec& spec, int s, int first,
                           const float (&x)[kPerThread], float* edited) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) edited[id_of<kScanThreads>(0, i)] = x[i];
  __syncthreads();
  for (int e = spec.edit_begin + static_cast<int>(threadIdx.x); e < spec.edit_end;
       e += kScanThreads) {
    LogitEdit& edit = p.edits[e];
    const uint32_t at = static_cast<uint32_t>(edit.token - first);
    if (at >= kChunk) continue;
    edit.raw = edited[at];
    edited[at] = edited_logit(edited[at], spec, edit) + 0.0f;
    p.logits[int64_t{s} * p.vocab + edit.token] = edited[at];
  }
  __syncthreads();
}

// One block a chunk of a row; the last of a row puts its chunks together.
__global__ void __launch_bounds__(kScanThreads, 4)
    scan_kernel(SampleParams p, Scratch scratch, int chunks, bool aligned) {
  begin_kernel();
  __shared__ __align__(16) float edited[kChunk];
  __shared__ float maxima[kScanWarps], sums[kScanWarps];
  __shared__ Entry bests[kScanWarps];
  __shared__ Entry lists[kScanWarps][kMaxTop];
  __shared__ RowState row;
  __shared__ int flag;
  const int s = blockIdx.x / chunks, c = blockIdx.x % chunks, first = c * kChunk;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SampleSpec& spec = p.specs[s];
  const bool edits = spec.edit_begin < spec.edit_end;
  const int num_top = min(min(spec.num_top, p.max_top), p.vocab);

  float x[kPerThread];
  load_part<kScanThreads>(p.logits + int64_t{s} * p.vocab, first, p.vocab, aligned, x);
  if (edits) edit_chunk(p, spec, s, first, x, edited);

  float max = -INFINITY, best = -INFINITY;
  bool nan = false;
  int32_t best_id = id_of<kScanThreads>(first, 0);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    nan |= x[i] != x[i];
    max = fmaxf(max, x[i]);
    const float may = edits ? edited[id_of<kScanThreads>(0, i)] : x[i];
    if (may > best) {
      best = may;
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
    const float best_logit = key_value(best_key);
    const float raw = raw_logit(p, spec, best_logit, row_id);
    if (lane == 0) {
      row.log_sum = good ? log(total) : 0.0;
      row.max = row_max;
      row.best = best_logit;
      row.best_id = good && fabsf(best_logit) < INFINITY ? row_id : -1;
      if (row.best_id < 0)
        give(p, s, -1, 0.0f);
      else if (spec.temperature == 0.0f)
        give(p, s, row.best_id, logprob(raw, row.max, row.log_sum));
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

}  // namespace

void launch_scan(const SampleParams& p, const Scratch& scratch, Launch launch) {
  const int chunks = static_cast<int>(chunks_of(p.vocab));
  launch_kernel("sample: scan", scan_kernel,
                static_cast<unsigned>(p.S) * static_cast<unsigned>(chunks), kScanThreads, 0,
                launch.stream, p, scratch, chunks, rows_aligned(p));
}

}  // namespace mla::cuda::sampling
