// What tensor parallelism asks of ops: sums that are rounded, columns in parts, random weights of
// which a rank has a piece.
#include "tests/ops/backends.h"
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend_impl.h"
#endif

namespace mla::test::rank_ops_test {
namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

TEST_CASE("A delta in the run dtype is added as the same values in fp32 are") {
  for (const BackendCase& c : backend_cases())
    for (const int64_t near_H : {1, 17, 129, 2048})
      for (const bool chosen : {false, true}) {
        const int64_t H = c.size(near_H), T = 33;
        const Floats residual = random_values(c, T * H, 5), delta = random_values(c, T * H, 6);
        const Floats weight = random_values({c.name, c.make, DType::f32}, H, 7);
        const std::vector<int32_t> rows = {32, 0, 31, 31};
        const int64_t n = chosen ? 4 : T;
        const auto normed = [&](bool rounded, Floats* kept) {
          Device dev(c);
          void* r = dev.array(residual);
          void* out = dev.poisoned(n * H);
          dev->add_norm({.residual = r,
                         .delta = rounded ? nullptr : dev.plain(delta),
                         .delta_rounded = rounded ? dev.array(delta) : nullptr,
                         .weight = dev.plain(weight),
                         .rows = chosen ? dev.plain(rows) : nullptr,
                         .out = out,
                         .T = n,
                         .H = H,
                         .eps = 1e-6f});
          *kept = dev.read(r, T * H);
          CHECK(dev.guards_hold());
          return dev.read(out, n * H);
        };
        Floats kept[2];
        INFO(c.name << " H " << H << (chosen ? " chosen rows" : ""));
        CHECK(same_bits(normed(true, &kept[0]), normed(false, &kept[1])));
        CHECK(same_bits(kept[0], kept[1]));
        CHECK(same_bits(kept[0], residual) == chosen);
      }
}

TEST_CASE("Combine gives its sum alone in order of rank with one rounding") {
  for (const BackendCase& c : backend_cases())
    for (const auto& [K, S] : std::vector<std::pair<int32_t, int32_t>>{{6, 2}, {1, 0}, {3, 1}})
      for (const int64_t near_H : {1, 17, 129}) {
        const int64_t H = c.size(near_H), T = 65, width = K + S;
        const Floats out = random_values(c, T * width * H, 21);
        const Floats w = random_values({c.name, c.make, DType::f32}, T * K, 23, 0.3f);
        Floats want;
        for (int64_t t = 0; t < T; ++t)
          for (int64_t i = 0; i < H; ++i) {
            float sum = 0.0f;
            for (int64_t k = 0; k < width; ++k)
              sum =
                  std::fma(k < K ? w[at(t * K + k)] : 1.0f, out[at((t * width + k) * H + i)], sum);
            want.push_back(c.round(sum));
          }
        const RowOp op = [&](Device& dev, int64_t first, int64_t rows) {
          void* sum = dev.poisoned(rows * H);
          dev->combine({.expert_out = dev.array(rows_of(out, width * H, first, rows)),
                        .weights = dev.plain(rows_of(w, K, first, rows)),
                        .residual = nullptr,
                        .sum = sum,
                        .T = rows,
                        .H = H,
                        .K = K,
                        .S = S});
          return dev.read(sum, rows * H);
        };
        Device dev(c);
        CHECK(same_bits(op(dev, 0, T), want));
        check_row_bits(c, T, op);
      }
}

TEST_CASE("Columns in parts are put together and the room behind the last is left out") {
  for (const BackendCase& c : backend_cases())
    for (const auto& [cols, width] :
         std::vector<std::pair<int64_t, int64_t>>{{96, 48}, {96, 32}, {100, 48}, {17, 16}, {5, 16}})
      for (const int64_t rows : {1, 3, 130}) {
        const int64_t parts = (cols + width - 1) / width;
        Floats from, want(at(rows * cols));
        for (int64_t p = 0; p < parts; ++p)
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < width; ++i) {
              const int64_t col = p * width + i;
              from.push_back(static_cast<float>(r * 1000 + col));
              if (col < cols) want[at(r * cols + col)] = from.back();
            }
        Device dev(c);
        auto* out = dev.poisoned_plain<float>(rows * cols);
        dev->join_columns(
            {.parts = dev.plain(from), .out = out, .rows = rows, .width = width, .cols = cols});
        INFO(c.name << " " << rows << " rows of " << cols << " by " << width);
        CHECK(same_bits(dev.read_plain<float>(out, rows * cols), want));
        CHECK(dev.guards_hold());
      }
}

#ifdef MLA_WITH_CUDA

TEST_CASE("A GPU's random weights of a piece are those of the whole at its place") {
  MLA_NEED_CUDA();
  const BackendCase c = backend_cases().back();
  const int64_t rows = 96, cols = 64;
  const NormalTensor whole{
      .seed = 5, .deviation = 1.0f, .rows = rows, .cols = cols, .row_stride = cols};
  const auto values = [&](Matrix& m, Device& dev) {  // of all of the matrix
    dev->finish_matrix(m);
    return dev.read(m.data, m.experts * m.rows * m.cols);
  };
  Device dev(c);
  Matrix all = dev->create_matrix(MatrixKind::linear, 1, rows, cols, DType::bf16);
  REQUIRE(dev->fill_normal(all, 0, 0, whole));
  const Floats want = values(all, dev);
  double sum = 0, squares = 0;
  for (const float x : want) sum += x, squares += double{x} * double{x};
  const double n = static_cast<double>(want.size());
  CHECK(std::fabs(sum / n) < 0.05);
  CHECK(std::fabs(squares / n - 1) < 0.1);

  // Rows [32, 64), the last 48 columns, in a wider matrix as expert 1.
  NormalTensor part = whole;
  part.first_row = 32;
  part.first_col = 16;
  part.rows = 32;
  part.cols = 48;
  Matrix piece = dev->create_matrix(MatrixKind::linear, 2, 40, 64, DType::bf16);
  dev->fill_normal(piece, 1, 8, part);
  const Floats got = values(piece, dev);
  for (int64_t r = 0; r < 80; ++r)
    for (int64_t k = 0; k < 64; ++k) {
      const bool filled = r >= 48 && k < 48;
      CHECK(got[at(r * 64 + k)] == (filled ? want[at((r - 48 + 32) * cols + k + 16)] : 0.0f));
    }

  // Gate and up are interleaved by 8 rows.
  Matrix halves = dev->create_matrix(MatrixKind::gate_up, 1, 32, cols, DType::bf16);
  part = whole;
  part.rows = 16;
  dev->fill_normal(halves, 0, 0, part);
  part.first_row = 16;
  dev->fill_normal(halves, 0, 16, part);
  const Floats pairs = values(halves, dev);
  for (int64_t r = 0; r < 32; ++r) {
    const int64_t from = r / 16 * 8 + r % 8 + (r % 16 < 8 ? 0 : 16);
    CHECK(same_bits(rows_of(pairs, cols, r, 1), rows_of(want, cols, from, 1)));
  }
}

TEST_CASE("A GPU adds ranks in their order in fp32 and rounds once") {
  MLA_NEED_CUDA();
  const BackendCase c = backend_cases().back();
  for (const int ranks : {2, 3, 4, 8})
    for (const int64_t count : {int64_t{8}, int64_t{2048}, int64_t{2048} * 1031}) {
      Device dev(c);
      const Floats parts = random_values(c, ranks * count, 3);
      const void* from = dev.array(parts);
      void* out = dev.poisoned(count);
      auto* backend = dynamic_cast<cuda::CudaBackend*>(dev.operator->());
      REQUIRE(backend);
      cuda::sum_ranks(from, ranks, count, out, backend->launch());
      Floats want;
      for (int64_t i = 0; i < count; ++i) {
        float sum = parts[at(i)];
        for (int r = 1; r < ranks; ++r) sum += parts[at(r * count + i)];
        want.push_back(c.round(sum));
      }
      INFO(ranks << " ranks, " << count << " elements");
      CHECK(same_bits(dev.read(out, count), want));
      CHECK(dev.guards_hold());
    }
}

#endif

}  // namespace
}  // namespace mla::test::rank_ops_test
