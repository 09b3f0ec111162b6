// The backends that the op tests run on, and a device whose memory is reached through Backend
// alone: guards around every array, everything that a test does not fill is NaN (all bits one).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif
#include "kernels/ops.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/devices.h"

namespace mla::test {

using Floats = std::vector<float>;

struct BackendCase {
  std::string name;
  std::function<std::unique_ptr<Backend>(int threads)> make;  // `threads` of the host
  DType dtype;
  bool cuda = false;

  // A size or a distance of rows near n that the backend takes.
  int64_t size(int64_t n) const { return cuda ? (n + 15) / 16 * 16 : n; }
  int64_t stride(int64_t n) const { return cuda ? (n + 7) / 8 * 8 : n; }

  bool rounds() const { return dtype == DType::bf16; }
  float round(float x) const { return rounds() ? to_f32(to_bf16(x)) : x; }
};

inline std::vector<BackendCase> backend_cases() {
  std::vector<BackendCase> cases;
  for (const DType dtype : {DType::bf16, DType::f32})
    cases.push_back({"cpu " + std::string(name_of(dtype)),
                     [dtype](int threads) { return make_cpu_backend(dtype, threads); }, dtype});
#ifdef MLA_WITH_CUDA
  if (cuda_available())
    cases.push_back(
        {"cuda bfloat16", [](int) { return make_cuda_backend(CudaOptions{}); }, DType::bf16, true});
#endif
  return cases;
}

// Those that round: of tests that follow roundings, or in which the dtype does not matter.
inline std::vector<BackendCase> bf16_cases() {
  std::vector<BackendCase> cases = backend_cases();
  std::erase_if(cases, [](const BackendCase& c) { return !c.rounds(); });
  return cases;
}

// Normally distributed values in the run dtype.
inline Floats random_values(const BackendCase& c, int64_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Floats values(static_cast<size_t>(n));
  for (float& x : values) x = c.round(normal(random));
  return values;
}

// A weight of `cols` inputs whose products are of the size of its inputs.
inline Floats weights(const BackendCase& c, int64_t n, int64_t cols, uint32_t seed) {
  return random_values(c, n, seed, 1.0f / std::sqrt(static_cast<float>(cols)));
}

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Columns [first, first + width) of rows `stride` apart.
inline Floats columns(const Floats& x, int64_t stride, int64_t first, int64_t width) {
  Floats out;
  for (size_t r = 0; r + static_cast<size_t>(stride) <= x.size(); r += static_cast<size_t>(stride))
    out.insert(out.end(), x.begin() + static_cast<std::ptrdiff_t>(r) + first,
               x.begin() + static_cast<std::ptrdiff_t>(r) + first + width);
  return out;
}

inline Floats rows_of(const Floats& x, int64_t width, int64_t first, int64_t rows) {
  return Floats(x.begin() + first * width, x.begin() + (first + rows) * width);
}

// Rows of `width` laid `stride` apart, NaN between.
inline Floats padded(const Floats& x, int64_t width, int64_t stride) {
  const int64_t rows = static_cast<int64_t>(x.size()) / width;
  Floats out(static_cast<size_t>(rows * stride), std::numeric_limits<float>::quiet_NaN());
  for (int64_t r = 0; r < rows; ++r)
    std::copy_n(x.begin() + r * width, width, out.begin() + r * stride);
  return out;
}

class Device {
 public:
  explicit Device(const BackendCase& c, int threads = 1) : c_(c), backend_(c.make(threads)) {}

  Backend* operator->() { return backend_.get(); }
  const BackendCase& backend_case() const { return c_; }

  // Run dtype.
  void* array(const Floats& values) {
    if (!c_.rounds()) return plain(values);
    std::vector<bf16> rounded(values.size());
    for (size_t i = 0; i < values.size(); ++i) rounded[i] = to_bf16(values[i]);
    return plain(rounded);
  }
  void* poisoned(int64_t elements) {
    return poisoned_bytes(elements * static_cast<int64_t>(size_of(c_.dtype)));
  }
  Floats read(const void* from, int64_t elements) {
    if (!c_.rounds()) return read_plain<float>(from, elements);
    Floats out;
    for (const bf16 x : read_plain<bf16>(from, elements)) out.push_back(to_f32(x));
    return out;
  }
  void poison(void* to, int64_t elements) {
    const std::vector<uint8_t> ones(static_cast<size_t>(elements) * size_of(c_.dtype), 0xff);
    backend_->upload(to, ones.data(), ones.size());
  }

  template <class X>
  X* plain(const std::vector<X>& values) {
    X* p = static_cast<X*>(guarded(values.size() * sizeof(X)));
    backend_->upload(p, values.data(), values.size() * sizeof(X));
    return p;
  }
  template <class X>
  X* poisoned_plain(int64_t elements) {
    return static_cast<X*>(poisoned_bytes(elements * static_cast<int64_t>(sizeof(X))));
  }
  template <class X>
  std::vector<X> read_plain(const void* from, int64_t elements) {
    std::vector<X> values(static_cast<size_t>(elements));
    backend_->download(values.data(), from, values.size() * sizeof(X));
    return values;
  }

  // values: [experts, rows, cols], in the run dtype.
  Matrix matrix(MatrixKind kind, int64_t experts, int64_t rows, int64_t cols, const Floats& values,
                int32_t heads = 0, int32_t nope_dim = 0) {
    Matrix m = backend_->create_matrix(kind, experts, rows, cols, c_.dtype, heads, nope_dim);
    // Gate and up come one after the other, as they do from a checkpoint.
    const int64_t piece = kind == MatrixKind::gate_up ? rows / 2 : rows;
    for (int64_t e = 0; e < experts; ++e)
      for (int64_t first = 0; first < rows; first += piece)
        backend_->set_rows(m, e, first,
                           {.data = values.data() + (e * rows + first) * cols,
                            .dtype = DType::f32,
                            .rows = piece,
                            .cols = cols,
                            .row_stride = cols});
    backend_->finish_matrix(m);
    return m;
  }

  // Nothing was written beside the arrays.
  bool guards_hold() {
    for (const Block& block : blocks_)
      for (const size_t at : {size_t{0}, kGuard + block.bytes}) {
        std::vector<uint8_t> guard(kGuard);
        backend_->download(guard.data(), block.data + at, kGuard);
        if (std::count(guard.begin(), guard.end(), uint8_t{0xa5}) !=
            static_cast<std::ptrdiff_t>(kGuard))
          return false;
      }
    return true;
  }

 private:
  static constexpr size_t kGuard = 256;  // a multiple of any vector access
  struct Block {
    std::byte* data;
    size_t bytes;
  };

  void* guarded(size_t bytes) {
    auto* data = static_cast<std::byte*>(backend_->allocate(bytes + 2 * kGuard, "a test's array"));
    const std::vector<uint8_t> guard(kGuard, 0xa5);
    backend_->upload(data, guard.data(), kGuard);
    backend_->upload(data + kGuard + bytes, guard.data(), kGuard);
    blocks_.push_back({data, bytes});
    return data + kGuard;
  }
  void* poisoned_bytes(int64_t bytes) {
    return plain(std::vector<uint8_t>(static_cast<size_t>(bytes), 0xff));
  }

  const BackendCase& c_;
  std::unique_ptr<Backend> backend_;
  std::vector<Block> blocks_;
};

// y [T, rows] = x [T, cols]·wᵀ in double.
inline std::vector<double> product(const Floats& x, const float* w, int64_t rows, int64_t cols) {
  const int64_t T = static_cast<int64_t>(x.size()) / cols;
  std::vector<double> y(static_cast<size_t>(T * rows), 0.0);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0.0;
      for (int64_t k = 0; k < cols; ++k)
        sum += double{x[static_cast<size_t>(t * cols + k)]} * double{w[r * cols + k]};
      y[static_cast<size_t>(t * rows + r)] = sum;
    }
  return y;
}

// SiLU(x·gateᵀ)·(x·upᵀ) of one matrix [2·I, cols].
inline std::vector<double> gated(const Floats& x, const float* w, int64_t I, int64_t cols) {
  std::vector<double> gate = product(x, w, I, cols);
  const std::vector<double> up = product(x, w + I * cols, I, cols);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
  return gate;
}

inline Floats to_floats(const std::vector<double>& x) { return Floats(x.begin(), x.end()); }

// ‖Δ‖/‖ref‖ of every row. One rounding to bfloat16 is off by up to 2^-8 where a row has few
// elements.
inline void check_near(const BackendCase& c, const Floats& got, const std::vector<double>& want,
                       int64_t cols, double bf16_tolerance, double f32_tolerance = 1e-5) {
  const CompareResult result = compare_rows(got, to_floats(want), cols);
  INFO(c.name << ": " << result.describe());
  const double narrow = cols < 64 ? 4e-3 : 0.0;
  CHECK(result.within(c.rounds() ? std::max(bf16_tolerance, narrow) : f32_tolerance));
}

// A value that is rounded once is the rounded reference, but where fp32 sums it across a boundary.
// A second rounding, of any operand, moves several percent of the elements.
inline void check_rounded_once(const BackendCase& c, const Floats& got,
                               const std::vector<double>& want, double share = 0.01) {
  if (!c.rounds()) return;
  REQUIRE(got.size() == want.size());
  int64_t moved = 0;
  for (size_t i = 0; i < got.size(); ++i)
    moved += !(got[i] == c.round(static_cast<float>(want[i])));
  INFO(c.name << ": " << moved << " of " << got.size()
              << " elements are not the rounded reference");
  CHECK(static_cast<double>(moved) <= 1.0 + share * static_cast<double>(got.size()));
}

// The output of rows [first, first + rows) of a case, made on a fresh set of arrays.
using RowOp = std::function<Floats(Device&, int64_t first, int64_t rows)>;

// T rows together, in two calls, one by one, and by 1, 2 and 3 threads: the same bits. A GPU, which
// has no threads of the host, does it all again instead.
inline void check_row_bits(const BackendCase& c, int64_t T, const RowOp& op) {
  Device one(c);
  const Floats whole = op(one, 0, T);
  for (const int threads : c.cuda ? std::vector<int>{1} : std::vector<int>{2, 3}) {
    Device more(c, threads);
    INFO(c.name << ", " << threads << " threads, " << T << " rows");
    CHECK(same_bits(op(more, 0, T), whole));
  }
  const auto in_pieces = [&](int64_t piece) {
    Floats out;
    for (int64_t first = 0; first < T; first += piece) {
      const Floats part = op(one, first, std::min(piece, T - first));
      out.insert(out.end(), part.begin(), part.end());
    }
    return out;
  };
  for (const int64_t piece : {int64_t{1}, int64_t{7}, T / 2 + 1}) {
    INFO(c.name << ", " << T << " rows by " << piece);
    CHECK(same_bits(in_pieces(piece), whole));
  }
  CHECK(one.guards_hold());
}

}  // namespace mla::test
