// Embedding, norms, RoPE with the cache write, combine. bfloat16 is read and written 8 values
// (16 bytes) at a time; each result is rounded once. Compiled with --fmad=false: a fused
// multiply-add is one that is written.
#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"

namespace mla::cuda {
namespace {

constexpr int kVector = 8;  // bf16 values of one access

__device__ void unpack(uint4 packed, float (&x)[kVector]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_float(words[i]);
    x[2 * i + 1] = high_float(words[i]);
  }
}

__device__ uint4 pack(const float (&x)[kVector]) {
  return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
          pack_bf16(x[6], x[7])};
}

__device__ void load_floats(const float* from, float (&x)[kVector]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0];
  const float4 high = reinterpret_cast<const float4*>(from)[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// The sum over a warp, in all lanes the same bits: x + y is y + x.
__device__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ float rms_factor(float sum_of_squares, int dim, float eps) {
  return __frcp_rn(__fsqrt_rn(__fdiv_rn(sum_of_squares, static_cast<float>(dim)) + eps));
}

// Threads that serve rows of `vectors` vectors: whole warps, at most `most`.
int threads_for(int64_t vectors, int most) {
  return static_cast<int>(std::min<int64_t>((vectors + 31) / 32 * 32, most));
}

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

struct NormArgs {
  const uint16_t* x;  // rows x_stride apart
  int64_t x_stride;
  uint16_t* residual;   // x again where x + delta is to be kept; else null
  const float* delta;   // rows of dim, or null
  const float* weight;  // [dim]
  const int32_t* rows;  // or null
  uint16_t* out;        // rows of dim
  int dim;
  float eps;
};

constexpr int kNormThreads = 256;
constexpr int kMaxPerThread = 8;  // vectors of a row that a thread keeps in registers

// One block a row, thread i has vectors i, i + blockDim, … The sum of squares runs in order in a
// thread, then over the lanes of a warp, then over warps in order; blockDim follows from dim.
template <int PerThread>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(NormArgs a) {
  begin_kernel();
  __shared__ float warp_sums[kNormThreads / 32];
  const int64_t t = blockIdx.x, row = a.rows ? a.rows[t] : t;
  const int vectors = a.dim / kVector;
  float x[PerThread][kVector], weight[PerThread][kVector];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PerThread; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v >= vectors) continue;
    unpack(*reinterpret_cast<const uint4*>(a.x + row * a.x_stride + v * kVector), x[i]);
    load_floats(a.weight + v * kVector, weight[i]);
    if (a.delta) {
      float delta[kVector];
      load_floats(a.delta + row * a.dim + v * kVector, delta);
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[i][j] += delta[j];
      const uint4 rounded = pack(x[i]);
      if (a.residual)
        *reinterpret_cast<uint4*>(a.residual + row * a.x_stride + v * kVector) = rounded;
      unpack(rounded, x[i]);
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum = fmaf(x[i][j], x[i][j], sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = warp_sums[0];
  for (int w = 1; w < blockDim.x / 32; ++w) sum += warp_sums[w];
  const float factor = rms_factor(sum, a.dim, a.eps);
#pragma unroll
  for (int i = 0; i < PerThread; ++i) {
    const int v = threadIdx.x + i * blockDim.x;
    if (v >= vectors) continue;
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[i][j] = x[i][j] * factor * weight[i][j];
    *reinterpret_cast<uint4*>(a.out + t * a.dim + v * kVector) = pack(x[i]);
  }
}

void launch_norm(const NormArgs& args, int64_t rows, cudaStream_t stream) {
  if (rows == 0) return;
  const int vectors = args.dim / kVector;
  const int threads = threads_for(vectors, kNormThreads);
  const int per_thread = (vectors + threads - 1) / threads;
  if (args.dim % kVector != 0 || args.x_stride % kVector != 0 || per_thread > kMaxPerThread)
    fail("CUDA: a norm of {} values, rows {} apart: want multiples of {} and at most {} values",
         args.dim, args.x_stride, kVector, kNormThreads * kMaxPerThread * kVector);
  const auto kernel = per_thread == 1   ? norm_kernel<1>
                      : per_thread == 2 ? norm_kernel<2>
                      : per_thread <= 4 ? norm_kernel<4>
                                        : norm_kernel<8>;
  launch_kernel("norm", kernel, static_cast<unsigned>(rows), threads, 0, stream, args);
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

// Blocks (token, piece of H).
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const uint4* expert_out, const float* weights, uint4* residual, int vectors,
                   int K, int slots) {
  begin_kernel();
  const int64_t t = blockIdx.x;
  const int v = blockIdx.y * kCombineThreads + threadIdx.x;
  if (v >= vectors) return;
  const uint4* from = expert_out + t * slots * vectors + v;
  const uint4 old = residual[t * vectors + v];
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
  float x[kVector];
  unpack(old, x);
#pragma unroll
  for (int j = 0; j < kVector; ++j) x[j] = sum[j] + x[j];
  residual[t * vectors + v] = pack(x);
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
  args.delta = p.delta;
  args.weight = p.weight;
  args.rows = p.rows;
  args.out = static_cast<uint16_t*>(p.out);
  args.dim = static_cast<int>(p.H);
  args.eps = p.eps;
  launch_norm(args, p.T, launch.stream);
}

void norm(const NormParams& p, Launch launch) {
  NormArgs args = {};
  args.x = static_cast<const uint16_t*>(p.x);
  args.x_stride = p.x_stride;
  args.weight = p.weight;
  args.out = static_cast<uint16_t*>(p.out);
  args.dim = static_cast<int>(p.dim);
  args.eps = p.eps;
  launch_norm(args, p.T, launch.stream);
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
  launch_kernel("combine", combine_kernel, grid, kCombineThreads, 0, launch.stream,
                static_cast<const uint4*>(p.expert_out), p.weights, static_cast<uint4*>(p.residual),
                vectors, p.K, p.K + p.S);
}

}  // namespace mla::cuda
