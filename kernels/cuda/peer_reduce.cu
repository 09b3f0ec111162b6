// All-reduce, add and RMSNorm in one kernel, over peer memory: a block has a row, says to the other
// ranks that its partial is there, waits for theirs, and reads them where they are.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/norm.cuh"

namespace mla::cuda {
namespace {

__device__ void store_release(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
// Memory that another device has written.
__device__ uint4 load_peer(const uint4* at) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}

// The sum of the ranks' partials, in fp32 in their order, rounded once.
struct PeerSum {
  static constexpr bool kAny = true;
  const PeerBuffers& peers;
  __device__ uint4 rounded(int64_t at) const {
    float sum[kVector];
    unpack(load_peer(
               reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(peers.partial[0]) + at)),
           sum);
    for (int rank = 1; rank < peers.size; ++rank) {
      float x[kVector];
      unpack(load_peer(reinterpret_cast<const uint4*>(
                 static_cast<const uint16_t*>(peers.partial[rank]) + at)),
             x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += x[j];
    }
    return pack(sum);
  }
  __device__ void load(int64_t at, float (&x)[kVector]) const { unpack(rounded(at), x); }
};

// Every rank's partial of the block's row is there when it returns. A row's turns go up by one an
// all-reduce on every rank alike, so a rank waits for the turn that it has itself; nobody is ahead
// by more than one. A block waits for those of its row alone. More blocks than have a place are
// there where rows are many: as places are given in the order of block numbers, the lowest row that
// is not done has one on every rank, and none waits for ever.
__device__ void meet(const PeerBuffers& p) {
  const int row = blockIdx.x, other = threadIdx.x;
  __shared__ uint32_t turn;
  if (threadIdx.x == 0) turn = p.turns[row] + 1;
  __syncthreads();
  if (other < p.size && other != p.rank) {
    __threadfence_system();
    store_release(p.flags[other] + p.rank * kMaxPeerRows + row, turn);
    const uint32_t* flag = p.flags[p.rank] + other * kMaxPeerRows + row;
    for (uint32_t spins = 1; static_cast<int32_t>(load_acquire(flag) - turn) < 0; ++spins)
      if (spins % 1024 == 0 && load_acquire(p.stop) != 0) break;
  }
  __syncthreads();
  if (threadIdx.x == 0) p.turns[row] = turn;
}

template <int PerThread>
__global__ void __launch_bounds__(kNormThreads)
    reduce_add_norm_kernel(PeerBuffers peers, NormArgs a) {
  begin_kernel();
  meet(peers);
  norm_row<PerThread>(a, PeerSum{peers});
}

__global__ void __launch_bounds__(kNormThreads)
    reduce_kernel(PeerBuffers peers, uint4* sum, int vectors) {
  begin_kernel();
  meet(peers);
  const int64_t row = blockIdx.x;
  for (int v = threadIdx.x; v < vectors; v += blockDim.x)
    sum[row * vectors + v] = PeerSum{peers}.rounded((row * vectors + v) * kVector);
}

void check_rows(int64_t rows) {
  if (rows > kMaxPeerRows) fail("a fused all-reduce of {} rows, at most {}", rows, kMaxPeerRows);
}

}  // namespace

void reduce_add_norm(const PeerBuffers& peers, const AddNormParams& p, Launch launch) {
  if (p.T == 0) return;
  check_rows(p.T);
  NormArgs args = {};
  args.x = args.residual = static_cast<uint16_t*>(p.residual);
  args.x_stride = p.H;
  args.weight = p.weight;
  args.out = static_cast<uint16_t*>(p.out);
  args.dim = static_cast<int>(p.H);
  args.eps = p.eps;
  const NormShape shape = norm_shape(args.dim, args.x_stride);
  const auto kernel = shape.per_thread == 1   ? reduce_add_norm_kernel<1>
                      : shape.per_thread == 2 ? reduce_add_norm_kernel<2>
                      : shape.per_thread <= 4 ? reduce_add_norm_kernel<4>
                                              : reduce_add_norm_kernel<8>;
  launch_kernel("reduce_add_norm", kernel, static_cast<unsigned>(p.T), shape.threads, 0,
                launch.stream, peers, args);
}

void reduce_rows(const PeerBuffers& peers, void* sum, int64_t rows, int64_t H, Launch launch) {
  if (rows == 0) return;
  check_rows(rows);
  const NormShape shape = norm_shape(static_cast<int>(H), H);
  launch_kernel("reduce_rows", reduce_kernel, static_cast<unsigned>(rows), shape.threads, 0,
                launch.stream, peers, static_cast<uint4*>(sum), static_cast<int>(H / kVector));
}

}  // namespace mla::cuda
