#include "kernels/cuda/cuda_backend.h"

#include <algorithm>
#include <thread>

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_backend_impl.h"

namespace mla {

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

bool cuda_available() {
  int count = 0, major = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return false;
  }
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
         major == 9;
}

CudaDeviceInfo cuda_device_info(int device) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice || count == 0)
    fail("--device cuda: expected an NVIDIA GPU with its driver, found none ({})",
         cudaGetErrorString(status));
  cuda::check(status, "counting GPUs");
  if (device < 0 || device >= count)
    fail("--device cuda: expected a GPU number below {}, found {}", count, device);
  cudaDeviceProp properties;
  MLA_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  MLA_CUDA_CHECK(cudaSetDevice(device));
  size_t free = 0, total = 0;
  MLA_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {properties.name, properties.major, properties.minor, total, free};
}

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  const CudaDeviceInfo info = cuda_device_info(options.device);
  if (info.major != 9 || info.minor != 0)
    fail("--device cuda: expected a Hopper GPU (compute capability 9.0), found {} ({}.{})",
         info.name, info.major, info.minor);
  return std::make_unique<cuda::CudaBackend>(options);
}

std::unique_ptr<Backend> make_cuda_counter() { return std::make_unique<cuda::CudaCounter>(); }

namespace cuda {
namespace {

constexpr size_t kSlab = size_t{2} << 20;     // what the driver hands out at least
constexpr size_t kSmall = size_t{256} << 10;  // allocations below this share slabs
constexpr size_t kStagingBytes = size_t{32} << 20;
constexpr int kLoaderThreads = 16;  // at most

void expect_multiple(int64_t unit, const char* what, int64_t value) {
  if (value % unit != 0)
    fail("--device cuda: {}: expected a multiple of {}, found {}", what, unit, value);
}

void expect_at_most(const char* what, int64_t most, int64_t value) {
  if (value > most) fail("--device cuda: {}: expected at most {}, found {}", what, most, value);
}

void expect_size(const char* what, int64_t expected, int64_t found) {
  if (found != expected)
    fail("--device cuda: {}: expected {}, as DeepSeek-V2 has it, found {}; --device cpu serves it",
         what, expected, found);
}

}  // namespace

void CudaCounter::no_device() { fail("this backend counts bytes only; it has no device"); }

size_t CudaCounter::matrix_bytes(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols,
                                 DType, int32_t, int32_t) const {
  const size_t bytes = cuda::matrix_bytes(kind, experts, rows, cols);
  return bytes < kSmall ? bytes : (bytes + kSlab - 1) / kSlab * kSlab;
}

void CudaCounter::check(const ModelShape& s) const {
  expect_size("qk_nope_head_dim", kP, s.P);
  expect_size("qk_rope_head_dim", kR, s.R);
  expect_size("v_head_dim", kV, s.V);
  expect_size("kv_lora_rank", kL, s.L);
  expect_multiple(16, "hidden_size", s.H);
  expect_multiple(16, "vocab_size", s.vocab);
  expect_multiple(16, "intermediate_size", s.dense_width);
  expect_multiple(16, "moe_intermediate_size", s.I);
  expect_multiple(16, "q_lora_rank", s.q_rank);
  expect_multiple(8, "n_routed_experts", s.E);
  expect_at_most("experts, routed and shared", kMaxMatrices, s.E + s.S);
  expect_at_most("num_experts_per_tok", kMaxTopK, s.K);
  expect_at_most("hidden_size", kMaxNorm, s.H);
  expect_at_most("q_lora_rank", kMaxNorm, s.q_rank);
  expect_at_most("vocab_size", kMaxVocab, s.vocab);
  expect_at_most("--max-num-seqs", kMaxSamples, s.max_samples);
}

size_t CudaCounter::scratch_bytes(const ModelShape& shape) const {
  size_t bytes;
  Scratch::carve(nullptr, shape, bytes);
  return bytes;
}

CudaBackend::CudaBackend(const CudaOptions& options) : options_(options) {
  launch_.device = options.device;
  MLA_CUDA_CHECK(cudaSetDevice(options.device));
  MLA_CUDA_CHECK(
      cudaDeviceGetAttribute(&launch_.sms, cudaDevAttrMultiProcessorCount, options.device));
  MLA_CUDA_CHECK(cudaStreamCreateWithFlags(&launch_.stream, cudaStreamNonBlocking));
  for (cudaEvent_t& ticket : tickets_)
    MLA_CUDA_CHECK(cudaEventCreateWithFlags(&ticket, cudaEventDisableTiming));
  staging_ = std::make_unique<Staging>(launch_.stream, kStagingBytes);
  launch_.taken = static_cast<int32_t*>(allocate(sizeof(int32_t), "count of jobs"));
}

CudaBackend::~CudaBackend() {
  pool_.reset();
  cudaStreamSynchronize(launch_.stream);
  for (const auto& [key, graph] : graphs_) cudaGraphExecDestroy(graph);
  for (cudaEvent_t ticket : tickets_)
    if (ticket) cudaEventDestroy(ticket);
  staging_.reset();
  for (void* block : blocks_) cudaFree(block);
  for (void* block : host_blocks_) cudaFreeHost(block);
  cudaStreamDestroy(launch_.stream);
}

void* CudaBackend::allocate(size_t bytes, const std::string& what) {
  const bool small = bytes < kSmall;
  const size_t rounded = (bytes + 255) / 256 * 256;
  if (small && rounded <= slab_left_) {
    void* at = slab_;
    slab_ += rounded;
    slab_left_ -= rounded;
    return at;
  }
  const size_t size = small ? kSlab : bytes;
  void* block = nullptr;
  const cudaError_t status = cudaMalloc(&block, size);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    fail("{}: {} bytes could not be allocated on the GPU: {}", what, bytes,
         cudaGetErrorString(status));
  }
  blocks_.push_back(block);
  MLA_CUDA_CHECK(cudaMemsetAsync(block, 0, size, launch_.stream));
  MLA_CUDA_CHECK(cudaStreamSynchronize(launch_.stream));
  if (small) {
    slab_ = static_cast<std::byte*>(block) + rounded;
    slab_left_ = size - rounded;
  }
  return block;
}

void CudaBackend::upload(void* to, const void* from, size_t bytes) {
  staging_->upload(to, from, bytes);
}

void CudaBackend::download(void* to, const void* from, size_t bytes) {
  if (bytes)
    MLA_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, launch_.stream));
  synchronize();
}

void* CudaBackend::allocate_host(size_t bytes) {
  void* block = nullptr;
  MLA_CUDA_CHECK(cudaMallocHost(&block, bytes));
  host_blocks_.push_back(block);
  return block;
}

uint64_t CudaBackend::download_later(void* to, const void* from, size_t bytes) {
  MLA_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, launch_.stream));
  const uint64_t ticket = next_ticket_++;
  MLA_CUDA_CHECK(cudaEventRecord(tickets_[ticket % kTickets], launch_.stream));
  return ticket;
}

void CudaBackend::wait(uint64_t ticket) {
  // An event that serves a later download by now is behind this one.
  MLA_CUDA_CHECK(cudaEventSynchronize(tickets_[ticket % kTickets]));
}

void CudaBackend::synchronize() { MLA_CUDA_CHECK(cudaStreamSynchronize(launch_.stream)); }

uint64_t CudaBackend::memory_in_use() const {
  size_t free = 0, total = 0;
  MLA_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return total - free;
}

void CudaBackend::use_scratch(void* base, const ModelShape& shape) {
  pool_.reset();  // the weights are there: its threads and pinned memory go
  size_t bytes;
  scratch_ = Scratch::carve(base, shape, bytes);
  scratch_shape_ = shape;
  scratch_given_ = true;
}

const Scratch& CudaBackend::scratch(const ModelShape& n) {
  const ModelShape& have = scratch_shape_;
  const bool fits = n.H * n.K * n.max_mlp_rows <= have.H * have.K * have.max_mlp_rows &&
                    n.K * n.max_mlp_rows <= have.K * have.max_mlp_rows &&
                    n.max_mlp_rows <= have.max_mlp_rows && n.E <= have.E && n.N <= have.N &&
                    n.max_splits <= have.max_splits && n.max_decode_rows <= have.max_decode_rows &&
                    n.max_samples <= have.max_samples && n.vocab <= have.vocab;
  if (fits && scratch_shape_.max_decode_rows > 0) return scratch_;
  if (scratch_given_) fail("an op needs more scratch than the model's shape has");
  ModelShape grown = n;
  grown.H = std::max(n.H, have.H);
  grown.K = std::max(n.K, have.K);
  grown.E = std::max(n.E, have.E);
  grown.N = std::max(n.N, have.N);
  grown.vocab = std::max(n.vocab, have.vocab);
  grown.max_mlp_rows = std::max(n.max_mlp_rows, have.max_mlp_rows);
  grown.max_splits = std::max(n.max_splits, have.max_splits);
  grown.max_decode_rows = std::max({n.max_decode_rows, have.max_decode_rows, int64_t{1}});
  grown.max_samples = std::max(n.max_samples, have.max_samples);
  size_t bytes;
  Scratch::carve(nullptr, grown, bytes);
  scratch_ = Scratch::carve(allocate(bytes, "scratch"), grown, bytes);
  scratch_shape_ = grown;
  return scratch_;
}

void CudaBackend::replay(uint64_t key, const std::function<void()>& ops) {
  if (!options_.graphs) return ops();
  const auto found = graphs_.find(key);
  if (found != graphs_.end()) {
    MLA_CUDA_CHECK(cudaGraphLaunch(found->second, launch_.stream));
    return;
  }
  cudaGraph_t graph = nullptr;
  MLA_CUDA_CHECK(cudaStreamBeginCapture(launch_.stream, cudaStreamCaptureModeThreadLocal));
  try {
    ops();
  } catch (...) {
    cudaStreamEndCapture(launch_.stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    throw;
  }
  MLA_CUDA_CHECK(cudaStreamEndCapture(launch_.stream, &graph));
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  cuda::check(status, "cudaGraphInstantiate");
  graphs_.emplace(key, executable);
  MLA_CUDA_CHECK(cudaGraphUpload(executable, launch_.stream));
  MLA_CUDA_CHECK(cudaGraphLaunch(executable, launch_.stream));
}

Matrix CudaBackend::create_matrix(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols,
                                  DType, int32_t heads, int32_t nope_dim) {
  const size_t bytes = cuda::matrix_bytes(kind, experts, rows, cols);
  if (kind == MatrixKind::kv_b && (nope_dim != kP || rows != heads * kKV || cols != kL))
    fail("kv_b on the GPU: expected [{} · {}, {}], found [{}, {}]", heads, kKV, kL, rows, cols);
  Matrix m;
  m.kind = kind;
  m.experts = experts;
  m.rows = rows;
  m.cols = cols;
  m.heads = heads;
  m.nope_dim = nope_dim;
  m.data = allocate(bytes, "weights");
  if (kind == MatrixKind::kv_b) m.absorbed = static_cast<std::byte*>(m.data) + rows * cols * 2;
  return m;
}

void CudaBackend::set_rows(const Matrix& matrix, int64_t expert, int64_t row_begin,
                           const HostTensor& source) {
  const Placement to = placement(matrix, expert, row_begin, source.rows, source.cols);
  if (!pool_)
    pool_ = std::make_unique<UploadPool>(
        options_.device,
        std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kLoaderThreads));
  pool_->add(to, source);
}

void CudaBackend::finish_matrix(Matrix& matrix) {
  if (pool_) pool_->drain();
  if (matrix.kind == MatrixKind::kv_b) transpose_uk(matrix, launch_.stream);
  synchronize();  // products read weights before the kernels in front of them have ended
}

bool CudaBackend::fill_normal(const Matrix& m, int64_t expert, int64_t row_begin,
                              const NormalTensor& source) {
  if (source.cols > m.cols)
    fail("random weights: expected at most {} columns, found {}", m.cols, source.cols);
  cuda::fill_normal(placement(m, expert, row_begin, source.rows, m.cols), m.cols, source,
                    launch_.stream);
  return true;
}

namespace {

// x [T, cols] by every matrix of w.
Gemm product(const void* x, int64_t T, const Matrix& w, void* out, Epilogue epilogue) {
  Gemm g;
  g.a = x;
  g.a_rows = T;
  g.a_cols = g.a_stride = g.k = g.w_stride = w.cols;
  g.w = w.data;
  g.matrices = w.experts;
  g.n = w.rows;
  g.w_matrix_stride = w.rows * w.cols;
  g.out = out;
  g.out_stride = epilogue == Epilogue::silu ? w.rows / 2 : w.rows;
  g.epilogue = epilogue;
  g.rows.T = static_cast<int32_t>(T);
  return g;
}

}  // namespace

void CudaBackend::linear(const LinearParams& p) {
  gemm(product(p.x, p.T, p.w, p.out, p.out_f32 ? Epilogue::f32 : Epilogue::bf16), launch_);
}

void CudaBackend::gated_linear(const GatedLinearParams& p) {
  gemm(product(p.x, p.T, p.w, p.out, Epilogue::silu), launch_);
}

void CudaBackend::kv_up(const KvUpParams& p) {
  Gemm g = product(p.cache, int64_t{1} << 28, p.kv_b, p.workspace, Epilogue::bf16);
  g.a_stride = kCacheRow;
  g.rows = {};
  g.rows.mode = GemmRows::Mode::pages;
  g.rows.tiles = p.tiles;
  g.rows.num_tiles = p.num_tiles;
  g.rows.spans = p.spans;
  g.rows.prefill = p.prefill;
  g.rows.page_table = p.page_table;
  gemm(g, launch_);
}

void CudaBackend::mla_decode(const MlaDecodeParams& p) {
  if (p.D == 0) return;
  ModelShape needed;
  needed.N = p.N;
  needed.max_decode_rows = p.D;
  needed.max_splits = scratch_shape_.max_splits;
  if (!scratch_given_) {
    int32_t splits;
    download(&splits, p.num_splits, sizeof splits);
    needed.max_splits = splits;
  }
  const Scratch& s = scratch(needed);

  Gemm g;  // q_lat of every head: q_nope·W_UK
  g.a = p.q;
  g.a_rows = p.D;
  g.a_stride = p.q_stride;
  g.a_cols = int64_t{p.N} * kQK;
  g.a_step = kQK;
  g.w = p.kv_b.absorbed;
  g.matrices = p.N;
  g.n = kL;
  g.k = g.w_stride = kP;
  g.w_matrix_stride = int64_t{kL} * kP;
  g.out = p.q_lat;
  g.out_stride = int64_t{p.N} * kL;
  g.out_step = kL;
  g.rows.T = p.D;
  gemm(g, launch_);

  cuda::mla_decode(p, s.partial, s.max_splits, s.arrivals, s.taken, launch_);

  g.a = p.o_lat;  // O of every head: O_lat·W_UV
  g.a_stride = g.a_cols = int64_t{p.N} * kL;
  g.a_step = kL;
  g.w = static_cast<const std::byte*>(p.kv_b.data) + int64_t{kP} * kL * 2;
  g.n = kV;
  g.k = g.w_stride = kL;
  g.w_matrix_stride = int64_t{kKV} * kL;
  g.out = p.out;
  g.out_stride = int64_t{p.N} * kV;
  g.out_step = kV;
  gemm(g, launch_);
}

void CudaBackend::router(const RouterParams& p) {
  linear({p.x, p.gate, p.logits, true, p.T});
  route(p, launch_);
}

void CudaBackend::experts(const ExpertsParams& p) {
  if (p.T == 0) return;
  ModelShape needed;
  needed.H = p.gate_up.cols;
  needed.E = p.E;
  needed.K = p.K;
  needed.max_mlp_rows = p.T;
  const Scratch& s = scratch(needed);
  group_slots(p, s.grouping, launch_);
  gather_rows(p, s.grouping, s.gathered, launch_);

  const int64_t routed = p.T * p.K;
  Gemm g = product(s.gathered, routed, p.gate_up, p.inner, Epilogue::silu);
  g.a_shared = p.S > 0 ? p.x : nullptr;
  g.rows.mode = GemmRows::Mode::grouped;
  g.rows.T = static_cast<int32_t>(p.T);
  g.rows.routed = p.E;
  g.rows.begin = s.grouping.begin;
  g.rows.shared_row = static_cast<int32_t>(routed);
  g.rows.slots_per_token = p.K + p.S;
  g.rows.num_shared = p.S;
  gemm(g, launch_);

  const GemmRows rows = g.rows;
  g = product(p.inner, p.T * (p.K + p.S), p.down, p.out, Epilogue::bf16);
  g.rows = rows;
  g.rows.slots = s.grouping.slots;
  gemm(g, launch_);
}

void CudaBackend::sample(const SampleParams& p) {
  if (p.S == 0) return;
  ModelShape needed;
  needed.max_samples = p.S;
  needed.vocab = p.vocab;
  cuda::sample(p, scratch(needed).sample, launch_);
}

}  // namespace cuda
}  // namespace mla
