// Products of few rows: reading W is all the time. 64 rows of W are wgmma's first operand, 8 to 128
// rows of A its second.
//
// A persistent block of one consumer warpgroup and one producer warp; two blocks share a
// multiprocessor, so that some 180 KB are on their way to it at any time. The ring runs on from job
// to job: W of the next job streams while the outputs of this one are written. W does not wait for
// the kernel before this one either: the ring is full of it by the time the rows of A are there.
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemm_jobs.cuh"
#include "kernels/cuda/launch_kernel.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace mla::cuda {
namespace {

constexpr int kTileW = 64;
constexpr int kThreads = 160;
constexpr int kStagedTokens = 32;        // of the output at a time
constexpr int kPitch = kTileW * 4 + 16;  // bytes of a staged token, fp32; 16 against conflicts

template <int Tokens>
struct Shape {
  static constexpr int kPanels = Tokens <= 32 ? 2 : 1;  // of 64 columns in a stage
  static constexpr int kPanelW = kTileW * 128, kPanelA = Tokens * 128;
  static constexpr int kStage = kPanels * (kPanelW + kPanelA);
  static constexpr int kStages = 100 * 1024 / kStage < 8 ? 100 * 1024 / kStage : 8;
  using Jobs = JobList<Tokens, kTileW>;
  struct Barriers {
    uint64_t full[kStages], empty[kStages];
  };
  static constexpr int kStaging = (Tokens < kStagedTokens ? Tokens : kStagedTokens) * kPitch;
  static constexpr int kShared =
      kStages * kStage + kStaging +
      static_cast<int>(sizeof(Barriers) + sizeof(typename Jobs::Storage));
  static_assert(kShared <= 113 * 1024, "two blocks a multiprocessor");
};

// The job's outputs through shared memory, kStagedTokens at a time: registers hold columns
// of W's rows, memory wants rows of tokens.
template <int Tokens, Epilogue E>
__device__ void write_outputs(const GemmArgs& g, const Job& job, const float (&d)[Tokens / 2],
                              char* staged) {
  constexpr int kElement = E == Epilogue::f32 ? 4 : 2;
  constexpr int kOutputs = E == Epilogue::silu ? kTileW / 2 : kTileW;  // of a token
  constexpr int kStaged = Tokens < kStagedTokens ? Tokens : kStagedTokens;
  constexpr int kVectors = kOutputs * kElement / 16;  // of a token
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int columns = E == Epilogue::silu ? g.n / 2 : g.n;
  const int first = E == Epilogue::silu ? job.w_row / 2 : job.w_row;
  const int vectors = min(kOutputs, columns - first) * kElement / 16;
  char* out = static_cast<char*>(g.out) + (job.matrix * g.out_step + first) * kElement;
#pragma unroll
  for (int piece = 0; piece < Tokens / kStaged; ++piece) {
    if (piece * kStaged >= job.rows) break;
    named_barrier(1, 128);  // the piece before has been read
#pragma unroll
    for (int j = 0; j < kStaged / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* x = d + 4 * (piece * kStaged / 8 + j) + i;  // row lane/4; x[2]: 8 rows on
        char* to = staged + (8 * j + lane % 4 * 2 + i) * kPitch;
        if constexpr (E == Epilogue::silu) {
          reinterpret_cast<__nv_bfloat16*>(to)[warp * 8 + lane / 4] =
              __float2bfloat16_rn(__fmul_rn(silu(x[0]), x[2]));
        } else if constexpr (E == Epilogue::bf16) {
          __nv_bfloat16* row = reinterpret_cast<__nv_bfloat16*>(to) + warp * 16 + lane / 4;
          row[0] = __float2bfloat16_rn(x[0]);
          row[8] = __float2bfloat16_rn(x[2]);
        } else {
          float* row = reinterpret_cast<float*>(to) + warp * 16 + lane / 4;
          row[0] = x[0];
          row[8] = x[2];
        }
      }
    named_barrier(1, 128);
    const int tokens = min(kStaged, job.rows - piece * kStaged);
    for (int i = thread; i < tokens * kVectors; i += 128) {
      const int token = i / kVectors, vector = i % kVectors;
      if (vector >= vectors) continue;
      *reinterpret_cast<uint4*>(
          out + output_row(job, piece * kStaged + token) * g.out_stride * kElement + vector * 16) =
          *reinterpret_cast<const uint4*>(staged + token * kPitch + vector * 16);
    }
  }
}

template <int Tokens, Epilogue E>
__global__ void __launch_bounds__(kThreads, 2)
    gemm_stream_kernel(const __grid_constant__ GemmArgs g, const __grid_constant__ GemmMaps maps) {
  using S = Shape<Tokens>;
  extern __shared__ __align__(1024) char shared[];
  char* staging = shared + S::kStages * S::kStage;
  auto& barriers = *reinterpret_cast<typename S::Barriers*>(staging + S::kStaging);
  auto& storage = *reinterpret_cast<typename S::Jobs::Storage*>(&barriers + 1);

  if (threadIdx.x == 128) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(&barriers.full[i], 1);
      barrier_init(&barriers.empty[i], 1);
    }
    barrier_init_done();
  }
  const typename S::Jobs jobs(g, storage);
  __syncthreads();
  const int count = jobs.count(), steps = (g.k + S::kPanels * 64 - 1) / (S::kPanels * 64);
  Ring ring;

  if (threadIdx.x >= 128) {
    if (threadIdx.x != 128) return settle_inputs();
    const auto load_w = [&](const Job& j, int stage, int step) {
      barrier_expect(&barriers.full[stage], S::kStage);
#pragma unroll
      for (int p = 0; p < S::kPanels; ++p)
        tma_load(shared + stage * S::kStage + p * S::kPanelW, maps.w, &barriers.full[stage],
                 (step * S::kPanels + p) * 64, j.w_row, j.matrix);
    };
    int ahead = 0;  // stages that have their W
    for (int job = blockIdx.x; job < count && ahead < S::kStages; job += gridDim.x) {
      const Job j = jobs[job];
      for (int step = 0; step < steps && ahead < S::kStages; ++step) load_w(j, ahead++, step);
    }
    settle_inputs();
    for (int job = blockIdx.x; job < count; job += gridDim.x) {
      const Job j = jobs[job];
      const CUtensorMap& a = j.shared_map ? maps.a_shared : maps.a;
      for (int step = 0; step < steps; ++step) {
        if (ahead > 0) {
          --ahead;
        } else {
          barrier_wait(&barriers.empty[ring.stage], ring.parity ^ 1);
          load_w(j, ring.stage, step);
        }
        char* to = shared + ring.stage * S::kStage + S::kPanels * S::kPanelW;
#pragma unroll
        for (int p = 0; p < S::kPanels; ++p)
          tma_load(to + p * S::kPanelA, a, &barriers.full[ring.stage],
                   j.a_column + (step * S::kPanels + p) * 64, j.a_row, 0);
        ring.next(S::kStages);
      }
    }
    return;
  }
  settle_inputs();

  float d[Tokens / 2];
  for (int job = blockIdx.x; job < count; job += gridDim.x) {
    const Job j = jobs[job];
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(&barriers.full[ring.stage], ring.parity);
      const char* stage = shared + ring.stage * S::kStage;
      wgmma_fence();
#pragma unroll
      for (int p = 0; p < S::kPanels; ++p) {
        const uint64_t w = k_major(stage + p * S::kPanelW);
        const uint64_t a = k_major(stage + S::kPanels * S::kPanelW + p * S::kPanelA);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<Tokens>(d, w + k * kStepK, a + k * kStepK, (step | p | k) != 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (threadIdx.x == 0 && step > 0) barrier_arrive(&barriers.empty[previous]);
      previous = ring.stage;
      ring.next(S::kStages);
    }
    wgmma_wait<0>();
    pin(d);
    if (threadIdx.x == 0) barrier_arrive(&barriers.empty[previous]);
    write_outputs<Tokens, E>(g, j, d, staging);
  }
}

template <int Tokens, Epilogue E>
void launch(const Gemm& g, Launch to) {
  using S = Shape<Tokens>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(gemm_stream_kernel<Tokens, E>, S::kShared, to.device, allowed);
  launch_kernel("gemm_stream", gemm_stream_kernel<Tokens, E>, 2 * to.sms, kThreads, S::kShared,
                to.stream, gemm_args(g), gemm_maps(g, Tokens, kTileW));
}

template <int Tokens>
void launch(const Gemm& g, Launch to) {
  switch (g.epilogue) {
    case Epilogue::bf16:
      return launch<Tokens, Epilogue::bf16>(g, to);
    case Epilogue::f32:
      return launch<Tokens, Epilogue::f32>(g, to);
    case Epilogue::silu:
      return launch<Tokens, Epilogue::silu>(g, to);
  }
}

}  // namespace

void gemm_stream(const Gemm& g, int tokens, Launch to) {
  if (g.rows.mode == GemmRows::Mode::pages) fail("gemm_stream does not read pages");
  switch (tokens) {
    case 8:
      return launch<8>(g, to);
    case 16:
      return launch<16>(g, to);
    case 32:
      return launch<32>(g, to);
    case 64:
      return launch<64>(g, to);
    case 128:
      return launch<128>(g, to);
    default:
      fail("gemm_stream: expected 8, 16, 32, 64 or 128 tokens, found {}", tokens);
  }
}

}  // namespace mla::cuda
