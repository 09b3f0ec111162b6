#include "kernels/cpu/cpu_backend.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "kernels/cpu/cpu_backend_impl.h"
#include "lib/base/error.h"

namespace mla {

std::unique_ptr<Backend> make_cpu_backend(DType dtype, int threads) {
  if (threads < 1) fail("threads: expected at least 1, found {}", threads);
#ifdef MLA_AVX2
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    fail(
        "this build needs a processor with AVX2 and FMA; configure with -DMLA_CPU_FLAGS=\"\" for "
        "one "
        "without");
#endif
  switch (dtype) {
    case DType::bf16:
      return std::make_unique<cpu::CpuBackend<bf16>>(threads);
    case DType::f32:
      return std::make_unique<cpu::CpuBackend<float>>(threads);
    default:
      fail("dtype: expected bfloat16 or float32, found {}", name_of(dtype));
  }
}

namespace cpu {
namespace {

// A block begins with its size, in front of what the caller sees.
constexpr size_t kHeader = 4096;

}  // namespace

template <class T>
CpuBackend<T>::~CpuBackend() {
  for (void* block : blocks_) munmap(block, *static_cast<size_t*>(block));
}

// Anonymous mappings: zeroed, and pages that are never touched take no memory, so that a plan for
// the worst case costs nothing until it is needed.
template <class T>
void* CpuBackend<T>::allocate(size_t bytes, const std::string& what) {
  const size_t total = bytes + kHeader;
  if (total < bytes)
    fail("{}: {} bytes could not be allocated: they do not fit an address", what, bytes);
  void* block = mmap(nullptr, total, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED)
    fail("{}: {} bytes could not be allocated: {}", what, bytes, strerror(errno));
  *static_cast<size_t*>(block) = total;
  blocks_.push_back(block);
  return static_cast<std::byte*>(block) + kHeader;
}

template <class T>
void CpuBackend<T>::stamp(uint64_t* at) {
  using namespace std::chrono;
  const auto now = duration_cast<nanoseconds>(steady_clock::now().time_since_epoch());
  *at = static_cast<uint64_t>(now.count());
}

template <class T>
void CpuBackend<T>::upload(void* to, const void* from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

template <class T>
void CpuBackend<T>::download(void* to, const void* from, size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

template <class T>
size_t CpuBackend<T>::matrix_bytes(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols,
                                   DType stored, int32_t heads, int32_t nope_dim) const {
  const DType dtype =
      dtype_of<T> == DType::bf16 || stored == DType::bf16 ? DType::bf16 : DType::f32;
  int64_t elements = experts * panel_elements(kind, rows, cols);
  if (kind == MatrixKind::kv_b) {
    const int64_t value_dim = rows / heads - nope_dim;
    elements += heads * (panel_elements(MatrixKind::linear, cols, nope_dim) +
                         panel_elements(MatrixKind::linear, value_dim, cols));
  }
  return static_cast<size_t>(elements) * size_of(dtype);
}

template <class T>
Matrix CpuBackend<T>::create_matrix(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols,
                                    DType stored, int32_t heads, int32_t nope_dim) {
  Matrix m;
  m.kind = kind;
  m.dtype = dtype_of<T> == DType::bf16 || stored == DType::bf16 ? DType::bf16 : DType::f32;
  m.experts = experts;
  m.rows = rows;
  m.cols = cols;
  m.heads = heads;
  m.nope_dim = nope_dim;
  m.data = allocate(matrix_bytes(kind, experts, rows, cols, stored, heads, nope_dim), "weights");
  if (kind == MatrixKind::kv_b)
    m.absorbed = static_cast<std::byte*>(m.data) +
                 static_cast<size_t>(panel_elements(kind, rows, cols)) * size_of(m.dtype);
  return m;
}

namespace {

float read_element(const HostTensor& source, int64_t row, int64_t col) {
  const int64_t i = row * source.row_stride + col;
  const auto* bytes =
      static_cast<const std::byte*>(source.data) + i * static_cast<int64_t>(size_of(source.dtype));
  // Files give no alignment.
  if (source.dtype == DType::f32) {
    float x;
    std::memcpy(&x, bytes, sizeof x);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return source.dtype == DType::bf16 ? to_f32(bf16{bits}) : f16_to_f32(bits);
}

template <class W>
void fill_rows(const Matrix& m, int64_t expert, int64_t row_begin, const HostTensor& source,
               int threads) {
  W* base = static_cast<W*>(m.data) + expert * panel_elements(m.kind, m.rows, m.cols);
  const int64_t half_rows = m.rows / halves_of(m.kind);
  const int64_t half_elements = ceil_div(half_rows, kPanel) * kPanel * m.cols;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t r = 0; r < source.rows; ++r) {
    const int64_t row = row_begin + r;
    if (m.kind == MatrixKind::embedding) {
      for (int64_t c = 0; c < m.cols; ++c)
        base[row * m.cols + c] = from_f32<W>(read_element(source, r, c));
      continue;
    }
    const int64_t in_half = row % half_rows;
    W* panel = base + row / half_rows * half_elements + in_half / kPanel * kPanel * m.cols;
    for (int64_t c = 0; c < m.cols; ++c)
      panel[c * kPanel + in_half % kPanel] = from_f32<W>(read_element(source, r, c));
  }
}

}  // namespace

template <class T>
void CpuBackend<T>::set_rows(const Matrix& m, int64_t expert, int64_t row_begin,
                             const HostTensor& source) {
  if (expert < 0 || expert >= m.experts || row_begin < 0 || row_begin + source.rows > m.rows ||
      source.cols != m.cols)
    fail("weight rows [{}, {}) of {} columns do not fit a matrix [{}, {}]", row_begin,
         row_begin + source.rows, source.cols, m.rows, m.cols);
  if (m.dtype == DType::f32) {
    fill_rows<float>(m, expert, row_begin, source, threads_);
  } else {
    fill_rows<bf16>(m, expert, row_begin, source, threads_);
  }
}

template <class T>
void CpuBackend<T>::finish_matrix(Matrix& m) {
  if (m.kind != MatrixKind::kv_b) return;
  if (m.dtype == DType::f32) {
    absorb<float>(m);
  } else {
    absorb<bf16>(m);
  }
}

template <class T>
template <class W>
void CpuBackend<T>::absorb(const Matrix& m) const {
  const int64_t L = m.cols, P = m.nope_dim, head_rows = m.rows / m.heads, V = head_rows - P;
  const W* kv_b = static_cast<const W*>(m.data);
  const auto at = [&](int64_t row, int64_t col) {
    return kv_b[row / kPanel * kPanel * L + col * kPanel + row % kPanel];
  };
  const int64_t uk_size = panel_elements(MatrixKind::linear, L, P);
  const int64_t uv_size = panel_elements(MatrixKind::linear, V, L);
  W* uk = static_cast<W*>(m.absorbed);
  W* uv = uk + m.heads * uk_size;
#pragma omp parallel for num_threads(threads_) schedule(static)
  for (int64_t h = 0; h < m.heads; ++h) {
    for (int64_t l = 0; l < L; ++l)
      for (int64_t p = 0; p < P; ++p)
        uk[h * uk_size + l / kPanel * kPanel * P + p * kPanel + l % kPanel] =
            at(h * head_rows + p, l);
    for (int64_t v = 0; v < V; ++v)
      for (int64_t l = 0; l < L; ++l)
        uv[h * uv_size + v / kPanel * kPanel * L + l * kPanel + v % kPanel] =
            at(h * head_rows + P + v, l);
  }
}

template class CpuBackend<float>;
template class CpuBackend<bf16>;

}  // namespace cpu
}  // namespace mla
