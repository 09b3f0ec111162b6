// Memory and weights, embedding, norms, products, RoPE with the cache write.
#include <fmt/format.h>

#include <array>
#include <set>

#include "tests/ops/backends.h"
#include "tests/support/error_text.h"

namespace mla::test::dense_test {
namespace {

const std::vector<int64_t> kUgly = {1, 3, 17, 63, 64, 65, 127, 129};

size_t at(int64_t i) { return static_cast<size_t>(i); }

TEST_CASE("The CUDA backend takes part in these tests") {
  MLA_NEED_CUDA();
  const std::vector<BackendCase> cases = backend_cases();
  REQUIRE(std::count_if(cases.begin(), cases.end(), [](const auto& c) { return c.cuda; }) == 1);
  Device dev(cases.back());
  CHECK(dev->name() == "cuda");
}

TEST_CASE("Memory is zeroed and weights may come in pieces of any dtype") {
  for (const BackendCase& c : backend_cases()) {
    Device dev(c);
    const auto* memory = static_cast<const uint8_t*>(dev->allocate(10000, "ten thousand bytes"));
    const std::vector<uint8_t> zeros = dev.read_plain<uint8_t>(memory, 10000);
    CHECK(std::count(zeros.begin(), zeros.end(), 0) == 10000);
    CHECK(dev->dtype() == c.dtype);

    const int64_t rows = c.size(37), cols = c.size(19), stride = c.stride(cols + 4);
    const Floats x = random_values(c, 5 * cols, 1);
    Floats w(at(rows * cols));
    std::mt19937 random(2);
    std::vector<bf16> as_bf16(at(rows * stride));
    std::vector<uint16_t> as_f16(at(rows * stride));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < cols; ++k) {
        // (1 + i/64)·2^e: exact in all three dtypes.
        const uint32_t i = random() % 64, e = random() % 4;
        w[at(r * cols + k)] =
            (1.0f + static_cast<float>(i) / 64.0f) * std::ldexp(1.0f, static_cast<int>(e) - 4);
        as_bf16[at(r * stride + k)] = to_bf16(w[at(r * cols + k)]);
        as_f16[at(r * stride + k)] = static_cast<uint16_t>((e + 11) << 10 | i << 4);
      }
    const auto result = [&](const Matrix& m) {
      void* out = dev.poisoned(5 * rows);
      dev->linear({.x = dev.array(x), .w = m, .out = out, .out_f32 = false, .T = 5});
      return dev.read(out, 5 * rows);
    };
    const Floats whole = result(dev.matrix(MatrixKind::linear, 1, rows, cols, w));
    for (const DType stored : {DType::bf16, DType::f16}) {
      Matrix m = dev->create_matrix(MatrixKind::linear, 1, rows, cols, stored, 0, 0);
      for (const int64_t first : {0, 17}) {
        const int64_t piece = first == 0 ? 17 : rows - 17;
        const void* from = stored == DType::bf16
                               ? static_cast<const void*>(as_bf16.data() + first * stride)
                               : as_f16.data() + first * stride;
        dev->set_rows(
            m, 0, first,
            {.data = from, .dtype = stored, .rows = piece, .cols = cols, .row_stride = stride});
      }
      dev->finish_matrix(m);
      INFO(c.name << " stored " << name_of(stored));
      CHECK(same_bits(result(m), whole));
    }
    Matrix m = dev->create_matrix(MatrixKind::linear, 2, rows, cols, c.dtype, 0, 0);
    const auto put = [&](int64_t expert, int64_t first, int64_t width) {
      return error_text([&] {
        dev->set_rows(
            m, expert, first,
            {.data = w.data(), .dtype = DType::f32, .rows = 10, .cols = width, .row_stride = cols});
      });
    };
    CHECK(put(1, rows - 10, cols) == "(no error)");
    CHECK(put(0, rows - 9, cols) ==
          fmt::format("weight rows [{}, {}) of {} columns do not fit a matrix [{}, {}]", rows - 9,
                      rows + 1, cols, rows, cols));
    CHECK(put(2, 0, cols) != "(no error)");
    CHECK(put(-1, 0, cols) != "(no error)");
    CHECK(put(0, -1, cols) != "(no error)");
    CHECK(put(0, 0, cols - 1) != "(no error)");
    dev->finish_matrix(m);  // reads of `w` end
  }
}

// Beyond what is copied or converted at a time.
TEST_CASE("Large weights of any dtype arrive whole") {
  const int64_t rows = 1056, cols = 4112;
  for (const BackendCase& c : bf16_cases()) {
    std::vector<float> values(at(rows * cols));
    std::vector<bf16> rounded;
    std::vector<uint16_t> halves;
    std::mt19937 random(3);
    for (float& value : values) {
      const uint32_t fraction = random() % 64, e = random() % 4;  // exact in all three dtypes
      value =
          (1.0f + static_cast<float>(fraction) / 64.0f) * std::ldexp(1.0f, static_cast<int>(e) - 4);
      rounded.push_back(to_bf16(value));
      halves.push_back(static_cast<uint16_t>((e + 11) << 10 | fraction << 4));
    }
    const Floats x = random_values(c, cols, 1);
    const auto result = [&](MatrixKind kind, DType stored, const void* data) {
      Device dev(c);
      Matrix m = dev->create_matrix(kind, 1, rows, cols, stored, 0, 0);
      for (const int64_t first : {int64_t{0}, rows / 2})
        dev->set_rows(
            m, 0, first,
            {.data = static_cast<const std::byte*>(data) + at(first * cols) * size_of(stored),
             .dtype = stored,
             .rows = rows / 2,
             .cols = cols,
             .row_stride = cols});
      dev->finish_matrix(m);
      const bool gated = kind == MatrixKind::gate_up;
      const int64_t outputs = gated ? rows / 2 : rows;
      void* out = dev.poisoned(outputs);
      if (gated) {
        dev->gated_linear({.x = dev.array(x), .w = m, .out = out, .T = 1});
      } else {
        dev->linear({.x = dev.array(x), .w = m, .out = out, .out_f32 = false, .T = 1});
      }
      return dev.read(out, outputs);
    };
    for (const MatrixKind kind : {MatrixKind::linear, MatrixKind::gate_up}) {
      INFO(c.name);
      const Floats want = result(kind, DType::bf16, rounded.data());
      CHECK(same_bits(result(kind, DType::f32, values.data()), want));
      CHECK(same_bits(result(kind, DType::f16, halves.data()), want));
    }
  }
}

TEST_CASE("Memory that cannot be had is an error with its name and size") {
  for (const BackendCase& c : backend_cases()) {
    Device dev(c);
    for (const size_t bytes : {~size_t{0}, ~size_t{0} - 4095, ~size_t{0} / 2}) {
      const std::string text = error_text([&] { dev->allocate(bytes, "the KV cache"); });
      INFO(text);
      CHECK(text.find("the KV cache: " + std::to_string(bytes) + " bytes") == 0);
    }
  }
}

TEST_CASE("Embedding looks rows up") {
  for (const BackendCase& c : backend_cases())
    for (const int64_t near_H : {1, 17, 129}) {
      const int64_t H = c.size(near_H), vocab = c.size(65);
      const Floats table = random_values(c, vocab * H, 1);
      const std::vector<int32_t> ids = {64, 0, 64, 63, 1, 17};
      Device dev(c);
      void* out = dev.poisoned(6 * H);
      dev->embed({.ids = dev.plain(ids),
                  .table = dev.matrix(MatrixKind::embedding, 1, vocab, H, table),
                  .out = out,
                  .T = 6});
      Floats want;
      for (const int32_t id : ids) {
        const Floats row = rows_of(table, H, id, 1);
        want.insert(want.end(), row.begin(), row.end());
      }
      CHECK(same_bits(dev.read(out, 6 * H), want));
      CHECK(dev.guards_hold());
    }
}

TEST_CASE("A negative id is the token that a slot of the device has") {
  for (const BackendCase& c : backend_cases()) {
    const int64_t H = c.size(33), vocab = c.size(65);
    const Floats table = random_values(c, vocab * H, 1);
    Device dev(c);
    void* out = dev.poisoned(4 * H);
    dev->embed({.ids = dev.plain(std::vector<int32_t>{-1, 7, -3, -2}),
                .sampled = dev.plain(std::vector<int32_t>{64, 0, 17}),
                .table = dev.matrix(MatrixKind::embedding, 1, vocab, H, table),
                .out = out,
                .T = 4});
    Floats want;
    for (const int64_t id : {64, 7, 17, 0}) {
      const Floats row = rows_of(table, H, id, 1);
      want.insert(want.end(), row.begin(), row.end());
    }
    INFO(c.name);
    CHECK(same_bits(dev.read(out, 4 * H), want));
  }
}

TEST_CASE("A download that does not wait has its bytes when it was waited for") {
  for (const BackendCase& c : backend_cases()) {
    Device dev(c);
    auto* host = static_cast<int32_t*>(dev->allocate_host(3 * 4 * sizeof(int32_t)));
    const std::vector<std::vector<int32_t>> values = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 9, 9, 9}};
    int32_t* data = dev.plain(values[0]);
    std::vector<uint64_t> tickets;
    for (size_t i = 0; i < values.size(); ++i) {
      dev->upload(data, values[i].data(), 4 * sizeof(int32_t));
      tickets.push_back(dev->download_later(host + 4 * i, data, 4 * sizeof(int32_t)));
    }
    for (size_t i = 0; i < values.size(); ++i) {
      dev->wait(tickets[i]);
      INFO(c.name << ", download " << i);
      CHECK(std::equal(values[i].begin(), values[i].end(), host + 4 * i));
    }
    dev->synchronize();
  }
}

// RMSNorm of x [T, dim] in double.
std::vector<double> rms_norm(const Floats& x, const Floats& weight, int64_t dim, double eps) {
  std::vector<double> out;
  for (size_t row = 0; row < x.size(); row += at(dim)) {
    double sum = 0.0;
    for (int64_t i = 0; i < dim; ++i) sum += double{x[row + at(i)]} * double{x[row + at(i)]};
    const double factor = 1.0 / std::sqrt(sum / static_cast<double>(dim) + eps);
    for (int64_t i = 0; i < dim; ++i)
      out.push_back(double{x[row + at(i)]} * factor * double{weight[at(i)]});
  }
  return out;
}

TEST_CASE("A norm reads strided rows and rounds once") {
  const float eps = 0.01f;  // large enough to be missed
  for (const BackendCase& c : backend_cases())
    for (const int64_t near_dim : {1, 17, 64, 129, 2048}) {
      const int64_t dim = c.size(near_dim), T = 65, stride = c.stride(dim + 7);
      const Floats x = random_values(c, T * dim, 3, 0.2f);
      const Floats weight = random_values({c.name, c.make, DType::f32}, dim, 4);
      const RowOp op = [&](Device& dev, int64_t first, int64_t rows) {
        void* out = dev.poisoned(rows * dim);
        dev->norm({.x = dev.array(padded(rows_of(x, dim, first, rows), dim, stride)),
                   .x_stride = stride,
                   .weight = dev.plain(weight),
                   .out = out,
                   .T = rows,
                   .dim = dim,
                   .eps = eps});
        return dev.read(out, rows * dim);
      };
      Device dev(c);
      const Floats got = op(dev, 0, T);
      check_near(c, got, rms_norm(x, weight, dim, double{eps}), dim, 3e-3);
      check_rounded_once(c, got, rms_norm(x, weight, dim, double{eps}));
      check_row_bits(c, T, op);
    }
}

TEST_CASE("The residual is rounded once before its norm") {
  for (const BackendCase& c : backend_cases())
    for (const int64_t near_H : {1, 17, 129, 2048})
      for (const bool with_delta : {true, false}) {
        const int64_t H = c.size(near_H), T = 33;
        const Floats residual = random_values(c, T * H, 5);
        const Floats delta = random_values({c.name, c.make, DType::f32}, T * H, 6);
        const Floats weight = random_values({c.name, c.make, DType::f32}, H, 7);
        Floats sum = residual;
        if (with_delta)
          for (size_t i = 0; i < sum.size(); ++i) sum[i] = c.round(residual[i] + delta[i]);
        const RowOp op = [&](Device& dev, int64_t first, int64_t rows) {
          void* r = dev.array(rows_of(residual, H, first, rows));
          void* out = dev.poisoned(rows * H);
          dev->add_norm({.residual = r,
                         .delta = with_delta ? dev.plain(rows_of(delta, H, first, rows)) : nullptr,
                         .weight = dev.plain(weight),
                         .rows = nullptr,
                         .out = out,
                         .T = rows,
                         .H = H,
                         .eps = 1e-6f});
          CHECK(same_bits(dev.read(r, rows * H), rows_of(sum, H, first, rows)));
          return dev.read(out, rows * H);
        };
        Device dev(c);
        const Floats whole = op(dev, 0, T);
        check_near(c, whole, rms_norm(sum, weight, H, 1e-6), H, 3e-3);
        check_rounded_once(c, whole, rms_norm(sum, weight, H, 1e-6));
        if (H < 2048) check_row_bits(c, T, op);

        // Chosen rows: the residual is only read, and the bits are those of the whole.
        const std::vector<int32_t> rows = {32, 0, 31, 31};
        void* r = dev.array(residual);
        void* out = dev.poisoned(4 * H);
        dev->add_norm({.residual = r,
                       .delta = with_delta ? dev.plain(delta) : nullptr,
                       .weight = dev.plain(weight),
                       .rows = dev.plain(rows),
                       .out = out,
                       .T = 4,
                       .H = H,
                       .eps = 1e-6f});
        CHECK(same_bits(dev.read(r, T * H), residual));
        for (int64_t i = 0; i < 4; ++i)
          CHECK(
              same_bits(rows_of(dev.read(out, 4 * H), H, i, 1), rows_of(whole, H, rows[at(i)], 1)));
        CHECK(dev.guards_hold());
      }
}

TEST_CASE("A linear layer is a product of any size with one rounding or none") {
  // 600 columns run in two blocks of K.
  for (const BackendCase& c : backend_cases())
    for (const auto& near : std::vector<std::pair<int64_t, int64_t>>{
             {1, 1}, {17, 64}, {64, 63}, {129, 65}, {40, 600}}) {
      const int64_t rows = c.size(near.first), cols = c.size(near.second);
      const double tolerance = c.cuda ? 2e-5 : rows == 1 ? 1e-4 : 1e-5;
      const Floats w = weights(c, rows * cols, cols, 8);
      for (const int64_t T : kUgly) {
        const Floats x = random_values(c, T * cols, static_cast<uint32_t>(T));
        const std::vector<double> want = product(x, w.data(), rows, cols);
        Device dev(c);
        const Matrix m = dev.matrix(MatrixKind::linear, 1, rows, cols, w);
        void* out = dev.poisoned(T * rows);
        float* out_f32 = dev.poisoned_plain<float>(T * rows);
        dev->linear({.x = dev.array(x), .w = m, .out = out, .out_f32 = false, .T = T});
        dev->linear({.x = dev.array(x), .w = m, .out = out_f32, .out_f32 = true, .T = T});
        INFO(rows << " x " << cols << ", " << T << " rows");
        const Floats exact = dev.read_plain<float>(out_f32, T * rows);
        CHECK(compare_rows(exact, to_floats(want), rows).within(tolerance));
        Floats rounded = exact;
        for (float& v : rounded) v = c.round(v);
        CHECK(same_bits(dev.read(out, T * rows), rounded));
        CHECK(dev.guards_hold());
      }
      const Floats x = random_values(c, 129 * cols, 9);
      check_row_bits(c, 129, [&](Device& dev, int64_t first, int64_t n) {
        void* out = dev.poisoned(n * rows);
        dev->linear({.x = dev.array(rows_of(x, cols, first, n)),
                     .w = dev.matrix(MatrixKind::linear, 1, rows, cols, w),
                     .out = out,
                     .out_f32 = false,
                     .T = n});
        return dev.read(out, n * rows);
      });
    }
}

TEST_CASE("A bfloat16 weight in a float32 run is the same weight") {
  for (const BackendCase& c : backend_cases()) {
    if (c.rounds()) continue;
    const Floats w = weights(backend_cases()[0], 33 * 65, 65, 1), x = random_values(c, 3 * 65, 2);
    std::vector<bf16> stored;
    for (const float v : w) stored.push_back(to_bf16(v));
    Device dev(c);
    Matrix m = dev->create_matrix(MatrixKind::linear, 1, 33, 65, DType::bf16, 0, 0);
    dev->set_rows(
        m, 0, 0,
        {.data = stored.data(), .dtype = DType::bf16, .rows = 33, .cols = 65, .row_stride = 65});
    dev->finish_matrix(m);
    std::vector<Floats> got;
    for (const Matrix& each : {m, dev.matrix(MatrixKind::linear, 1, 33, 65, w)}) {
      void* out = dev.poisoned(3 * 33);
      dev->linear({.x = dev.array(x), .w = each, .out = out, .out_f32 = false, .T = 3});
      got.push_back(dev.read(out, 3 * 33));
    }
    CHECK(same_bits(got[0], got[1]));
  }
}

TEST_CASE("A gated layer keeps gate and up in fp32 until the one rounding of their product") {
  for (const BackendCase& c : backend_cases())
    for (const auto& near :
         std::vector<std::pair<int64_t, int64_t>>{{1, 3}, {17, 65}, {65, 63}, {129, 520}}) {
      const int64_t I = c.size(near.first), cols = c.size(near.second);
      const Floats w =
          random_values(c, 2 * I * cols, 10, 3.0f / std::sqrt(static_cast<float>(cols)));
      const Floats x = random_values(c, 127 * cols, 11);
      const RowOp op = [&](Device& dev, int64_t first, int64_t rows) {
        void* out = dev.poisoned(rows * I);
        dev->gated_linear({.x = dev.array(rows_of(x, cols, first, rows)),
                           .w = dev.matrix(MatrixKind::gate_up, 1, 2 * I, cols, w),
                           .out = out,
                           .T = rows});
        return dev.read(out, rows * I);
      };
      Device dev(c);
      const Floats got = op(dev, 0, 127);
      const std::vector<double> want = gated(x, w.data(), I, cols);
      if (I > 1) check_near(c, got, want, I, 3e-3);
      check_rounded_once(c, got, want);
      check_row_bits(c, 127, op);
    }
}

TEST_CASE("RoPE turns the pairs 2i and 2i+1 and writes normed latents to their slots alone") {
  const float eps = 0.01f;
  using Shapes = std::vector<std::array<int32_t, 4>>;
  const Shapes shapes = {{2, 16, 8, 32}, {3, 13, 6, 37}, {1, 128, 64, 512}};
  const Shapes released = {{1, 128, 64, 512}, {3, 128, 64, 512}, {33, 128, 64, 512}};
  for (const BackendCase& c : backend_cases())
    for (const auto& [N, P, R, L] : c.cuda ? released : shapes) {
      const int64_t T = 17, q_dim = N * (P + R), row = L + R, q_stride = q_dim + row, slots = 64;
      const int32_t max_len = 400;
      const Floats q = random_values(c, T * q_dim, 12), kv = random_values(c, T * row, 13, 0.2f);
      const Floats weight = random_values({c.name, c.make, DType::f32}, L, 14);
      Floats table;
      for (int32_t p = 0; p < max_len; ++p)
        for (int32_t i = 0; i < R; ++i) {
          const float angle =
              static_cast<float>(p) * std::pow(0.1f, static_cast<float>(i % (R / 2)) / 3.0f);
          table.push_back(i < R / 2 ? std::cos(angle) : std::sin(angle));
        }
      std::vector<int32_t> positions;
      std::vector<int64_t> slot;
      for (int32_t t = 0; t < T; ++t) {
        positions.push_back(1 + t * 23);  // position 0 turns nothing
        slot.push_back((t * 29 + 5) % slots);
      }
      // q and kv_a in one matrix, as the layers have them.
      Floats both;
      for (int64_t t = 0; t < T; ++t) {
        both.insert(both.end(), q.begin() + t * q_dim, q.begin() + (t + 1) * q_dim);
        both.insert(both.end(), kv.begin() + t * row, kv.begin() + (t + 1) * row);
      }
      const auto turned = [&](const float* x, int64_t t, std::vector<double>& out) {
        const float* cs = table.data() + int64_t{positions[at(t)]} * R;
        for (int32_t i = 0; i < R / 2; ++i) {
          const double a = double{x[2 * i]}, b = double{x[2 * i + 1]}, co = double{cs[i]},
                       si = double{cs[R / 2 + i]};
          out.push_back(a * co - b * si);
          out.push_back(b * co + a * si);
        }
      };
      // q_pe of all heads, then the cache row; NaN where a slot of no row was written.
      const RowOp op = [&](Device& dev, int64_t first, int64_t rows) {
        auto* base = static_cast<std::byte*>(dev.array(rows_of(both, q_stride, first, rows)));
        void* cache = dev.poisoned(slots * row);
        dev->rope_cache({.q = base,
                         .q_stride = q_stride,
                         .kv_a = base + at(q_dim) * size_of(c.dtype),
                         .kv_stride = q_stride,
                         .norm_weight = dev.plain(weight),
                         .rope_table = dev.plain(table),
                         .positions = dev.plain(std::vector<int32_t>(
                             positions.begin() + first, positions.begin() + first + rows)),
                         .slots = dev.plain(std::vector<int64_t>(slot.begin() + first,
                                                                 slot.begin() + first + rows)),
                         .cache = cache,
                         .T = rows,
                         .N = N,
                         .P = P,
                         .R = R,
                         .L = L,
                         .eps = eps});
        const Floats after = dev.read(base, rows * q_stride), cached = dev.read(cache, slots * row);
        Floats out;
        std::set<int64_t> written;
        for (int64_t r = 0; r < rows; ++r) {
          written.insert(slot[at(first + r)]);
          const Floats row_q = rows_of(after, q_stride, r, 1);
          for (int32_t h = 0; h < N; ++h) {
            CHECK(std::equal(row_q.begin() + h * (P + R), row_q.begin() + h * (P + R) + P,
                             q.begin() + (first + r) * q_dim + h * (P + R)));
            out.insert(out.end(), row_q.begin() + h * (P + R) + P,
                       row_q.begin() + (h + 1) * (P + R));
          }
          CHECK(std::equal(row_q.begin() + q_dim, row_q.end(), kv.begin() + (first + r) * row));
          const Floats cache_row = rows_of(cached, row, slot[at(first + r)], 1);
          out.insert(out.end(), cache_row.begin(), cache_row.end());
        }
        for (int64_t s = 0; s < slots; ++s)
          if (!written.count(s))
            CHECK((std::isnan(cached[at(s * row)]) && std::isnan(cached[at(s * row + row - 1)])));
        return out;
      };
      std::vector<double> want;
      for (int64_t t = 0; t < T; ++t) {
        for (int32_t h = 0; h < N; ++h) turned(q.data() + t * q_dim + h * (P + R) + P, t, want);
        const std::vector<double> normed = rms_norm(
            Floats(kv.begin() + t * row, kv.begin() + t * row + L), weight, L, double{eps});
        want.insert(want.end(), normed.begin(), normed.end());
        turned(kv.data() + t * row + L, t, want);
      }
      Device dev(c);
      const Floats got = op(dev, 0, T);
      check_near(c, got, want, N * R + row, 3e-3);
      check_rounded_once(c, got, want);
      check_row_bits(c, T, op);
    }
}

TEST_CASE("A padding row writes no cache and its neighbours keep their bits") {
  for (const BackendCase& c : backend_cases()) {
    const int32_t N = 2, P = c.cuda ? 128 : 16, R = c.cuda ? 64 : 8, L = c.cuda ? 512 : 32;
    const int64_t q_dim = N * (P + R), row = L + R, slots = 4;
    const Floats q = random_values(c, 3 * q_dim, 1), kv = random_values(c, 3 * row, 2);
    const Floats table = random_values({c.name, c.make, DType::f32}, 6 * R, 3);
    const auto run = [&](Device& dev, const std::vector<int32_t>& rows,
                         const std::vector<int32_t>& positions, const std::vector<int64_t>& slot) {
      Floats some_q, some_kv;
      for (const int32_t r : rows) {
        const Floats a = rows_of(q, q_dim, r, 1), b = rows_of(kv, row, r, 1);
        some_q.insert(some_q.end(), a.begin(), a.end());
        some_kv.insert(some_kv.end(), b.begin(), b.end());
      }
      void* cache = dev.poisoned(slots * row);
      dev->rope_cache({.q = dev.array(some_q),
                       .q_stride = q_dim,
                       .kv_a = dev.array(some_kv),
                       .kv_stride = row,
                       .norm_weight = dev.plain(Floats(at(L), 1.0f)),
                       .rope_table = dev.plain(table),
                       .positions = dev.plain(positions),
                       .slots = dev.plain(slot),
                       .cache = cache,
                       .T = static_cast<int64_t>(rows.size()),
                       .N = N,
                       .P = P,
                       .R = R,
                       .L = L,
                       .eps = 1e-6f});
      CHECK(dev.guards_hold());
      return dev.read(cache, slots * row);
    };
    Device dev(c);
    const Floats padded = run(dev, {0, 1, 2}, {5, -1, 2}, {2, -1, 0});
    const Floats without = run(dev, {0, 2}, {5, 2}, {2, 0});
    INFO(c.name);
    for (const int64_t slot : {0, 2})
      CHECK(same_bits(rows_of(padded, row, slot, 1), rows_of(without, row, slot, 1)));
    for (const int64_t slot : {1, 3})
      for (const float x : rows_of(padded, row, slot, 1)) CHECK(std::isnan(x));
  }
}

TEST_CASE("No op minds a call without rows") {
  for (const BackendCase& c : backend_cases()) {
    Device dev(c);
    const Matrix linear = dev.matrix(MatrixKind::linear, 3, 16, 16, Floats(768, 1.0f));
    const Matrix gate_up = dev.matrix(MatrixKind::gate_up, 3, 32, 16, Floats(1536, 1.0f));
    void* x = dev.poisoned(16);
    dev->linear({.x = x, .w = linear, .out = x, .out_f32 = false, .T = 0});
    dev->gated_linear({.x = x, .w = gate_up, .out = x, .T = 0});
    dev->experts({.x = x,
                  .ids = nullptr,
                  .gate_up = gate_up,
                  .down = linear,
                  .inner = x,
                  .out = x,
                  .T = 0,
                  .E = 2,
                  .K = 1,
                  .S = 1});
    dev->combine(
        {.expert_out = x, .weights = nullptr, .residual = x, .T = 0, .H = 16, .K = 1, .S = 1});
    dev->norm(
        {.x = x, .x_stride = 16, .weight = nullptr, .out = x, .T = 0, .dim = 16, .eps = 1e-6f});
    const Floats after = dev.read(x, 16);
    CHECK(std::all_of(after.begin(), after.end(), [](float v) { return std::isnan(v); }));
    CHECK(dev.guards_hold());
  }
}

}  // namespace
}  // namespace mla::test::dense_test
