// mla_decode against plain loops in double and against prefill, and its bits against themselves.
#include "tests/ops/attention_fixture.h"

namespace mla::test::decode_test {
namespace {

const std::vector<int32_t> kKeyLens = {1, 255, 2, 256, 257, 63, 513, 64, 65, 512, 127, 129, 700};

std::vector<Tokens> decode_tokens(const BackendCase& c, const Dims& d) {
  std::vector<Tokens> tokens;
  for (size_t i = 0; i < kKeyLens.size(); ++i)
    tokens.push_back(make_tokens(c, d, kKeyLens[i], static_cast<uint32_t>(200 + i)));
  return tokens;
}

TEST_CASE("The reference by the absorbed path is the one by keys and values") {
  const BackendCase c = backend_cases()[0];
  for (const Dims& d : {kOdd, kRelease}) {
    const Tokens tokens = make_tokens(c, d, 70, 1);
    const Floats& kv_b = make_kv_b(c, d);
    std::vector<double> direct, absorbed;
    reference_row(d, tokens,
                  product(columns(tokens.cache, d.row(), 0, d.L), kv_b.data(), d.kv(), d.L), 70,
                  0.1f, direct);
    reference_absorbed(d, tokens, kv_b, 70, 0.1f, absorbed);
    REQUIRE(direct.size() == absorbed.size());
    for (size_t i = 0; i < direct.size(); ++i)
      CHECK(std::fabs(direct[i] - absorbed[i]) <= 1e-12 * (1 + std::fabs(direct[i])));
  }
}

TEST_CASE("Decode of a ragged batch is attention over the cache around pages and splits") {
  for (const BackendCase& c : backend_cases())
    for (const Dims& d : {fit(c, kEven), fit(c, kOdd), fit(c, Dims{17, 8, 4, 24, 8})}) {
      const std::vector<Tokens> tokens = decode_tokens(c, d);
      const Floats kv_b = make_kv_b(c, d);
      for (const float m2 : {1.0f, 1.59f}) {
        const float scale = m2 / std::sqrt(static_cast<float>(d.D()));
        std::vector<double> want;
        for (size_t i = 0; i < kKeyLens.size(); ++i) {
          // K and V are never rounded on the absorbed path. At the released widths they are many.
          if (c.cuda) {
            reference_absorbed(d, tokens[i], kv_b, kKeyLens[i], scale, want);
            continue;
          }
          const std::vector<double> kv =
              product(columns(tokens[i].cache, d.row(), 0, d.L), kv_b.data(), d.kv(), d.L);
          reference_row(d, tokens[i], kv, kKeyLens[i], scale, want);
        }
        Device dev(c);
        // q_lat, P, O_lat and O are rounded, and a row has few elements; at the released dimensions
        // it is within 4e-3, below.
        check_near(c, run_decode(c, dev, d, tokens, kKeyLens, 0, kKeyLens.size(), scale), want,
                   d.N * d.V, c.cuda ? 5e-3 : 9e-3);
        CHECK(dev.guards_hold());
      }
    }
}

// q_lat, P, O_lat and O are rounded, the sum of P is not of rounded ones. Within one split, and on
// the GPU within one tile of 64 keys: P is rounded relative to the running maximum.
void check_decode_roundings(const BackendCase& c) {
  const Dims d = fit(c, kOdd);
  const int32_t most = c.cuda ? 64 : 100;
  const float scale = c.cuda ? 0.08f : 0.3f;
  const Floats kv_b = make_exact_kv_b(c, d);
  const auto round = [&](double x) { return double{c.round(static_cast<float>(x))}; };
  std::vector<Tokens> tokens;
  std::vector<int32_t> key_lens;
  std::vector<double> want;
  for (int32_t keys = 1; keys <= most; ++keys) {
    key_lens.push_back(keys);
    tokens.push_back(make_exact_tokens(c, d, keys, static_cast<uint32_t>(400 + keys)));
    for (int32_t h = 0; h < d.N; ++h) {
      const float* q = tokens.back().q.data() + (int64_t{keys - 1} * d.N + h) * d.D();
      const float* w = kv_b.data() + int64_t{h} * (d.P + d.V) * d.L;
      std::vector<double> full(at(d.row()), 0.0), p, o(at(d.L), 0.0);  // full: q_lat, then q_pe
      for (int32_t l = 0; l < d.L; ++l) {
        for (int32_t i = 0; i < d.P; ++i) full[at(l)] += double{q[i]} * double{w[i * d.L + l]};
        full[at(l)] = round(full[at(l)]);
      }
      std::copy_n(q + d.P, d.R, full.begin() + d.L);
      const std::vector<double> scores =
          product(tokens.back().cache, Floats(full.begin(), full.end()).data(), 1, d.row());
      const double max = *std::max_element(scores.begin(), scores.end());
      double sum = 0.0;
      for (int32_t k = 0; k < keys; ++k) {
        const double weight = std::exp((scores[at(k)] - max) * double{scale});
        sum += weight;
        for (int32_t l = 0; l < d.L; ++l)
          o[at(l)] += round(weight) * double{tokens.back().cache[at(k * d.row() + l)]};
      }
      for (double& x : o) x = round(x / sum);
      const std::vector<double> out = product(Floats(o.begin(), o.end()), w + d.P * d.L, d.V, d.L);
      want.insert(want.end(), out.begin(), out.end());
    }
  }
  Device dev(c);
  check_rounded_once(c, run_decode(c, dev, d, tokens, key_lens, 0, at(most), scale, &kv_b), want,
                     0.02);
}

TEST_CASE("Decode rounds its four values once each and sums unrounded probabilities") {
  for (const BackendCase& c : bf16_cases()) check_decode_roundings(c);
}

TEST_CASE("Decode bits of a row depend neither on the batch nor on the threads") {
  for (const BackendCase& c : backend_cases()) {
    const Dims d = fit(c, kOdd);
    const std::vector<Tokens> tokens = decode_tokens(c, d);
    check_row_bits(c, static_cast<int64_t>(kKeyLens.size()),
                   [&](Device& dev, int64_t first, int64_t rows) {
                     return run_decode(c, dev, d, tokens, kKeyLens, at(first), at(rows), 0.3f);
                   });
  }
}

TEST_CASE("Decode bits hold for more rows than a unit of work takes") {
  for (const BackendCase& c : backend_cases()) {
    const Dims d = fit(c, kOdd);
    const std::vector<int32_t> key_lens(129, 3);
    std::vector<Tokens> tokens;
    for (uint32_t i = 0; i < 129; ++i) tokens.push_back(make_tokens(c, d, 3, i));
    check_row_bits(c, 129, [&](Device& dev, int64_t first, int64_t rows) {
      return run_decode(c, dev, d, tokens, key_lens, at(first), at(rows), 0.3f);
    });
  }
}

// Few and many rows, short and long ones, which a backend may cut into splits, groups or rows.
TEST_CASE("Decode bits hold however the work of a step is cut") {
  const std::vector<int32_t> lengths = {4700, 70, 2049, 256, 0, 2048, 1025, 3};
  for (const BackendCase& c : backend_cases())
    for (const Dims& d : {fit(c, kOdd), fit(c, Dims{17, 8, 4, 24, 8})}) {
      if (!c.cuda && d.N == 17) continue;  // the CPU has one way of cutting
      Device dev(c);
      const Tokens tokens = make_tokens(c, d, lengths[0], 7);
      const Cache cache = make_cache(c, dev, d, {tokens}, {lengths[0]});
      const auto run = [&](const std::vector<int32_t>& key_lens) {
        Floats q;
        for (const int32_t n : key_lens) {
          const Floats row = rows_of(tokens.q, d.N * d.D(), std::max(0, n - 1), 1);
          q.insert(q.end(), row.begin(), row.end());
        }
        return run_decode_rows(c, dev, d, cache, std::vector<int32_t>(key_lens.size(), 0), key_lens,
                               q, 0.3f);
      };
      std::vector<Floats> alone;
      for (const int32_t n : lengths) alone.push_back(run({n}));
      for (const size_t rows : {5, 40, 90, 150, 260}) {
        std::vector<int32_t> key_lens;
        Floats want;
        for (size_t i = 0; i < rows; ++i) {
          const size_t which = i * i % 11 % lengths.size();
          key_lens.push_back(lengths[which]);
          want.insert(want.end(), alone[which].begin(), alone[which].end());
        }
        INFO(c.name << ", " << rows << " rows");
        for (int again = 0; again < 3; ++again) CHECK(same_bits(run(key_lens), want));
        std::ranges::reverse(key_lens);
        Floats reversed;
        for (size_t i = rows; i-- > 0;) {
          const Floats row = rows_of(want, d.N * d.V, static_cast<int64_t>(i), 1);
          reversed.insert(reversed.end(), row.begin(), row.end());
        }
        CHECK(same_bits(run(key_lens), reversed));
      }
      CHECK(dev.guards_hold());
    }
}

TEST_CASE("A decode row without keys has an output of zero and its neighbours keep their bits") {
  for (const BackendCase& c : backend_cases()) {
    const Dims d = fit(c, kOdd);
    const std::vector<Tokens> tokens = {make_tokens(c, d, 70, 1), make_tokens(c, d, 1, 2),
                                        make_tokens(c, d, 257, 3)};
    Device dev(c);
    const Floats got = run_decode(c, dev, d, tokens, {70, 0, 257}, 0, 3, 0.3f);
    const Floats empty = rows_of(got, d.N * d.V, 1, 1);
    CHECK(std::all_of(empty.begin(), empty.end(), [](float x) { return x == 0.0f; }));
    CHECK(same_bits(rows_of(got, d.N * d.V, 2, 1),
                    run_decode(c, dev, d, tokens, {70, 0, 257}, 2, 1, 0.3f)));
  }
}

TEST_CASE("Decode agrees with prefill at the released dimensions") {
  for (const BackendCase& c : backend_cases()) {
    const Dims& d = kRelease;
    const float scale = 0.11472139f;
    for (const int32_t keys : {1, 2, 64, 255, 256, 257, 513}) {
      const std::vector<Tokens> tokens = {make_tokens(c, d, keys, static_cast<uint32_t>(keys))};
      Device dev(c);
      const Floats prefill = run_prefill(c, dev, d, tokens, {{keys - 1, 1}}, 256, scale);
      const Floats decode = run_decode(c, dev, d, tokens, {keys}, 0, 1, scale);
      const CompareResult result = compare_rows(decode, prefill, d.N * d.V);
      INFO(c.name << ", " << keys << " keys: " << result.describe());
      CHECK(result.within(c.rounds() ? 6e-3 : 1e-5));
      if (keys != 257) continue;
      std::vector<double> want;
      const Floats kv_b = make_kv_b(c, d);
      const std::vector<double> kv =
          product(columns(tokens[0].cache, d.row(), 0, d.L), kv_b.data(), d.kv(), d.L);
      reference_row(d, tokens[0], kv, keys, scale, want);
      check_near(c, prefill, want, d.N * d.V, 4e-3);
      check_near(c, decode, want, d.N * d.V, 4e-3);
    }
  }
}

// slot·576 does not fit 32 bits from slot 3,728,271 on; untouched pages of the cache take no
// memory.
TEST_CASE("Cache rows beyond two to the 31 elements are written and read") {
  const int64_t low = 1, high = 58400, keys = 65;
  for (const BackendCase& c : backend_cases()) {
    const Dims d = fit(c, Dims{1, 16, 64, 512, 16});
    const float scale = c.cuda ? 0.1f : 0.2f;
    Device dev(c);
    const size_t bytes = at((high + 2) * kPageTokens * d.row()) * size_of(c.dtype);
    void* cache = dev->allocate(bytes, "a cache of more than 2^31 elements");
    const Tokens tokens = make_tokens(c, d, static_cast<int32_t>(keys), 8);
    const Matrix kv_b = dev.matrix(MatrixKind::kv_b, 1, d.kv(), d.L, make_kv_b(c, d), d.N, d.P);
    std::vector<Floats> results;
    for (const int64_t page : {low, high}) {
      std::vector<int64_t> slots;
      std::vector<int32_t> positions;
      for (int64_t k = 0; k < keys; ++k) {
        slots.push_back(page * kPageTokens + k);
        positions.push_back(static_cast<int32_t>(k));
      }
      Floats rope;
      for (int64_t k = 0; k < keys * d.R; ++k) rope.push_back(k % d.R < d.R / 2 ? 0.6f : 0.8f);
      void* q = dev.array(tokens.q);
      dev->rope_cache({.q = q,
                       .q_stride = d.D(),
                       .kv_a = dev.array(tokens.cache),
                       .kv_stride = d.row(),
                       .norm_weight = dev.plain(Floats(at(d.L), 1.0f)),
                       .rope_table = dev.plain(rope),
                       .positions = dev.plain(positions),
                       .slots = dev.plain(slots),
                       .cache = cache,
                       .T = keys,
                       .N = d.N,
                       .P = d.P,
                       .R = d.R,
                       .L = d.L,
                       .eps = 1e-6f});
      const int32_t* table = dev.plain(std::vector<int32_t>{
          static_cast<int32_t>(page), static_cast<int32_t>(page + 1), kUnusedPage});
      const auto* prefill =
          dev.plain(std::vector<PrefillSpan>{{0, static_cast<int32_t>(keys), 0, 0}});
      const auto* spans = dev.plain(std::vector<KeySpan>{{0, 0, static_cast<int32_t>(keys), 0}});
      const auto* tile = dev.plain(std::vector<WorkTile>{{0, 0}});  // of keys and of queries
      void* workspace = dev.poisoned((keys + kKeyTile) * d.kv());
      void* out = dev.poisoned(keys * d.N * d.V);
      dev->kv_up({.cache = cache,
                  .page_table = table,
                  .prefill = prefill,
                  .spans = spans,
                  .num_spans = 1,
                  .tiles = tile,
                  .num_tiles = 1,
                  .kv_b = kv_b,
                  .workspace = workspace,
                  .L = d.L,
                  .R = d.R});
      dev->mla_prefill({.q = q,
                        .q_stride = d.D(),
                        .workspace = workspace,
                        .cache = cache,
                        .page_table = table,
                        .prefill = prefill,
                        .spans = spans,
                        .num_spans = 1,
                        .tiles = tile,
                        .num_tiles = 1,
                        .state_max = nullptr,
                        .state_sum = nullptr,
                        .state_out = nullptr,
                        .out = out,
                        .N = d.N,
                        .P = d.P,
                        .R = d.R,
                        .L = d.L,
                        .V = d.V,
                        .scale = scale});
      Floats result = dev.read(out, keys * d.N * d.V);
      void* decoded = dev.poisoned(d.N * d.V);
      const int64_t last_q = (keys - 1) * d.D() * static_cast<int64_t>(size_of(c.dtype));
      dev->mla_decode({.q = static_cast<std::byte*>(q) + last_q,
                       .q_stride = d.D(),
                       .cache = cache,
                       .page_table = table,
                       .rows = dev.plain(std::vector<DecodeRow>{{65, 0, 0}}),
                       .D = 1,
                       .splits = dev.plain(std::vector<DecodeSplit>{{0, 0}}),
                       .groups = dev.plain(std::vector<DecodeSplit>{{0, 0}}),
                       .num_splits = dev.plain(std::vector<int32_t>{1, 1}),
                       .kv_b = kv_b,
                       .q_lat = dev.poisoned(d.L),
                       .o_lat = dev.poisoned(d.L),
                       .out = decoded,
                       .N = d.N,
                       .P = d.P,
                       .R = d.R,
                       .L = d.L,
                       .V = d.V,
                       .scale = scale});
      const Floats last = dev.read(decoded, d.N * d.V);
      CHECK(compare_rows(last, rows_of(result, d.N * d.V, keys - 1, 1), d.N * d.V).within(1e-2));
      result.insert(result.end(), last.begin(), last.end());
      results.push_back(result);
    }
    INFO(c.name);
    CHECK(same_bits(results[1], results[0]));
  }
}

}  // namespace
}  // namespace mla::test::decode_test
