// Time of each CUDA op at DeepSeek-V2-Lite's sizes, beside the limits measured on the same GPU.
//   cuda_ops_bench [name part]     only ops whose name contains it
// Random data; weights rotate among copies larger than the L2 cache; a CUDA graph of many calls is
// replayed and the median taken.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/matrix.h"
#include "kernels/cuda/scratch.h"

namespace mla {
namespace {

using cuda::Gemm;
using cuda::GemmRows;

constexpr int64_t H = 2048, I = 1408, kVocab = 102400;
constexpr int32_t N = 16, E = 64, S = 2, K = 6;

cuda::Launch g_launch;
const char* g_filter = "";
double g_copy_tb_s = 4.24, g_tflops = 790;  // of KERNELS.md until measured

struct Buffers {
  std::vector<void*> all;
  ~Buffers() {
    for (void* p : all) cudaFree(p);
  }
  template <class T>
  T* take(int64_t count) {
    void* p = nullptr;
    MLA_CUDA_CHECK(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T) + 1024));
    MLA_CUDA_CHECK(cudaMemset(p, 0, static_cast<size_t>(count) * sizeof(T) + 1024));
    all.push_back(p);
    return static_cast<T*>(p);
  }
  void* normal(int64_t count, float deviation, uint64_t seed = 1) {
    void* p = take<uint16_t>(count);
    cuda::fill_normal(p, count, seed, deviation, g_launch.stream);
    return p;
  }
  template <class T>
  T* copy(const std::vector<T>& values) {
    T* p = take<T>(static_cast<int64_t>(values.size()));
    MLA_CUDA_CHECK(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
  }
};

// Median microseconds of one call; call(i) is the i-th of a replayed graph.
double time_us(const std::function<void(int)>& call, int calls = 20) {
  for (int i = 0; i < 2; ++i) call(i);
  MLA_CUDA_CHECK(cudaStreamSynchronize(g_launch.stream));
  cudaGraph_t graph;
  MLA_CUDA_CHECK(cudaStreamBeginCapture(g_launch.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) call(i);
  MLA_CUDA_CHECK(cudaStreamEndCapture(g_launch.stream, &graph));
  cudaGraphExec_t executable;
  MLA_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<double> times;
  for (int i = 0; i < 7; ++i) {
    MLA_CUDA_CHECK(cudaEventRecord(begin, g_launch.stream));
    MLA_CUDA_CHECK(cudaGraphLaunch(executable, g_launch.stream));
    MLA_CUDA_CHECK(cudaEventRecord(end, g_launch.stream));
    MLA_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i > 1) times.push_back(double{ms} * 1000 / calls);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

bool wanted(const std::string& name) { return name.find(g_filter) != std::string::npos; }

// flop and bytes of one call; the limit is the larger of the two times.
void report(const std::string& name, double us, double flop, double bytes) {
  const double limit = std::max(flop / g_tflops / 1e6, bytes / g_copy_tb_s / 1e6);
  fmt::print("{:<46} {:>9.1f} us {:>7.1f} TFLOP/s {:>7.3f} TB/s {:>5.1f} % of the limit\n", name,
             us, flop / us / 1e6, bytes / us / 1e6, 100 * limit / us);
  std::fflush(stdout);
}

void limits() {
  Buffers b;
  const int64_t n = int64_t{1} << 30;
  auto *from = b.take<char>(n), *to = b.take<char>(n);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<double> times;
  for (int i = 0; i < 6; ++i) {  // no graph: its copies take another, slower road
    cudaEventRecord(begin, g_launch.stream);
    cudaMemcpyAsync(to, from, static_cast<size_t>(n), cudaMemcpyDeviceToDevice, g_launch.stream);
    cudaEventRecord(end, g_launch.stream);
    MLA_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    times.push_back(double{ms} * 1000);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  const double us = *std::min_element(times.begin(), times.end());
  g_copy_tb_s = 2.0 * static_cast<double>(n) / us / 1e6;
  fmt::print("device copy {:.2f} TB/s\n", g_copy_tb_s);
}

// The yardstick: cuBLAS's own choice for the same product with bf16 output.
double cublas_us(const void* x, const std::function<const void*(int)>& w, void* out, int64_t T,
                 int64_t n, int64_t k) {
  static const cublasHandle_t handle = [] {
    cublasHandle_t created = nullptr;
    if (cublasCreate(&created) != CUBLAS_STATUS_SUCCESS) fail("cublasCreate failed");
    cublasSetStream(created, g_launch.stream);
    return created;
  }();
  const float one = 1.0f, zero = 0.0f;
  return time_us([&](int i) {
    const cublasStatus_t status =
        cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n), static_cast<int>(T),
                     static_cast<int>(k), &one, w(i), CUDA_R_16BF, static_cast<int>(k), x,
                     CUDA_R_16BF, static_cast<int>(k), &zero, out, CUDA_R_16BF, static_cast<int>(n),
                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) fail("cublasGemmEx failed: {}", static_cast<int>(status));
  });
}

void dense(const char* what, int64_t n, int64_t k, cuda::Epilogue epilogue, int64_t T,
           int64_t matrices = 1) {
  Buffers b;
  const int copies =
      static_cast<int>(std::clamp<int64_t>((int64_t{256} << 20) / (matrices * n * k * 2), 1, 16));
  void* w = b.normal(copies * matrices * n * k, 0.02f);
  void* x = b.normal(T * matrices * k, 1.0f);
  const int64_t outputs = epilogue == cuda::Epilogue::silu ? n / 2 : n;
  Gemm g;
  g.a = x;
  g.a_rows = T;
  g.k = g.w_stride = k;
  g.a_cols = g.a_stride = matrices * k;
  g.a_step = matrices > 1 ? k : 0;
  g.n = n;
  g.matrices = matrices;
  g.w_matrix_stride = n * k;
  g.out = b.take<float>(T * matrices * outputs);
  g.out_stride = matrices * outputs;
  g.out_step = outputs;
  g.epilogue = epilogue;
  g.rows.T = static_cast<int32_t>(T);
  const auto at = [&](int i) {
    g.w = static_cast<const uint16_t*>(w) + (i % copies) * matrices * n * k;
    return g;
  };
  const double flop = 2.0 * static_cast<double>(T * n * matrices) * static_cast<double>(k);
  const double bytes = 2.0 * static_cast<double>(matrices * (n * k + T * k + T * outputs));
  const std::string name = fmt::format("{} {}x{} T={}", what, n, k, T);
  if (!wanted(name)) return;
  report(name, time_us([&](int i) { cuda::gemm(at(i), g_launch); }), flop, bytes);
  if (T >= 8192)
    report(name + " [cuBLAS]",
           cublas_us(
               x, [&](int i) { return static_cast<const void*>(at(i).w); }, g.out, T, n, k),
           flop, bytes);
  if (T >= 32 && T <= 2048) {
    report(name + " [tile]", time_us([&](int i) { cuda::gemm_tile(at(i), g_launch); }), flop,
           bytes);
    for (const int tokens : {32, 64, 128})
      report(fmt::format("{} [stream {}]", name, tokens),
             time_us([&](int i) { cuda::gemm_stream(at(i), tokens, g_launch); }), flop, bytes);
  }
}

void experts(int64_t T) {
  if (!wanted(fmt::format("experts T={}", T))) return;
  Buffers b;
  const int64_t slots = T * (K + S), matrices = E + S;
  void* gate_up = b.normal(matrices * 2 * I * H, 0.02f);
  void* down = b.normal(matrices * H * I, 0.02f);
  std::mt19937 random(1);
  std::vector<int32_t> ids, all(E);
  std::iota(all.begin(), all.end(), 0);
  for (int64_t t = 0; t < T; ++t) {
    std::shuffle(all.begin(), all.end(), random);
    ids.insert(ids.end(), all.begin(), all.begin() + K);
  }
  const std::vector<bool> touched = [&] {
    std::vector<bool> used(E, false);
    for (const int32_t id : ids) used[static_cast<size_t>(id)] = true;
    return used;
  }();
  const double active = static_cast<double>(std::count(touched.begin(), touched.end(), true)) + S;
  ExpertsParams p{};
  p.x = b.normal(T * H, 1.0f);
  p.ids = b.copy(ids);
  p.T = T;
  p.E = E;
  p.K = K;
  p.S = S;
  ModelShape shape;
  shape.H = H;
  shape.E = E;
  shape.K = K;
  shape.max_mlp_rows = T;
  size_t bytes;
  cuda::Scratch::carve(nullptr, shape, bytes);
  const cuda::Scratch s =
      cuda::Scratch::carve(b.take<char>(static_cast<int64_t>(bytes)), shape, bytes);
  void* inner = b.take<uint16_t>(slots * I);
  void* out = b.take<uint16_t>(slots * H);
  p.gate_up.cols = H;
  const auto group = [&](int) { cuda::group_slots(p, s.grouping, g_launch); };
  const auto gather = [&](int) { cuda::gather_rows(p, s.grouping, s.gathered, g_launch); };
  Gemm up;
  up.a = s.gathered;
  up.a_shared = p.x;
  up.a_rows = T * K;
  up.a_cols = up.a_stride = up.k = up.w_stride = H;
  up.w = gate_up;
  up.matrices = matrices;
  up.n = 2 * I;
  up.w_matrix_stride = 2 * I * H;
  up.out = inner;
  up.out_stride = I;
  up.epilogue = cuda::Epilogue::silu;
  up.rows.mode = GemmRows::Mode::grouped;
  up.rows.T = static_cast<int32_t>(T);
  up.rows.routed = E;
  up.rows.begin = s.grouping.begin;
  up.rows.shared_row = static_cast<int32_t>(T * K);
  up.rows.slots_per_token = K + S;
  up.rows.num_shared = S;
  Gemm dn = up;
  dn.a = inner;
  dn.a_shared = nullptr;
  dn.a_rows = slots;
  dn.a_cols = dn.a_stride = dn.k = dn.w_stride = I;
  dn.w = down;
  dn.n = H;
  dn.w_matrix_stride = H * I;
  dn.out = out;
  dn.out_stride = H;
  dn.epilogue = cuda::Epilogue::bf16;
  dn.rows.slots = s.grouping.slots;
  const double rows = static_cast<double>(slots), h = H, i = I;
  report(fmt::format("group_slots T={}", T), time_us(group), 0, rows * 8);
  report(fmt::format("gather_rows T={}", T), time_us(gather), 0,
         static_cast<double>(T) * (K + 1) * h * 2);
  struct Half {
    const char* name;
    Gemm gemm;
    double flop, bytes;
  };
  for (const Half& half :
       {Half{"experts gate_up", up, 4 * rows * h * i, active * 4 * h * i + rows * 2 * (h + i)},
        Half{"experts down", dn, 2 * rows * h * i, active * 2 * h * i + rows * 2 * (h + i)}}) {
    report(fmt::format("{} T={}", half.name, T),
           time_us([&](int) { cuda::gemm(half.gemm, g_launch); }), half.flop, half.bytes);
    if (T > 2048) continue;
    report(fmt::format("{} T={} [tile]", half.name, T),
           time_us([&](int) { cuda::gemm_tile(half.gemm, g_launch); }), half.flop, half.bytes);
    for (const int tokens : {8, 16, 32, 64, 128})
      report(fmt::format("{} T={} [stream {}]", half.name, T, tokens),
             time_us([&](int) { cuda::gemm_stream(half.gemm, tokens, g_launch); }), half.flop,
             half.bytes);
  }
  CombineParams c{};
  c.expert_out = out;
  c.weights = b.take<float>(T * K);
  c.residual = b.take<uint16_t>(T * H);
  c.T = T;
  c.H = H;
  c.K = K;
  c.S = S;
  report(fmt::format("combine T={}", T), time_us([&](int) { cuda::combine(c, g_launch); }), 0,
         static_cast<double>(T) * (K + S + 2) * h * 2);
}

// B requests with `context` keys each.
void decode(int32_t B, int32_t context) {
  const std::string name = fmt::format("mla_decode {}x{}", B, context);
  if (!wanted(name)) return;
  Buffers b;
  const int32_t pages = (context + kPageTokens - 1) / kPageTokens;
  const int64_t total = int64_t{B} * pages;
  std::vector<int32_t> table(static_cast<size_t>(total));
  std::iota(table.begin(), table.end(), 0);
  std::mt19937 random(1);
  std::shuffle(table.begin(), table.end(), random);
  std::vector<DecodeRow> rows;
  std::vector<DecodeSplit> splits, groups;
  for (int32_t d = 0; d < B; ++d) {
    rows.push_back({context, d * pages, static_cast<int32_t>(splits.size())});
    for (int32_t s = 0; s < decode_splits(context); ++s) {
      splits.push_back({d, s});
      if (s % kDecodeGroup == 0) groups.push_back({d, s});
    }
  }
  const auto count = static_cast<int64_t>(splits.size());
  // Rotate among caches that together exceed the L2.
  const int copies = static_cast<int>(std::clamp<int64_t>(
      (int64_t{256} << 20) / (total * kPageTokens * cuda::kCacheRow * 2), 1, 27));
  const int64_t cache_elements = total * kPageTokens * cuda::kCacheRow;
  auto* cache = static_cast<uint16_t*>(b.normal(copies * cache_elements, 1.0f));
  MlaDecodeParams p{};
  p.q = b.normal(B * N * cuda::kQK, 0.3f);
  p.q_stride = N * cuda::kQK;
  p.page_table = b.copy(table);
  p.rows = b.copy(rows);
  p.D = B;
  p.splits = b.copy(splits);
  p.groups = b.copy(groups);
  p.num_splits = b.copy(
      std::vector<int32_t>{static_cast<int32_t>(count), static_cast<int32_t>(groups.size())});
  p.q_lat = b.normal(B * N * cuda::kL, 0.3f);
  p.o_lat = b.take<uint16_t>(B * N * cuda::kL);
  p.N = N;
  p.P = cuda::kP;
  p.R = cuda::kR;
  p.L = cuda::kL;
  p.V = cuda::kV;
  p.scale = 0.1147f;
  auto* partial = b.take<float>(count * N * (cuda::kL + 2));
  auto* arrivals = b.take<int32_t>(B);
  auto* taken = b.take<int32_t>(1);
  const double bytes = static_cast<double>(B) * context * cuda::kCacheRow * 2;
  report(name, time_us([&](int i) {
           p.cache = cache + (i % copies) * cache_elements;
           cuda::mla_decode(p, partial, count, arrivals, taken, g_launch);
         }),
         static_cast<double>(B) * context * N * 2 * (cuda::kCacheRow + cuda::kL), bytes);
}

// `requests` prompts of `length` tokens, causal, one pass.
void prefill(int32_t requests, int32_t length) {
  const std::string name = fmt::format("mla_prefill {}x{}", requests, length);
  if (!wanted(name)) return;
  Buffers b;
  const int64_t T = int64_t{requests} * length, pages = (length + kPageTokens - 1) / kPageTokens;
  std::vector<int32_t> table(static_cast<size_t>(requests * pages));
  std::iota(table.begin(), table.end(), 0);
  std::vector<PrefillSpan> prompts;
  std::vector<KeySpan> spans;
  std::vector<WorkTile> queries, keys;
  for (int32_t r = 0; r < requests; ++r) {
    prompts.push_back({r * length, length, 0, static_cast<int32_t>(r * pages)});
    spans.push_back({r, 0, length, r * length});
    for (int32_t k = 0; k < length; k += kKeyTile) keys.push_back({r, k});
  }
  for (int32_t q = (length - 1) / kQueryTile * kQueryTile; q >= 0; q -= kQueryTile)
    for (int32_t r = 0; r < requests; ++r) queries.push_back({r, q});
  void* cache = b.normal(requests * pages * kPageTokens * cuda::kCacheRow, 1.0f);
  MlaPrefillParams p{};
  p.q = b.normal(T * N * cuda::kQK, 0.3f);
  p.q_stride = N * cuda::kQK;
  p.workspace = b.normal((T + kKeyTile) * N * cuda::kKV, 1.0f);
  p.cache = cache;
  p.page_table = b.copy(table);
  p.prefill = b.copy(prompts);
  p.spans = b.copy(spans);
  p.num_spans = requests;
  p.tiles = b.copy(queries);
  p.num_tiles = static_cast<int32_t>(queries.size());
  p.out = b.take<uint16_t>(T * N * cuda::kV);
  p.N = N;
  p.P = cuda::kP;
  p.R = cuda::kR;
  p.L = cuda::kL;
  p.V = cuda::kV;
  p.scale = 0.1147f;
  const double pairs = static_cast<double>(requests) * length * (length + 1.0) / 2;
  report(name, time_us([&](int) { cuda::mla_prefill(p, g_launch); }, length > 8192 ? 2 : 5),
         pairs * N * 2 * (cuda::kQK + cuda::kV), 0);

  Gemm g;
  g.a = cache;
  g.a_rows = requests * pages * kPageTokens;
  g.a_cols = g.k = g.w_stride = cuda::kL;
  g.a_stride = cuda::kCacheRow;
  g.w = b.normal(int64_t{N} * cuda::kKV * cuda::kL, 0.04f);
  g.n = N * cuda::kKV;
  g.w_matrix_stride = g.n * g.k;
  g.out = const_cast<void*>(p.workspace);
  g.out_stride = g.n;
  g.rows.mode = GemmRows::Mode::pages;
  g.rows.tiles = b.copy(keys);
  g.rows.num_tiles = static_cast<int32_t>(keys.size());
  g.rows.spans = p.spans;
  g.rows.prefill = p.prefill;
  g.rows.page_table = p.page_table;
  report(fmt::format("kv_up {}x{}", requests, length),
         time_us([&](int) { cuda::gemm(g, g_launch); }, 5),
         2.0 * static_cast<double>(T * g.n * g.k),
         2.0 * static_cast<double>(T * (g.n + g.k) + g.n * g.k));
}

void small(int64_t T) {
  Buffers b;
  void* residual = b.normal(T * H, 1.0f);
  AddNormParams a{};
  a.residual = residual;
  a.delta = b.take<float>(T * H);
  a.weight = b.take<float>(H);
  a.out = b.take<uint16_t>(T * H);
  a.T = T;
  a.H = H;
  a.eps = 1e-6f;
  const double t = static_cast<double>(T), h = H;
  std::string name = fmt::format("add_norm T={}", T);
  if (wanted(name))
    report(name, time_us([&](int) { cuda::add_norm(a, g_launch); }), 0, t * h * (4 + 2 + 2 + 2));
  const int64_t width = N * cuda::kQK + cuda::kCacheRow;
  RopeCacheParams r{};
  void* qkv = b.normal(T * width, 1.0f);
  std::vector<int32_t> positions(static_cast<size_t>(T));
  std::vector<int64_t> slots(static_cast<size_t>(T));
  std::iota(positions.begin(), positions.end(), 0);
  std::iota(slots.begin(), slots.end(), 0);
  r.q = qkv;
  r.q_stride = r.kv_stride = width;
  r.kv_a = static_cast<uint16_t*>(qkv) + N * cuda::kQK;
  r.norm_weight = b.take<float>(cuda::kL);
  r.rope_table = b.take<float>(T * cuda::kR);
  r.positions = b.copy(positions);
  r.slots = b.copy(slots);
  r.cache = b.take<uint16_t>(T * cuda::kCacheRow);
  r.T = T;
  r.N = N;
  r.P = cuda::kP;
  r.R = cuda::kR;
  r.L = cuda::kL;
  r.eps = 1e-6f;
  name = fmt::format("rope_cache T={}", T);
  if (wanted(name))
    report(name, time_us([&](int) { cuda::rope_cache(r, g_launch); }), 0,
           t * (N * cuda::kR * 4 + cuda::kCacheRow * 4));
  RouterParams o{};
  o.logits = b.take<float>(T * E);
  o.ids = b.take<int32_t>(T * K);
  o.weights = b.take<float>(T * K);
  o.T = T;
  o.E = E;
  o.K = K;
  o.groups = o.kept_groups = 1;
  o.scaling_factor = 1;
  name = fmt::format("route T={}", T);
  if (wanted(name)) report(name, time_us([&](int) { cuda::route(o, g_launch); }), 0, t * E * 4);
}

void sampling(int32_t rows) {
  const std::string name = fmt::format("sample greedy S={}", rows);
  if (!wanted(name)) return;
  Buffers b;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> logits(static_cast<size_t>(kVocab));
  for (float& x : logits) x = normal(random);
  auto* all = b.take<float>(rows * kVocab);
  for (int32_t i = 0; i < rows; ++i)
    MLA_CUDA_CHECK(
        cudaMemcpy(all + i * kVocab, logits.data(), logits.size() * 4, cudaMemcpyHostToDevice));
  for (const bool greedy : {true, false}) {
    std::vector<SampleSpec> specs(static_cast<size_t>(rows));
    if (!greedy)
      for (SampleSpec& s : specs) {
        s.temperature = 0.8f;
        s.top_p = 0.95f;
        s.top_k = 50;
      }
    SampleParams p{};
    p.logits = all;
    p.specs = b.copy(specs);
    p.tokens = b.take<int32_t>(rows);
    p.logprobs = b.take<float>(rows);
    p.top_ids = b.take<int32_t>(rows * 20);
    p.top_logprobs = b.take<float>(rows * 20);
    p.S = rows;
    p.vocab = static_cast<int32_t>(kVocab);
    p.max_top = 20;
    void* scratch = b.take<char>(static_cast<int64_t>(cuda::sample_scratch_bytes(rows, kVocab)));
    report(greedy ? name : fmt::format("sample top-k top-p S={}", rows),
           time_us([&](int) { cuda::sample(p, scratch, g_launch); }, 5), 0,
           static_cast<double>(rows) * kVocab * 4);
  }
}

int main_of(int argc, char** argv) {
  if (argc > 1) g_filter = argv[1];
  const CudaDeviceInfo info = cuda_device_info(0);
  cudaDeviceProp properties;
  MLA_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  g_launch.sms = properties.multiProcessorCount;
  MLA_CUDA_CHECK(cudaStreamCreate(&g_launch.stream));
  Buffers counter;
  g_launch.taken = counter.take<int32_t>(1);
  fmt::print("{}, {} multiprocessors\n", info.name, g_launch.sms);
  limits();
  for (const int64_t T : {1, 8, 64, 256, 1024, 8192, 16384}) {
    dense("qkv_a", 3648, H, cuda::Epilogue::bf16, T);
    dense("o", H, H, cuda::Epilogue::f32, T);
    dense("router", E, H, cuda::Epilogue::f32, T);
    dense("absorb 16", 512, 128, cuda::Epilogue::bf16, T, 16);
    dense("up 16", 128, 512, cuda::Epilogue::bf16, T, 16);
    if (T == 1 || T == 64 || T == 16384) {
      dense("dense gate_up", 21888, H, cuda::Epilogue::silu, T);
      dense("dense down", H, 10944, cuda::Epilogue::f32, T);
    }
    if (T <= 1024) dense("lm_head", kVocab, H, cuda::Epilogue::f32, T);
  }
  dense("square", 8192, 8192, cuda::Epilogue::bf16, 8192);
  for (const int64_t T : {1, 8, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384})
    experts(T);
  for (const auto& [B, context] : std::vector<std::pair<int32_t, int32_t>>{{1, 1024},
                                                                           {1, 8192},
                                                                           {8, 1024},
                                                                           {32, 1024},
                                                                           {64, 1024},
                                                                           {64, 1088},
                                                                           {140, 1088},
                                                                           {32, 4096},
                                                                           {16, 8192},
                                                                           {64, 8192},
                                                                           {128, 1024},
                                                                           {128, 4096},
                                                                           {256, 1024},
                                                                           {1024, 1024}})
    decode(B, context);
  for (const auto& [requests, length] : std::vector<std::pair<int32_t, int32_t>>{
           {16, 1024}, {4, 4096}, {1, 8192}, {1, 16384}, {1, 32768}})
    prefill(requests, length);
  for (const int64_t T : {1, 64, 256, 16384}) small(T);
  for (const int32_t rows : {1, 64, 256, 1024}) sampling(rows);
  return 0;
}

}  // namespace
}  // namespace mla

int main(int argc, char** argv) {
  try {
    return mla::main_of(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
