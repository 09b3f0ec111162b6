// Products of many rows: tiles of 128 rows of A by 256 rows of W.
//
// A persistent block of one producer thread and two consumer warpgroups. The producer fills a ring
// of stages of 64 columns by TMA; each warpgroup multiplies 64 rows of A by the 256 of W (wgmma
// m64n256k16). Where half of a tile's rows or columns lie past the end of the matrix, that half is
// not multiplied. Outputs are exchanged within quads of lanes, so that a lane stores 16 bytes and a
// quad 64 that are neighbours; nothing waits for these stores. W of a block's first stages does not
// wait for the kernel before this one.
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

// Jobs on their way from the producer to the consumers.
constexpr int kTold = 2;

struct Barriers {
  uint64_t full[kStages], empty[kStages];
  uint64_t told[kTold], heard[kTold];
  Job jobs[kTold];  // without rows: there are no more
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

// The ring: what the producer fills and the consumers read.
struct Stages {
  char* a;  // [kStages][kTileA, 64], swizzled
  char* w;  // [kStages][kTileW, 64]
  Barriers& barriers;
};

// The blocks' share of the list. Tiles differ in size, so a block takes its next job when it is
// free: jobs that run at one time stay neighbours in the list, which share rows of A and of W in
// the L2 cache. A block's first job has the block's number; `taken` counts the others.
struct Queue {
  int32_t* taken;  // zero between kernels
  int count;       // of jobs
  int asked = 0;

  // A block asks once for each job it has, so that `count` asks are all. The answer is there when
  // it is used.
  __device__ void ask() { asked = atomicAdd(taken, 1); }
  __device__ int answer() const {
    if (asked == count - 1) *taken = 0;  // nobody asks any more
    return static_cast<int>(gridDim.x) + asked;
  }
};

// Rows past the 64th of a tile are not read where none of them counts.
__device__ bool has_upper_rows(const Job& j) { return j.rows > kTileA / 2; }

// By one thread: a step's part of W, first, then that of A, to an empty stage.
__device__ void load_w(const GemmMaps& maps, const Job& j, const Stages& s, int stage, int step) {
  uint64_t* full = &s.barriers.full[stage];
  barrier_expect(full, (has_upper_rows(j) ? kBytesA : kBytesA / 2) + kBytesW);
  tma_load(s.w + stage * kBytesW, maps.w, full, step * 64, j.w_row, j.matrix);
}
__device__ void load_a(const GemmMaps& maps, const Job& j, const Stages& s, int stage, int step) {
  const CUtensorMap& a = j.shared_map ? maps.a_shared : maps.a;
  uint64_t* full = &s.barriers.full[stage];
  char* to = s.a + stage * kBytesA;
  const int column = j.a_column + step * 64;
  tma_load(to, a, full, column, j.a_row, 0);
  if (has_upper_rows(j)) tma_load(to + kBytesA / 2, a, full, column, j.a_row_64, 0);
}

// By one thread: steps [begin, end) of a tile, of those before `has_w` only A.
__device__ void load_tile(const GemmMaps& maps, const Job& j, const Stages& s, int begin, int end,
                          int has_w, Ring& ring) {
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    if (step >= has_w) {
      barrier_wait(&s.barriers.empty[ring.stage], ring.parity ^ 1);
      load_w(maps, j, s, ring.stage, step);
    }
    load_a(maps, j, s, ring.stage, step);
    ring.next(kStages);
  }
}

// By a warpgroup: its 64 rows of A by the first `Columns` rows of W of the tile.
template <int Columns>
__device__ void multiply_tile(const Stages& s, int steps, Ring& ring, float (&d)[Columns / 2]) {
  const int consumer = threadIdx.x / 128 - 1;
  const bool leader = threadIdx.x % 128 == 0;
  int previous = 0;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(&s.barriers.full[ring.stage], ring.parity);
    const uint64_t a = k_major(s.a + ring.stage * kBytesA + consumer * (kBytesA / 2));
    const uint64_t w = k_major(s.w + ring.stage * kBytesW);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<Columns>(d, a + k * kStepK, w + k * kStepK, (step | k) != 0);
    wgmma_commit();
    // One product stays in flight; the stage of the one before it is free.
    wgmma_wait<1>();
    if (leader && step > 0) barrier_arrive(&s.barriers.empty[previous]);
    previous = ring.stage;
    ring.next(kStages);
  }
  wgmma_wait<0>();
  pin(d);
  if (leader) barrier_arrive(&s.barriers.empty[previous]);
}

// By a warpgroup none of whose rows counts. A wait cannot tell a phase from the next but one, so no
// warp may fall behind: what the products do elsewhere a barrier does here.
__device__ void skip_tile(const Stages& s, int steps, Ring& ring) {
  const int consumer = threadIdx.x / 128 - 1;
  const bool leader = threadIdx.x % 128 == 0;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(&s.barriers.full[ring.stage], ring.parity);
    named_barrier(1 + consumer, 128);
    if (leader) barrier_arrive(&s.barriers.empty[ring.stage]);
    ring.next(kStages);
  }
}

// By one thread: finds the jobs, tells the consumers and loads them. The next job is looked up
// while the ring is full.
__device__ void produce(const GemmMaps& maps, const Jobs& jobs, const Stages& s, int steps,
                        int32_t* taken) {
  Queue queue{taken, jobs.count()};
  Ring ring, told;
  const auto tell = [&](int number) {
    barrier_wait(&s.barriers.heard[told.stage], told.parity ^ 1);
    s.barriers.jobs[told.stage] = number < queue.count ? jobs[number] : Job{};
    barrier_arrive(&s.barriers.told[told.stage]);
  };
  const int begin = min(steps, kStages);
  tell(blockIdx.x);
  int has_w = 0;
  if (s.barriers.jobs[0].rows > 0)
    for (; has_w < begin; ++has_w) load_w(maps, s.barriers.jobs[0], s, has_w, has_w);
  settle_inputs();  // from here on `taken` is no other product's
  while (true) {
    const Job job = s.barriers.jobs[told.stage];
    told.next(kTold);
    if (job.rows == 0) return;
    queue.ask();
    load_tile(maps, job, s, 0, begin, has_w, ring);
    has_w = 0;
    tell(queue.answer());
    load_tile(maps, job, s, begin, steps, 0, ring);
  }
}

// By two warpgroups.
template <Epilogue E>
__device__ void consume(const GemmArgs& g, const Stages& s, int steps) {
  const int warp = threadIdx.x / 32 - 4;
  Ring ring, told;
  float d[128];
  while (true) {
    barrier_wait(&s.barriers.told[told.stage], told.parity);
    const Job job = s.barriers.jobs[told.stage];
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.barriers.heard[told.stage]);
    told.next(kTold);
    if (job.rows == 0) return;
    if (warp / 4 * 64 >= job.rows) {
      skip_tile(s, steps, ring);
      continue;
    }
    const OutputRows out(g, job, warp * 16, E == Epilogue::f32 ? 4 : 2);
    if (g.n - job.w_row > kTileW / 2) {
      multiply_tile<kTileW>(s, steps, ring, d);
    } else {
      multiply_tile<kTileW / 2>(s, steps, ring, reinterpret_cast<float(&)[64]>(d));
    }
    write_tile<E>(g, job, d, out);
  }
}

template <Epilogue E>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_tile_kernel(const __grid_constant__ GemmArgs g, const __grid_constant__ GemmMaps maps,
                     int32_t* taken) {
  extern __shared__ __align__(1024) char shared[];
  char* stages_w = shared + kStages * kBytesA;
  Barriers& barriers = *reinterpret_cast<Barriers*>(stages_w + kStages * kBytesW);
  const Stages stages{shared, stages_w, barriers};
  Jobs::Storage& storage = *reinterpret_cast<Jobs::Storage*>(&barriers + 1);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&barriers.full[i], 1);
      barrier_init(&barriers.empty[i], 2);
    }
    for (int i = 0; i < kTold; ++i) {
      barrier_init(&barriers.told[i], 1);
      barrier_init(&barriers.heard[i], 8);  // warps
    }
    barrier_init_done();
  }
  const Jobs jobs(g, storage);
  __syncthreads();
  const int steps = (g.k + 63) / 64;
  if (threadIdx.x < 128) {
    registers_down<56>();
    if (threadIdx.x > 0) return settle_inputs();
    produce(maps, jobs, stages, steps, taken);
  } else {
    registers_up<224>();
    settle_inputs();
    consume<E>(g, stages, steps);
  }
}

template <Epilogue E>
void launch(const Gemm& g, Launch to) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(gemm_tile_kernel<E>, kSharedBytes, to.device, allowed);
  launch_kernel("gemm_tile", gemm_tile_kernel<E>, to.sms, kThreads, kSharedBytes, to.stream,
                gemm_args(g), gemm_maps(g, kTileA / 2, kTileW), to.taken);
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
