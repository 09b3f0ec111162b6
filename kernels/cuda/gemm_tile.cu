// Products of many rows: tiles of 128 rows of A by 256 rows of W.
//
// A persistent block of one producer warp and two consumer warpgroups. The producer fills a ring of
// stages of 64 columns by TMA; each warpgroup multiplies 64 rows of A by the 256 of W (wgmma
// m64n256k16). Outputs are exchanged within quads of lanes, so that a lane stores 16 bytes and a
// quad 64 that are neighbours; nothing waits for these stores.
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemm_jobs.cuh"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace mla::cuda {
namespace {

constexpr int kTileA = 128, kTileW = 256, kStages = 4;
constexpr int kBytesA = kTileA * 128, kBytesW = kTileW * 128;  // of a stage
constexpr int kThreads = 384;

using Jobs = JobList<kTileA, kTileW>;

struct Barriers {
  uint64_t full[kStages], empty[kStages];
};

constexpr int kSharedBytes =
    kStages * (kBytesA + kBytesW) + static_cast<int>(sizeof(Barriers) + sizeof(Jobs::Storage));
static_assert(kSharedBytes <= 232448, "the most that a block can have");

// Where a thread's two rows go: lane/4 and 8 more of the warp's 16. Null: nowhere.
struct OutputRows {
  char* row[2];

  __device__ OutputRows(const GemmArgs& g, const Job& job, int first_row, int element) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_row + threadIdx.x % 32 / 4 + 8 * half;
      row[half] = i < job.rows
                      ? static_cast<char*>(g.out) +
                            (output_row(job, i) * g.out_stride + job.matrix * g.out_step) * element
                      : nullptr;
    }
  }
};

// The thread's part of four blocks of 8 bf16 columns, from column `first` on, of one row: packed[i]
// is its pair of block i. Afterwards it has the whole of block lane%4.
__device__ void store_blocks(char* row, int first, int columns, uint32_t (&packed)[4]) {
  const int lane = threadIdx.x % 32, column = first + lane % 4 * 8;
  transpose_quad(packed, lane);
  if (row && column < columns)
    *reinterpret_cast<uint4*>(row + column * 2) =
        make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// Two blocks of 8 fp32 columns: lanes 0 and 2 of a quad get the first, 1 and 3 the second, 4
// columns each.
__device__ void store_blocks(char* row, int first, int columns, float2 a, float2 b) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2;
  const float2 sent = odd ? a : b, kept = odd ? b : a;
  const float2 got = make_float2(__shfl_xor_sync(~0u, sent.x, 1), __shfl_xor_sync(~0u, sent.y, 1));
  const int column = first + 8 * (lane % 2) + 4 * (lane % 4 / 2);
  if (row && column < columns)
    *reinterpret_cast<float4*>(row + column * 4) =
        odd ? make_float4(got.x, got.y, kept.x, kept.y) : make_float4(kept.x, kept.y, got.x, got.y);
}

// The 16 rows of this warp, 256 columns of W.
template <Epilogue E>
__device__ void write_tile(const GemmArgs& g, const Job& job, const float (&d)[128],
                           const OutputRows& out) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* x = d + 2 * half;  // block j is x[4j], x[4j + 1]
    if constexpr (E == Epilogue::f32) {
#pragma unroll
      for (int j = 0; j < 32; j += 2)
        store_blocks(out.row[half], job.w_row + 8 * j, g.n, make_float2(x[4 * j], x[4 * j + 1]),
                     make_float2(x[4 * j + 4], x[4 * j + 5]));
    } else if constexpr (E == Epilogue::bf16) {
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[i] = pack_bf16(x[4 * (j + i)], x[4 * (j + i) + 1]);
        store_blocks(out.row[half], job.w_row + 8 * j, g.n, packed);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 16; j += 4) {  // blocks of the output: gate and up of it are neighbours
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* gate = x + 8 * (j + i);
          const float* up = gate + 4;
          packed[i] = pack_bf16(__fmul_rn(silu(gate[0]), up[0]), __fmul_rn(silu(gate[1]), up[1]));
        }
        store_blocks(out.row[half], job.w_row / 2 + 8 * j, g.n / 2, packed);
      }
    }
  }
}

template <Epilogue E>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_tile_kernel(const __grid_constant__ GemmArgs g, const __grid_constant__ GemmMaps maps) {
  begin_kernel();
  extern __shared__ __align__(1024) char shared[];
  char* stages_a = shared;
  char* stages_w = shared + kStages * kBytesA;
  Barriers& barriers = *reinterpret_cast<Barriers*>(stages_w + kStages * kBytesW);
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
    const OutputRows out(g, j, warp * 16, E == Epilogue::f32 ? 4 : 2);
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
    write_tile<E>(g, j, d, out);
  }
}

template <Epilogue E>
void launch(const Gemm& g, Launch launch) {
  static std::atomic<uint64_t> told{0};
  allow_shared_memory(gemm_tile_kernel<E>, kSharedBytes, launch.device, told);
  launch_kernel("gemm_tile", gemm_tile_kernel<E>, launch.sms, kThreads, kSharedBytes, launch.stream,
                gemm_args(g), gemm_maps(g, kTileA / 2, kTileW));
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
