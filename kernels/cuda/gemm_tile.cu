// Products of many rows: tiles of 128 rows of A by 256 rows of W.
//
// A persistent block of one producer warp and two consumer warpgroups. The producer fills a ring of
// stages of 64 columns by TMA; each warpgroup multiplies 64 rows of A by the 256 of W (wgmma
// m64n256k16) and writes its outputs through shared memory in whole lines.
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemm_jobs.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace mla::cuda {
namespace {

constexpr int kTileA = 128, kTileW = 256, kStages = 4;
constexpr int kBytesA = kTileA * 128, kBytesW = kTileW * 128;  // of a stage
constexpr int kPitch = 256 + 16;  // bytes of a staged row: 16 more than a line, against conflicts
constexpr int kStagingBytes = 8 * 16 * kPitch;  // 16 rows a consumer warp
constexpr int kThreads = 384;

using Jobs = JobList<kTileA, kTileW>;

struct Barriers {
  uint64_t full[kStages], empty[kStages];
};

constexpr int kSharedBytes = kStages * (kBytesA + kBytesW) + kStagingBytes +
                             static_cast<int>(sizeof(Barriers) + sizeof(Jobs::Storage));
static_assert(kSharedBytes <= 232448, "the most that a block can have");

// Writes 16 staged rows of `bytes` (up to 256) each: a half warp a row, 16 bytes a lane.
__device__ void write_staged(const char* staged, const Job& job, int first_row, char* out,
                             int64_t row_bytes, int bytes) {
  const int lane = threadIdx.x % 32, column = lane % 16 * 16;
#pragma unroll
  for (int r = 0; r < 16; r += 2) {
    const int row = r + lane / 16, i = first_row + row;
    if (i >= job.rows || column >= bytes) continue;
    *reinterpret_cast<uint4*>(out + output_row(job, i) * row_bytes + column) =
        *reinterpret_cast<const uint4*>(staged + row * kPitch + column);
  }
}

// The 16 rows of this warp, 256 columns of W, in pieces of 256 bytes of output.
template <Epilogue E>
__device__ void write_tile(const GemmArgs& g, const Job& job, const float (&d)[128], int first_row,
                           char* staged) {
  constexpr int kElement = E == Epilogue::f32 ? 4 : 2;
  constexpr int kColumns = 256 / kElement;  // of a piece
  constexpr int kPieces = (E == Epilogue::silu ? 128 : 256) / kColumns;
  const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
  const int columns = E == Epilogue::silu ? g.n / 2 : g.n;
  const int first = E == Epilogue::silu ? job.w_row / 2 : job.w_row;
  char* out = static_cast<char*>(g.out) + (job.matrix * g.out_step + first) * kElement;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    char* to = staged + row * kPitch + pair * kElement;
    if constexpr (E == Epilogue::silu) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* gate = d + 8 * j + 2 * half;
          const float* up = gate + 4;
          *reinterpret_cast<uint32_t*>(to + half * 8 * kPitch + j * 16) =
              pack_bf16(__fmul_rn(silu(gate[0]), up[0]), __fmul_rn(silu(gate[1]), up[1]));
        }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* x = d + 4 * (piece * kColumns / 8 + j) + 2 * half;
          char* at = to + half * 8 * kPitch + j * 8 * kElement;
          if constexpr (E == Epilogue::f32) {
            *reinterpret_cast<float2*>(at) = make_float2(x[0], x[1]);
          } else {
            *reinterpret_cast<uint32_t*>(at) = pack_bf16(x[0], x[1]);
          }
        }
    }
    __syncwarp();
    const int left = columns - first - piece * kColumns;
    if (left > 0)
      write_staged(staged, job, first_row, out + piece * 256, g.out_stride * kElement,
                   min(left, kColumns) * kElement);
    __syncwarp();
  }
}

template <Epilogue E>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_tile_kernel(const __grid_constant__ GemmArgs g, const __grid_constant__ GemmMaps maps) {
  extern __shared__ __align__(1024) char shared[];
  char* stages_a = shared;
  char* stages_w = shared + kStages * kBytesA;
  char* staging = stages_w + kStages * kBytesW;
  Barriers& barriers = *reinterpret_cast<Barriers*>(staging + kStagingBytes);
  Jobs::Storage& storage = *reinterpret_cast<Jobs::Storage*>(&barriers + 1);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&barriers.full[i], 1);
      barrier_init(&barriers.empty[i], 2);
    }
    barrier_init_done();
  }
  const Jobs jobs(g, storage);
  __syncthreads();
  const int count = jobs.count(), steps = (g.k + 63) / 64;
  Ring ring;

  if (threadIdx.x < 128) {
    registers_down<40>();
    if (threadIdx.x != 0) return;
    for (int job = blockIdx.x; job < count; job += gridDim.x) {
      const Job j = jobs[job];
      const CUtensorMap& a = j.shared_map ? maps.a_shared : maps.a;
      for (int step = 0; step < steps; ++step) {
        uint64_t* full = &barriers.full[ring.stage];
        char* to = stages_a + ring.stage * kBytesA;
        barrier_wait(&barriers.empty[ring.stage], ring.parity ^ 1);
        barrier_expect(full, kBytesA + kBytesW);
        tma_load(to, a, full, j.a_column + step * 64, j.a_row, 0);
        tma_load(to + kBytesA / 2, a, full, j.a_column + step * 64, j.a_row_64, 0);
        tma_load(stages_w + ring.stage * kBytesW, maps.w, full, step * 64, j.w_row, j.matrix);
        ring.next(kStages);
      }
    }
    return;
  }

  registers_up<232>();
  const int consumer = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  const bool leader = threadIdx.x % 128 == 0;
  float d[128];
  for (int job = blockIdx.x; job < count; job += gridDim.x) {
    const Job j = jobs[job];
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&barriers.full[ring.stage], ring.parity);
      const uint64_t a = k_major(stages_a + ring.stage * kBytesA + consumer * (kBytesA / 2));
      const uint64_t w = k_major(stages_w + ring.stage * kBytesW);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<256>(d, a + k * kStepK, w + k * kStepK, (step | k) != 0);
      wgmma_commit();
      // One product stays in flight; the stage of the one before it is free.
      wgmma_wait<1>();
      if (leader && step > 0) barrier_arrive(&barriers.empty[previous]);
      previous = ring.stage;
      ring.next(kStages);
    }
    wgmma_wait<0>();
    pin(d);
    if (leader) barrier_arrive(&barriers.empty[previous]);
    write_tile<E>(g, j, d, warp * 16, staging + warp * 16 * kPitch);
  }
}

template <Epilogue E>
void launch(const Gemm& g, Launch launch) {
  static const cudaError_t allowed = cudaFuncSetAttribute(
      gemm_tile_kernel<E>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check(allowed, "shared memory of gemm_tile");
  gemm_tile_kernel<E><<<launch.sms, kThreads, kSharedBytes, launch.stream>>>(
      gemm_args(g), gemm_maps(g, kTileA / 2, kTileW));
  check_launch("gemm_tile");
}

}  // namespace

void gemm_tile(const Gemm& g, Launch to) {
  switch (g.epilogue) {
    case Epilogue::bf16:
      return launch<Epilogue::bf16>(g, to);
    case Epilogue::f32:
      return launch<Epilogue::f32>(g, to);
    case Epilogue::silu:
      return launch<Epilogue::silu>(g, to);
  }
}

}  // namespace mla::cuda
