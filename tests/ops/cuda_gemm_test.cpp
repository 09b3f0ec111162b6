// The products of the CUDA backend: one result, bit for bit, from every kernel, for every number of
// rows.
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/gemm.h"

#include <fmt/format.h>

#include <type_traits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/matrix.h"
#include "tests/ops/backends.h"

namespace mla::test::cuda_gemm_test {
namespace {

using cuda::Epilogue;
using cuda::Gemm;

const std::vector<int64_t> kRowCounts = {1, 3, 17, 63, 64, 65, 127, 129, 257, 1013};
const std::vector<int64_t> kSizes = {48, 64, 96, 256, 528, 1408, 2048};
constexpr int kTile = 0;  // gemm_tile among the token counts of gemm_stream
const std::vector<int> kKernels = {kTile, 8, 16, 32, 64, 128};
constexpr int64_t kMost = 1013;

size_t at(int64_t i) { return static_cast<size_t>(i); }

// A stream and memory of the test, all bits one where nothing was copied.
class Gpu {
 public:
  Gpu() {
    MLA_CUDA_CHECK(cudaSetDevice(0));
    MLA_CUDA_CHECK(cudaDeviceGetAttribute(&launch_.sms, cudaDevAttrMultiProcessorCount, 0));
    MLA_CUDA_CHECK(cudaStreamCreate(&launch_.stream));
    launch_.taken = static_cast<int32_t*>(take(sizeof(int32_t)));
    MLA_CUDA_CHECK(cudaMemsetAsync(launch_.taken, 0, sizeof(int32_t), launch_.stream));
  }
  ~Gpu() {
    for (void* block : blocks_) cudaFree(block);
    cudaStreamDestroy(launch_.stream);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  void* take(size_t bytes) {
    void* block = nullptr;
    MLA_CUDA_CHECK(cudaMalloc(&block, bytes));
    blocks_.push_back(block);
    poison(block, bytes);
    return block;
  }
  void poison(void* block, size_t bytes) {
    MLA_CUDA_CHECK(cudaMemsetAsync(block, 0xff, bytes, launch_.stream));
  }
  bf16* copy(const std::vector<bf16>& values) {
    void* block = take(values.size() * sizeof(bf16));
    MLA_CUDA_CHECK(cudaStreamSynchronize(launch_.stream));
    MLA_CUDA_CHECK(
        cudaMemcpy(block, values.data(), values.size() * sizeof(bf16), cudaMemcpyHostToDevice));
    return static_cast<bf16*>(block);
  }
  std::vector<uint8_t> bytes(const void* from, size_t count) {
    std::vector<uint8_t> result(count);
    MLA_CUDA_CHECK(cudaStreamSynchronize(launch_.stream));
    MLA_CUDA_CHECK(cudaMemcpy(result.data(), from, count, cudaMemcpyDeviceToHost));
    return result;
  }
  void run(const Gemm& g, int kernel) {
    if (kernel == kTile) return cuda::gemm_tile(g, launch_);
    cuda::gemm_stream(g, kernel, launch_);
  }

 private:
  cuda::Launch launch_{};
  std::vector<void*> blocks_;
};

// Normal values, or such times 2^-12 to 2^12.
std::vector<bf16> values(int64_t count, uint32_t seed, float scale, bool wide = false) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<bf16> result;
  result.reserve(at(count));
  for (int64_t i = 0; i < count; ++i) {
    const float x = normal(random);
    result.push_back(to_bf16(wide ? std::ldexp(x, static_cast<int>(random() % 25) - 12) : x));
  }
  return result;
}

float weight_scale(int64_t k) { return 1.0f / std::sqrt(static_cast<float>(k)); }

int64_t out_columns(Epilogue e, int64_t n) { return e == Epilogue::silu ? n / 2 : n; }
int64_t element(Epilogue e) { return e == Epilogue::f32 ? 4 : 2; }

Gemm product(const bf16* a, int64_t T, const bf16* w, int64_t n, int64_t k, Epilogue epilogue) {
  Gemm g;
  g.a = a;
  g.a_rows = T;
  g.a_cols = g.a_stride = g.k = g.w_stride = k;
  g.w = w;
  g.n = n;
  g.w_matrix_stride = n * k;
  g.out_stride = out_columns(epilogue, n);
  g.epilogue = epilogue;
  g.rows.T = static_cast<int32_t>(T);
  return g;
}

template <class X>
std::vector<X> as(const std::vector<uint8_t>& bytes) {
  std::vector<X> result(bytes.size() / sizeof(X));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

// Outputs of all rows from one kernel; 8 rows more than there are stay as they were.
std::vector<uint8_t> outputs(Gpu& gpu, Gemm g, int kernel, void* out) {
  const int64_t row = g.out_stride * element(g.epilogue);
  gpu.poison(out, at((g.rows.T + 8) * row));
  g.out = out;
  gpu.run(g, kernel);
  std::vector<uint8_t> all = gpu.bytes(out, at((g.rows.T + 8) * row));
  const auto end = all.begin() + g.rows.T * row;
  CHECK(std::all_of(end, all.end(), [](uint8_t x) { return x == 0xff; }));
  all.erase(end, all.end());
  return all;
}

// Rows of fp32 outputs against sums in double, bf16 and SiLU outputs against the fp32 ones.
void check_values(const std::vector<bf16>& a, const std::vector<bf16>& w, int64_t n, int64_t k,
                  const std::vector<float>& f32, const std::vector<bf16>& rounded,
                  const std::vector<bf16>& silu) {
  Floats got;
  std::vector<double> want;
  for (const int64_t t : {0, 1, 63, 64, 127, 128, 500, 1012}) {
    got.insert(got.end(), f32.begin() + t * n, f32.begin() + (t + 1) * n);
    for (int64_t r = 0; r < n; ++r) {
      double sum = 0.0;
      for (int64_t i = 0; i < k; ++i)
        sum += double{to_f32(a[at(t * k + i)])} * double{to_f32(w[at(r * k + i)])};
      want.push_back(sum);
    }
  }
  const CompareResult result = compare_rows(got, to_floats(want), n);
  INFO(result.describe());
  CHECK(result.within(2e-5));

  int64_t wrong = 0;
  for (size_t i = 0; i < f32.size(); ++i) wrong += !(rounded[i] == to_bf16(f32[i]));
  CHECK(wrong == 0);

  std::vector<double> want_silu;
  Floats got_silu;
  for (int64_t t = 0; t < kMost; ++t)
    for (int64_t i = 0; i < n / 2; ++i) {  // column i: gate of row 16·(i/8) + i%8, up 8 rows on
      const int64_t gate = t * n + i / 8 * 16 + i % 8;
      const double x = double{f32[at(gate)]};
      want_silu.push_back(x / (1.0 + std::exp(-x)) * double{f32[at(gate + 8)]});
      got_silu.push_back(to_f32(silu[at(t * (n / 2) + i)]));
    }
  const CompareResult gated = compare_rows(got_silu, to_floats(want_silu), n / 2);
  INFO(gated.describe());
  CHECK(gated.within(n < 128 ? 4e-3 : 3e-3));
}

TEST_CASE("Both product kernels give the same bits for every number of rows and tile") {
  MLA_NEED_CUDA();
  Gpu gpu;
  const int64_t largest = kSizes.back();
  void* out = gpu.take(at((kMost + 8) * largest * 4));
  const std::vector<bf16> all_a = values(kMost * largest, 1, 1.0f);
  const std::vector<bf16> all_wide = values(kMost * largest, 2, 1.0f, true);
  const bf16* dev_a = gpu.copy(all_a);
  const bf16* dev_wide = gpu.copy(all_wide);
  for (const int64_t k : kSizes) {
    const std::vector<bf16> w = values(largest * k, 3, weight_scale(k));
    const bf16* dev_w = gpu.copy(w);
    for (const int64_t n : kSizes)
      for (const bool wide : {false, true}) {
        std::vector<std::vector<uint8_t>> whole;
        for (const Epilogue e : {Epilogue::f32, Epilogue::bf16, Epilogue::silu}) {
          const bf16* a = wide ? dev_wide : dev_a;
          const int64_t row = out_columns(e, n) * element(e);
          whole.push_back(outputs(gpu, product(a, kMost, dev_w, n, k, e), kTile, out));
          for (const int64_t T : kRowCounts) {
            // Wide values are for the order of sums, which no epilogue changes.
            if (wide && (e != Epilogue::f32 || (T != 17 && T != kMost))) continue;
            for (const int kernel : kKernels) {
              const std::vector<uint8_t> got =
                  outputs(gpu, product(a, T, dev_w, n, k, e), kernel, out);
              INFO("n " << n << ", k " << k << ", " << T << " rows, kernel " << kernel
                        << ", epilogue " << static_cast<int>(e) << ", wide " << wide);
              CHECK(std::memcmp(got.data(), whole.back().data(), at(T * row)) == 0);
            }
          }
        }
        if (wide) continue;
        INFO("n " << n << ", k " << k);
        check_values(all_a, w, n, k, as<float>(whole[0]), as<bf16>(whole[1]), as<bf16>(whole[2]));
      }
  }
}

TEST_CASE("A product with several matrices is that of each") {
  MLA_NEED_CUDA();
  const int64_t matrices = 3;
  Gpu gpu;
  for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
           {512, 128}, {128, 512}, {48, 64}, {264, 96}, {96, 48}})
    for (const int64_t T : kRowCounts) {
      const bf16* a = gpu.copy(values(T * matrices * k, 4, 1.0f));
      const bf16* w = gpu.copy(values(matrices * n * k, 5, weight_scale(k)));
      for (const Epilogue e : {Epilogue::f32, Epilogue::bf16}) {
        void* out = gpu.take(at((T + 8) * matrices * n * 4));
        Gemm g = product(a, T, w, n, k, e);
        g.a_cols = g.a_stride = matrices * k;
        g.out_stride = matrices * n;
        Gemm all = g;
        all.matrices = matrices;
        all.a_step = k;
        all.out_step = n;
        const std::vector<uint8_t> whole = outputs(gpu, all, kTile, out);
        const int64_t row = n * element(e);
        for (const int kernel : kKernels) {
          INFO("n " << n << ", k " << k << ", " << T << " rows, kernel " << kernel);
          CHECK(outputs(gpu, all, kernel, out) == whole);
        }
        for (int64_t m = 0; m < matrices; ++m) {
          Gemm one = g;
          one.a = a + m * k;
          one.a_cols = k;
          one.w = w + m * n * k;
          one.out_stride = n;
          const std::vector<uint8_t> alone = outputs(gpu, one, kTile, out);
          int64_t wrong = 0;
          for (int64_t t = 0; t < T; ++t)
            wrong += std::memcmp(alone.data() + t * row, whole.data() + (t * matrices + m) * row,
                                 at(row)) != 0;
          INFO("n " << n << ", k " << k << ", " << T << " rows, matrix " << m);
          CHECK(wrong == 0);
        }
      }
    }
}

TEST_CASE("Rows of NaN stay in their rows") {
  MLA_NEED_CUDA();
  const int64_t n = 528, k = 96, T = 257;
  const std::vector<int64_t> bad = {0, 7, 8, 63, 64, 130, 256};
  Gpu gpu;
  std::vector<bf16> a = values(T * k, 6, 1.0f);
  const bf16* w = gpu.copy(values(n * k, 7, weight_scale(k)));
  const bf16* clean = gpu.copy(a);
  for (const int64_t t : bad) std::fill_n(a.begin() + t * k, k, bf16{0x7fc0});
  const bf16* poisoned = gpu.copy(a);
  void* out = gpu.take(at((T + 8) * n * 4));
  for (const int kernel : kKernels) {
    const auto want =
        as<float>(outputs(gpu, product(clean, T, w, n, k, Epilogue::f32), kernel, out));
    const auto got =
        as<float>(outputs(gpu, product(poisoned, T, w, n, k, Epilogue::f32), kernel, out));
    int64_t wrong = 0;
    for (int64_t t = 0; t < T; ++t) {
      const bool is_bad = std::find(bad.begin(), bad.end(), t) != bad.end();
      for (int64_t i = t * n; i < (t + 1) * n; ++i)
        wrong += is_bad ? !std::isnan(got[at(i)])
                        : std::memcmp(&got[at(i)], &want[at(i)], sizeof(float)) != 0;
    }
    INFO("kernel " << kernel);
    CHECK(wrong == 0);
  }
}

// All T to 64, every seventh, and those around the places where kernels and tiles change.
std::vector<int64_t> row_counts_to(int64_t most) {
  std::vector<int64_t> result;
  for (int64_t T = 1; T <= most; ++T) {
    bool edge = T <= 64 || T % 7 == 0;
    for (const int64_t at_edge : {128, 256, 512, 1024})
      edge |= T >= at_edge - 1 && T <= at_edge + 1;
    if (edge) result.push_back(T);
  }
  return result;
}

TEST_CASE("A row's bits are the same in products of any number of rows of V2-Lite's layers") {
  MLA_NEED_CUDA();
  struct Layer {
    int64_t rows, cols;
    Epilogue epilogue;
  };
  constexpr int64_t kRows = 1024;
  for (const Layer& layer : {Layer{3648, 2048, Epilogue::bf16}, Layer{2048, 2048, Epilogue::f32},
                             Layer{21888, 2048, Epilogue::silu}, Layer{2048, 10944, Epilogue::f32},
                             Layer{64, 2048, Epilogue::f32}, Layer{4096, 512, Epilogue::bf16}}) {
    const auto dev = make_cuda_backend(CudaOptions{});
    const bool silu = layer.epilogue == Epilogue::silu;
    const Matrix w = dev->create_matrix(silu ? MatrixKind::gate_up : MatrixKind::linear, 1,
                                        layer.rows, layer.cols, DType::bf16);
    const int64_t row = out_columns(layer.epilogue, layer.rows) * element(layer.epilogue);
    auto* x = static_cast<bf16*>(dev->allocate(at(kRows * layer.cols) * sizeof(bf16), "x"));
    void* out = dev->allocate(at(kRows * row), "out");
    cuda::fill_normal(w.data, layer.rows * layer.cols, 8, weight_scale(layer.cols), nullptr);
    cuda::fill_normal(x, kRows * layer.cols, 9, 1.0f, nullptr);
    MLA_CUDA_CHECK(cudaDeviceSynchronize());
    auto* whole = static_cast<std::byte*>(dev->allocate_host(at(kRows * row)));
    auto* part = static_cast<std::byte*>(dev->allocate_host(at(kRows * row)));
    const auto run = [&](int64_t first, int64_t T, std::byte* to) {
      MLA_CUDA_CHECK(cudaMemset(out, 0xff, at(T * row)));
      MLA_CUDA_CHECK(cudaDeviceSynchronize());
      const bf16* from = x + first * layer.cols;
      if (silu) {
        dev->gated_linear({.x = from, .w = w, .out = out, .T = T});
      } else {
        dev->linear(
            {.x = from, .w = w, .out = out, .out_f32 = layer.epilogue == Epilogue::f32, .T = T});
      }
      dev->wait(dev->download_later(to, out, at(T * row)));
    };
    run(0, kRows, whole);
    const auto same = [&](int64_t first, int64_t T) {
      run(first, T, part);
      return std::memcmp(part, whole + first * row, at(T * row)) == 0;
    };
    INFO(layer.rows << " x " << layer.cols);
    for (const int64_t T : row_counts_to(kRows)) {
      INFO(T << " rows");
      CHECK(same(0, T));
    }
    for (const int64_t first : {1, 63, 517, 1000})
      for (const int64_t T : {1, 17, 24}) {
        INFO(T << " rows from " << first);
        CHECK(same(first, T));
      }
  }
}

}  // namespace
}  // namespace mla::test::cuda_gemm_test
#endif  // MLA_WITH_CUDA
