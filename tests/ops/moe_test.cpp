// Router, experts, combine.
#include <set>

#include "tests/ops/backends.h"

#if defined(__SANITIZE_ADDRESS__)
#define MLA_UNDER_SANITIZER 1
#else
#define MLA_UNDER_SANITIZER 0
#endif

namespace mla::test::moe_test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

size_t at(int64_t i) { return static_cast<size_t>(i); }

struct Routed {
  std::vector<int32_t> ids;
  Floats weights;
};

Routed run_router(Device& dev, const Floats& x, int64_t H, const Floats& gate, int32_t E, int32_t K,
                  int32_t groups, int32_t kept, float factor,
                  const std::vector<int32_t>& positions = {}) {
  const int64_t T = static_cast<int64_t>(x.size()) / H;
  auto* ids = dev.poisoned_plain<int32_t>(T * K);
  auto* w = dev.poisoned_plain<float>(T * K);
  dev->router({.x = dev.array(x),
               .gate = dev.matrix(MatrixKind::linear, 1, E, H, gate),
               .positions = positions.empty() ? nullptr : dev.plain(positions),
               .logits = dev.poisoned_plain<float>(T * E),
               .ids = ids,
               .weights = w,
               .T = T,
               .E = E,
               .K = K,
               .groups = groups,
               .kept_groups = kept,
               .scaling_factor = factor});
  return {dev.read_plain<int32_t>(ids, T * K), dev.read_plain<float>(w, T * K)};
}

TEST_CASE("The router takes the best experts of the best groups with softmax weights") {
  struct Shape {
    int32_t E, K, groups, kept;
  };
  const std::vector<Shape> shapes = {
      {64, 6, 1, 1}, {17, 3, 1, 1}, {1, 1, 1, 1}, {24, 4, 8, 3}, {63, 6, 9, 2}};
  const std::vector<Shape> of_16 = {{64, 6, 1, 1}, {16, 3, 1, 1}, {16, 16, 1, 1},
                                    {48, 4, 8, 3}, {64, 6, 8, 2}, {160, 6, 8, 3}};
  for (const BackendCase& c : backend_cases())
    for (const Shape s : c.cuda ? of_16 : shapes) {
      const int64_t H = c.size(65), T = 127;
      const Floats x = random_values(c, T * H, 15), gate = weights(c, s.E * H, H, 16);
      const std::vector<double> logits = product(x, gate.data(), s.E, H);
      Device dev(c);
      const Routed got = run_router(dev, x, H, gate, s.E, s.K, s.groups, s.kept, 2.5f);
      CHECK(dev.guards_hold());
      int64_t near_ties = 0;
      for (int64_t t = 0; t < T; ++t) {
        std::vector<double> score(logits.begin() + t * s.E, logits.begin() + (t + 1) * s.E);
        double sum = 0.0;
        for (double& v : score) sum += v = std::exp(v);
        for (double& v : score) v /= sum;
        const int32_t size = s.E / s.groups;
        std::vector<std::pair<double, int32_t>> best;
        for (int32_t g = 0; g < s.groups; ++g)
          best.push_back(
              {-*std::max_element(score.begin() + g * size, score.begin() + (g + 1) * size), g});
        std::sort(best.begin(), best.end());
        std::vector<std::pair<double, int32_t>> order;
        for (int32_t g = 0; g < s.kept; ++g)
          for (int32_t e = best[at(g)].second * size; e < (best[at(g)].second + 1) * size; ++e)
            order.push_back({-score[at(e)], e});
        std::sort(order.begin(), order.end());
        bool narrow = false;
        for (size_t i = 0; i + 1 < order.size() && i < at(s.K); ++i)
          narrow |= order[i + 1].first - order[i].first < 1e-6;
        if (s.kept < s.groups) narrow |= best[at(s.kept)].first - best[at(s.kept - 1)].first < 1e-6;
        near_ties += narrow;
        if (narrow) continue;
        for (int32_t k = 0; k < s.K; ++k) {
          INFO(c.name << ", row " << t << ", rank " << k);
          CHECK(got.ids[at(t * s.K + k)] == order[at(k)].second);
          CHECK(std::fabs(double{got.weights[at(t * s.K + k)]} + 2.5 * order[at(k)].first) <= 1e-5);
        }
      }
      CHECK(near_ties * 10 <= T);
      check_row_bits(c, T, [&](Device& one, int64_t first, int64_t rows) {
        const Routed part =
            run_router(one, rows_of(x, H, first, rows), H, gate, s.E, s.K, s.groups, s.kept, 2.5f);
        Floats out = Floats(part.ids.begin(), part.ids.end());
        // By rows, so that calls one after another are the whole.
        Floats rows_out;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t k = 0; k < s.K; ++k) {
            rows_out.push_back(out[at(r * s.K + k)]);
            rows_out.push_back(part.weights[at(r * s.K + k)]);
          }
        return rows_out;
      });
    }
}

TEST_CASE("Router ties go to the lower expert and rows of NaN get distinct valid experts") {
  const int32_t K = 4;
  for (const BackendCase& c : backend_cases())
    for (const int32_t groups : {1, 4}) {
      const int32_t E = static_cast<int32_t>(c.size(12));
      const int64_t H = c.size(3);
      // Experts 2, 5, 7 and 11 tie for the best, the rest tie below.
      Floats gate(at(E * H), 0.0f);
      const std::vector<int32_t> best = {2, 5, 7, 11};
      for (const int32_t e : best) gate[at(e * H)] = 1.0f;
      const float inf = std::numeric_limits<float>::infinity();
      Floats x(at(6 * H), 0.0f);
      x[0] = 1, x[at(2 * H)] = kNan, x[at(3 * H + 1)] = kNan, x[at(4 * H)] = inf;
      x[at(5 * H)] = -1;
      Device dev(c);
      const Routed got = run_router(dev, x, H, gate, E, K, groups, 2, 1.0f);
      const auto row = [&](int64_t t) {
        return std::vector<int32_t>(got.ids.begin() + t * K, got.ids.begin() + (t + 1) * K);
      };
      INFO(c.name << ", groups " << groups);
      // Of four groups, of three or four, the first two stay: {0..2} and {3..5}, or to 7.
      const int32_t kept = groups == 1 ? E : 2 * E / groups;
      std::vector<int32_t> want;
      for (const int32_t e : best)
        if (e < kept) want.push_back(e);
      for (int32_t e = 0; want.size() < at(K); ++e)
        if (std::find(best.begin(), best.end(), e) == best.end()) want.push_back(e);
      CHECK(row(0) == want);
      CHECK(row(1) == std::vector<int32_t>{0, 1, 2, 3});
      CHECK(row(5)[0] == 0);
      for (int64_t t = 0; t < 6; ++t) {
        const std::vector<int32_t> ids = row(t);
        CHECK(std::set<int32_t>(ids.begin(), ids.end()).size() == at(K));
        CHECK(std::all_of(ids.begin(), ids.end(), [&](int32_t e) { return e >= 0 && e < E; }));
      }
    }
}

TEST_CASE("A padding row goes to no expert and its neighbours keep their bits") {
  const int32_t K = 3, S = 1;
  const int64_t H = 48, I = 32, T = 5, width = K + S;
  for (const BackendCase& c : backend_cases()) {
    const int32_t E = static_cast<int32_t>(c.size(8));
    Floats x = random_values(c, T * H, 15);
    const Floats gate = weights(c, E * H, H, 16);
    const Floats gate_up = weights(c, (E + S) * 2 * I * H, H, 18);
    const Floats down = weights(c, (E + S) * H * I, I, 19);
    const std::vector<int32_t> positions = {0, -1, 9, -1, 3};
    // What stands in a padding row is of no matter.
    std::fill_n(x.begin() + 3 * H, H, kNan);
    Device dev(c);
    const Routed all = run_router(dev, x, H, gate, E, K, 1, 1, 1.0f);
    const Routed got = run_router(dev, x, H, gate, E, K, 1, 1, 1.0f, positions);
    const auto run = [&](const std::vector<int32_t>& ids) {
      void* out = dev.poisoned(T * width * H);
      dev->experts({.x = dev.array(x),
                    .ids = dev.plain(ids),
                    .gate_up = dev.matrix(MatrixKind::gate_up, E + S, 2 * I, H, gate_up),
                    .down = dev.matrix(MatrixKind::linear, E + S, H, I, down),
                    .inner = dev.poisoned(T * width * I),
                    .out = out,
                    .T = T,
                    .E = E,
                    .K = K,
                    .S = S});
      return dev.read(out, T * width * H);
    };
    const Floats padded = run(got.ids), whole = run(all.ids);
    INFO(c.name);
    for (int64_t t = 0; t < T; ++t) {
      const bool padding = positions[at(t)] < 0;
      for (int64_t k = 0; k < K; ++k) {
        CHECK(got.ids[at(t * K + k)] == (padding ? -1 : all.ids[at(t * K + k)]));
        if (!padding) CHECK(got.weights[at(t * K + k)] == all.weights[at(t * K + k)]);
      }
      if (!padding)
        CHECK(same_bits(rows_of(padded, width * H, t, 1), rows_of(whole, width * H, t, 1)));
    }
    CHECK(dev.guards_hold());
    // Not a single row for any expert.
    run(std::vector<int32_t>(at(T * K), -1));
    CHECK(dev.guards_hold());
  }
}

TEST_CASE("Experts give each slot the output of its expert whatever the routing") {
  struct Shape {
    int32_t E, K, S;
    int64_t H, I, T;
  };
  for (const BackendCase& c : backend_cases())
    for (const Shape shape : {Shape{8, 3, 2, 33, 17, 129}, Shape{5, 1, 0, 16, 65, 17},
                              Shape{64, 6, 1, 65, 40, 3}, Shape{4, 2, 1, 48, 63, 1}})
      for (const int routing : {0, 1, 2}) {
        Shape s = shape;
        s.E = static_cast<int32_t>(c.size(s.E)), s.H = c.size(s.H), s.I = c.size(s.I);
        const int64_t width = s.K + s.S, experts = s.E + s.S;
        const Floats x = random_values(c, s.T * s.H, 17);
        const Floats gate_up = random_values(c, experts * 2 * s.I * s.H, 18,
                                             2.0f / std::sqrt(static_cast<float>(s.H)));
        const Floats down = weights(c, experts * s.H * s.I, s.I, 19);
        std::vector<int32_t> ids;
        std::mt19937 random(20);
        for (int64_t t = 0; t < s.T; ++t)
          for (int32_t k = 0; k < s.K; ++k)
            // Scattered; all tokens to the same experts, the last first; neighbours of the token.
            ids.push_back(static_cast<int32_t>(routing == 0 ? random() % static_cast<uint32_t>(s.E)
                                               : routing == 1
                                                   ? static_cast<uint32_t>(s.E - 1 - k)
                                                   : static_cast<uint32_t>((t + k) % s.E)));
        const RowOp op = [&](Device& dev, int64_t first, int64_t rows) {
          void* out = dev.poisoned(rows * width * s.H);
          dev->experts({.x = dev.array(rows_of(x, s.H, first, rows)),
                        .ids = dev.plain(std::vector<int32_t>(ids.begin() + first * s.K,
                                                              ids.begin() + (first + rows) * s.K)),
                        .gate_up = dev.matrix(MatrixKind::gate_up, experts, 2 * s.I, s.H, gate_up),
                        .down = dev.matrix(MatrixKind::linear, experts, s.H, s.I, down),
                        .inner = dev.poisoned(rows * width * s.I),
                        .out = out,
                        .T = rows,
                        .E = s.E,
                        .K = s.K,
                        .S = s.S});
          return dev.read(out, rows * width * s.H);
        };
        std::vector<double> want;
        for (int64_t t = 0; t < s.T; ++t)
          for (int64_t k = 0; k < width; ++k) {
            const int64_t e = k < s.K ? ids[at(t * s.K + k)] : s.E + k - s.K;
            Floats inner = to_floats(
                gated(rows_of(x, s.H, t, 1), gate_up.data() + e * 2 * s.I * s.H, s.I, s.H));
            for (float& v : inner) v = c.round(v);
            const std::vector<double> slot = product(inner, down.data() + e * s.H * s.I, s.H, s.I);
            want.insert(want.end(), slot.begin(), slot.end());
          }
        Device dev(c);
        INFO("routing " << routing << ", " << s.E << " experts");
        const Floats got = op(dev, 0, s.T);
        check_near(c, got, want, s.H, 4e-3);
        check_rounded_once(c, got, want);
        CHECK(dev.guards_hold());
        if (routing < 2) check_row_bits(c, s.T, op);
      }
}

TEST_CASE("Combine sums in order of rank then shared then residual with one rounding") {
  for (const BackendCase& c : backend_cases())
    for (const auto& [K, S] : std::vector<std::pair<int32_t, int32_t>>{{6, 2}, {1, 0}, {3, 1}})
      for (const int64_t near_H : {1, 17, 129}) {
        const int64_t H = c.size(near_H), T = 65, width = K + S;
        const Floats out = random_values(c, T * width * H, 21),
                     residual = random_values(c, T * H, 22);
        const Floats w = random_values({c.name, c.make, DType::f32}, T * K, 23, 0.3f);
        std::vector<double> want;
        Floats ordered;
        for (int64_t t = 0; t < T; ++t)
          for (int64_t i = 0; i < H; ++i) {
            double sum = 0.0;
            float in_order = 0.0f;
            for (int64_t k = 0; k < width; ++k) {
              const float weight = k < K ? w[at(t * K + k)] : 1.0f,
                          x = out[at((t * width + k) * H + i)];
              sum += double{weight} * double{x};
              in_order = std::fma(weight, x, in_order);
            }
            want.push_back(sum + double{residual[at(t * H + i)]});
            ordered.push_back(c.round(in_order + residual[at(t * H + i)]));
          }
        const RowOp op = [&](Device& dev, int64_t first, int64_t rows) {
          void* r = dev.array(rows_of(residual, H, first, rows));
          dev->combine({.expert_out = dev.array(rows_of(out, width * H, first, rows)),
                        .weights = dev.plain(rows_of(w, K, first, rows)),
                        .residual = r,
                        .T = rows,
                        .H = H,
                        .K = K,
                        .S = S});
          return dev.read(r, rows * H);
        };
        Device dev(c);
        const Floats got = op(dev, 0, T);
        CHECK(same_bits(got, ordered));  // fused multiply-adds in this order, on every backend
        if (H > 1) check_near(c, got, want, H, 3e-3);
        check_rounded_once(c, got, want);
        check_row_bits(c, T, op);
      }
}

// The expert outputs are never written, so they read as zero and take no memory but the last row.
void check_large_combine(const BackendCase& c) {
  const int32_t K = 62, S = 2;
  const int64_t H = 2048, T = (int64_t{1} << 31) / (H * (K + S)) + 1;
  Device dev(c);
  auto* out = static_cast<bf16*>(
      dev->allocate(at(T * (K + S) * H) * 2, "expert outputs of more than 2^31 elements"));
  const Floats last = random_values(c, (K + S) * H, 1), w = random_values(c, K, 2);
  std::vector<bf16> rounded;
  for (const float x : last) rounded.push_back(to_bf16(x));
  dev->upload(out + (T - 1) * (K + S) * H, rounded.data(), rounded.size() * 2);
  auto* weights = static_cast<float*>(dev->allocate(at(T * K) * 4, "weights"));
  dev->upload(weights + (T - 1) * K, w.data(), w.size() * 4);
  auto* residual = static_cast<bf16*>(dev->allocate(at(T * H) * 2, "residual"));
  dev->combine({.expert_out = out,
                .weights = weights,
                .residual = residual,
                .T = T,
                .H = H,
                .K = K,
                .S = S});
  Device small(c);
  void* one = small.array(Floats(at(H), 0.0f));
  small->combine({.expert_out = small.array(last),
                  .weights = small.plain(w),
                  .residual = one,
                  .T = 1,
                  .H = H,
                  .K = K,
                  .S = S});
  CHECK(same_bits(dev.read(residual + (T - 1) * H, H), small.read(one, H)));
  CHECK(same_bits(dev.read(residual + (T - 2) * H, H), Floats(at(H), 0.0f)));
}

TEST_CASE("Combine reads expert outputs beyond two to the 31 elements") {
  if (MLA_UNDER_SANITIZER) MLA_SKIP("4 GB are too slow under a sanitizer");
  for (const BackendCase& c : bf16_cases()) {
    INFO(c.name);
    check_large_combine(c);
  }
}

}  // namespace
}  // namespace mla::test::moe_test
