// The launchers of the CUDA ops, by file. Each enqueues on the stream and returns; arguments and
// layouts are those of kernels/ops.h. Dims are V2-Lite's where ModelShape is refused otherwise:
// P 128, R 64, V 128, L 512; all other sizes are multiples of 16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/ops.h"

namespace mla::cuda {

inline constexpr int kP = 128, kR = 64, kV = 128, kL = 512;
inline constexpr int kQK = kP + kR;  // columns of a query head
inline constexpr int kKV = kP + kV;  // columns of a head in the workspace
inline constexpr int kCacheRow = kL + kR;

// The most that the kernels take.
inline constexpr int kMaxMatrices = 192;  // of a grouped product: experts, routed and shared
inline constexpr int kMaxTopK = 16;       // routed experts of a token
inline constexpr int kMaxNorm = 16384;    // elements of a normed row
inline constexpr int kMaxVocab = 524288;
inline constexpr int kMaxSamples = 65536;  // sampled rows

// What a launcher needs to know of the device.
struct Launch {
  cudaStream_t stream;
  int sms;
  int device = 0;            // the current one of the thread
  int32_t* taken = nullptr;  // device memory of the stream's own, zero: see gemm_tile.cu
};

// pointwise.cu
void embed(const EmbedParams&, Launch);
void add_norm(const AddNormParams&, Launch);
void norm(const NormParams&, Launch);
void rope_cache(const RopeCacheParams&, Launch);
void combine(const CombineParams&, Launch);
void stamp(uint64_t* at, Launch);  // %globaltimer
void join_columns(const JoinColumnsParams&, Launch);
// out [count] = the sum of parts [ranks, count], bf16, in order of ranks, rounded once. `count` is
// a multiple of 8.
void sum_ranks(const void* parts, int ranks, int64_t count, void* out, Launch);

// peer_reduce.cu: what the ranks of a group, each on a device of one host, add over each other's
// memory.
inline constexpr int kMaxPeers = 8;
inline constexpr int kMaxPeerRows = 2048;
struct PeerBuffers {
  int rank, size;
  const void* partial[kMaxPeers];  // [rows, H] bf16 of every rank
  uint32_t* flags[kMaxPeers];  // [kMaxPeers, kMaxPeerRows] of every rank: turn of each rank's row
  uint32_t* turns;             // [kMaxPeerRows] of this rank
  const uint32_t* stop;        // not 0: nobody waits any more, and results mean nothing
};
// residual += the sum of the partials, rounded once; out = RMSNorm(residual)·weight. p.delta and
// p.rows are not looked at. The partials may be written again once the next but one of these calls
// is launched, from whatever rank.
void reduce_add_norm(const PeerBuffers&, const AddNormParams&, Launch);
// sum [rows, H] alone.
void reduce_rows(const PeerBuffers&, void* sum, int64_t rows, int64_t H, Launch);

// router.cu: ids and weights from p.logits, which are there.
void route(const RouterParams&, Launch);

// The routed slots of a call of experts(), grouped by expert in a stable order. Device memory.
struct Grouping {
  int32_t* begin;   // [E + 1] of `slots`
  int32_t* slots;   // [T·K] t·(K+S) + k, grouped by expert, in order of t then k
  int32_t* counts;  // [blocks of kGroupBlock tokens, E] scratch
};
inline constexpr int kGroupBlock = 256;  // tokens
void group_slots(const ExpertsParams&, const Grouping&, Launch);
// to [T·K, H]: row i is x row slots[i] / (K+S); rows past begin[E] are not written.
void gather_rows(const ExpertsParams&, const Grouping&, void* to, Launch);

// mla_prefill.cu
void mla_prefill(const MlaPrefillParams&, Launch);

// mla_decode.cu: O_lat [D, N, L] of q_lat and the rope columns of q. `partial` holds fp32 of every
// split: [max_splits, N, L] then [max_splits, N, 2] (max, sum); `arrivals` [D] and `taken` [N / 16,
// rounded up] are zero between calls. The cache and what says where its rows are was written before
// the kernel in front of this one, which settles its inputs (ptx.cuh).
void mla_decode(const MlaDecodeParams&, float* partial, int64_t max_splits, int32_t* arrivals,
                int32_t* taken, Launch);

// sample.cu
size_t sample_scratch_bytes(int64_t max_samples, int64_t vocab);
void sample(const SampleParams&, void* scratch, Launch);

}  // namespace mla::cuda
