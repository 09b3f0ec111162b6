// Embedding, norms, RoPE with the cache write, combine, and what tensor parallelism adds: columns
// joined, sums over ranks. bfloat16 is read and written 8 values (16 bytes) at a time; each result
// is rounded once. Compiled with --fmad=false: a fused multiply-add is one that is written.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/norm.cuh"

namespace mla::cuda {
namespace {

// One block a row.
__global__ void embed_kernel(const int32_t* ids, const int32_t* sampled, const uint4* table,
                             uint4* out, int vectors) {
  begin_kernel();
  const int64_t t = blockIdx.x;
  int64_t id = ids[t];
  if (id < 0) id = sampled[-1 - id];
  for (int v = threadIdx.x; v < vectors; v += blockDim.x)
    out[t * vectors + v] = table[id * vectors + v];
}

template <int PerThread, class Delta>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(NormArgs a, Delta add) {
  begin_kernel();
  norm_row<PerThread>(a, add);
}

template <class Delta>
void launch_norm(const NormArgs& args, const Delta& add, int64_t rows, cudaStream_t stream) {
  if (rows == 0) return;
  const NormShape shape = norm_shape(args.dim, args.x_stride);
  const auto kernel = shape.per_thread == 1   ? norm_kernel<1, Delta>
                      : shape.per_thread == 2 ? norm_kernel<2, Delta>
                      : shape.per_thread <= 4 ? norm_kernel<4, Delta>
                                              : norm_kernel<8, Delta>;
  launch_kernel("norm", kernel, static_cast<unsigned>(rows), shape.threads, 0, stream, args, add);
}

// Rotates the 4 pairs of vector v of a rope row.
__device__ uint4 rotate(uint4 packed, const float* table, int v) {
  const float4 cos = reinterpret_cast<const float4*>(table)[v];
  const float4 sin = reinterpret_cast<const float4*>(table + kR / 2)[v];
  const float c[4] = {cos.x, cos.y, cos.z, cos.w}, s[4] = {sin.x, sin.y, sin.z, sin.w};
  float x[kVector], y[kVector];
  unpack(packed, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[2 * i] = x[2 * i] * c[i] - x[2 * i + 1] * s[i];
    y[2 * i + 1] = x[2 * i + 1] * c[i] + x[2 * i] * s[i];
  }
  return pack(y);
}

constexpr int kRopeVectors = kR / kVector;
constexpr int kLatentPerLane = kL / kVector / 32;

// One block a token: warp 0 writes the cache row, the others rotate q_pe of all heads.
__global__ void rope_cache_kernel(RopeCacheParams p) {
  begin_kernel();
  const int64_t t = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const float* table = p.rope_table + int64_t{max(p.positions[t], 0)} * kR;
  if (threadIdx.x >= 32) {
    uint16_t* q_pe = static_cast<uint16_t*>(p.q) + t * p.q_stride + kP;
    for (int i = threadIdx.x - 32; i < p.N * kRopeVectors; i += blockDim.x - 32) {
      const int v = i % kRopeVectors;
      auto* at = reinterpret_cast<uint4*>(q_pe + i / kRopeVectors * kQK) + v;
      *at = rotate(*at, table, v);
    }
    return;
  }
  const int64_t slot = p.slots[t];
  if (slot < 0) return;
  const auto* kv_a =
      reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.kv_a) + t * p.kv_stride);
  auto* row = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.cache) + slot * kCacheRow);
  float x[kLatentPerLane][kVector], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLatentPerLane; ++i) unpack(kv_a[lane + i * 32], x[i]);
  if (lane < kRopeVectors)
    row[kL / kVector + lane] = rotate(kv_a[kL / kVector + lane], table, lane);
#pragma unroll
  for (int i = 0; i < kLatentPerLane; ++i)
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum = fmaf(x[i][j], x[i][j], sum);
  const float factor = rms_factor(warp_sum(sum), kL, p.eps);
#pragma unroll
  for (int i = 0; i < kLatentPerLane; ++i) {
    float weight[kVector];
    load_floats(p.norm_weight + (lane + i * 32) * kVector, weight);
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[i][j] = x[i][j] * factor * weight[j];
    row[lane + i * 32] = pack(x[i]);
  }
}

constexpr int kCombineThreads = 128;
constexpr int kCombineSlots = 8;  // slots whose loads are in flight together

// Blocks (token, piece of H). `to` is the residual, unless the sum alone is wanted.
template <bool AddsResidual>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const uint4* expert_out, const float* weights, uint4* to, int vectors, int K,
                   int slots) {
  begin_kernel();
  const int64_t t = blockIdx.x;
  const int v = blockIdx.y * kCombineThreads + threadIdx.x;
  if (v >= vectors) return;
  const uint4* from = expert_out + t * slots * vectors + v;
  uint4 old = {};
  if (AddsResidual) old = to[t * vectors + v];
  float sum[kVector] = {};
  for (int first = 0; first < slots; first += kCombineSlots) {
    uint4 packed[kCombineSlots];
    float weight[kCombineSlots];
#pragma unroll
    for (int i = 0; i < kCombineSlots; ++i) {
      const int k = first + i;
      if (k < slots) packed[i] = __ldcs(from + int64_t{k} * vectors);
      weight[i] = k < K ? weights[t * K + k] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kCombineSlots; ++i) {
      if (first + i >= slots) break;
      float x[kVector];
      unpack(packed[i], x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] = fmaf(weight[i], x[j], sum[j]);
    }
  }
  if (AddsResidual) {
    float x[kVector];
    unpack(old, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] = sum[j] + x[j];
  }
  to[t * vectors + v] = pack(sum);
}

// Blocks (row, piece of a part, part).
__global__ void join_columns_kernel(JoinColumnsParams p) {
  begin_kernel();
  const int64_t r = blockIdx.x, c = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  const int64_t part = blockIdx.z, col = part * p.width + c;
  if (c < p.width && col < p.cols)
    p.out[r * p.cols + col] = p.parts[(part * p.rows + r) * p.width + c];
}

__global__ void sum_ranks_kernel(const uint4* parts, int ranks, int64_t vectors, uint4* out) {
  begin_kernel();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t v = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; v < vectors; v += stride) {
    float sum[kVector];
    unpack(parts[v], sum);
    for (int rank = 1; rank < ranks; ++rank) {
      float x[kVector];
      unpack(parts[rank * vectors + v], x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += x[j];
    }
    out[v] = pack(sum);
  }
}

__global__ void stamp_kernel(uint64_t* at) {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  *at = now;
}

void check_width(int64_t H) {
  if (H % kVector != 0) fail("CUDA: rows of {} values: want a multiple of {}", H, kVector);
}

}  // namespace

// Behind all that is in front of it: without programmatic dependence.
void stamp(uint64_t* at, Launch launch) {
  stamp_kernel<<<1, 1, 0, launch.stream>>>(at);
  MLA_CUDA_CHECK(cudaGetLastError());
}

void embed(const EmbedParams& p, Launch launch) {
  if (p.T == 0) return;
  check_width(p.table.cols);
  const int vectors = static_cast<int>(p.table.cols / kVector);
  launch_kernel("embed", embed_kernel, static_cast<unsigned>(p.T), threads_for(vectors, 256), 0,
                launch.stream, p.ids, p.sampled, static_cast<const uint4*>(p.table.data),
                static_cast<uint4*>(p.out), vectors);
}

void add_norm(const AddNormParams& p, Launch launch) {
  NormArgs args = {};
  args.x = static_cast<const uint16_t*>(p.residual);
  args.x_stride = p.H;
  args.residual = p.rows ? nullptr : static_cast<uint16_t*>(p.residual);
  args.weight = p.weight;
  args.rows = p.rows;
  args.out = static_cast<uint16_t*>(p.out);
  args.dim = static_cast<int>(p.H);
  args.eps = p.eps;
  if (p.delta_rounded) {
    launch_norm(args, RoundedDelta{static_cast<const uint16_t*>(p.delta_rounded)}, p.T,
                launch.stream);
  } else if (p.delta) {
    launch_norm(args, FloatDelta{p.delta}, p.T, launch.stream);
  } else {
    launch_norm(args, NoDelta{}, p.T, launch.stream);
  }
}

void norm(const NormParams& p, Launch launch) {
  NormArgs args = {};
  args.x = static_cast<const uint16_t*>(p.x);
  args.x_stride = p.x_stride;
  args.weight = p.weight;
  args.out = static_cast<uint16_t*>(p.out);
  args.dim = static_cast<int>(p.dim);
  args.eps = p.eps;
  launch_norm(args, NoDelta{}, p.T, launch.stream);
}

void rope_cache(const RopeCacheParams& p, Launch launch) {
  if (p.T == 0) return;
  const int threads = 32 + threads_for(int64_t{p.N} * kRopeVectors, 224);
  launch_kernel("rope_cache", rope_cache_kernel, static_cast<unsigned>(p.T), threads, 0,
                launch.stream, p);
}

void combine(const CombineParams& p, Launch launch) {
  if (p.T == 0) return;
  check_width(p.H);
  const int vectors = static_cast<int>(p.H / kVector);
  const dim3 grid(static_cast<unsigned>(p.T),
                  static_cast<unsigned>((vectors + kCombineThreads - 1) / kCombineThreads));
  launch_kernel("combine", p.sum ? combine_kernel<false> : combine_kernel<true>, grid,
                kCombineThreads, 0, launch.stream, static_cast<const uint4*>(p.expert_out),
                p.weights, static_cast<uint4*>(p.sum ? p.sum : p.residual), vectors, p.K,
                p.K + p.S);
}

void join_columns(const JoinColumnsParams& p, Launch launch) {
  if (p.rows == 0) return;
  constexpr unsigned kThreads = 256;
  const dim3 grid(static_cast<unsigned>(p.rows),
                  static_cast<unsigned>((p.width + kThreads - 1) / kThreads),
                  static_cast<unsigned>((p.cols + p.width - 1) / p.width));
  launch_kernel("join_columns", join_columns_kernel, grid, kThreads, 0, launch.stream, p);
}

void sum_ranks(const void* parts, int ranks, int64_t count, void* out, Launch launch) {
  if (count == 0) return;
  check_width(count);
  launch_kernel("sum_ranks", sum_ranks_kernel, static_cast<unsigned>(4 * launch.sms), 256, 0,
                launch.stream, static_cast<const uint4*>(parts), ranks, count / kVector,
                static_cast<uint4*>(out));
}

}  // namespace mla::cuda
