// kv_up, mla_prefill and mla_decode against plain loops in double, and their bits against
// themselves.
#include "lib/schedule/step_plan.h"
#include "tests/ops/backends.h"

namespace mla::test {
namespace {

struct Dims {
  int32_t N, P, R, L, V;
  int32_t D() const { return P + R; }
  int32_t row() const { return L + R; }
  int32_t kv() const { return N * (P + V); }
};

constexpr Dims kEven{2, 16, 8, 32, 16};
constexpr Dims kOdd{3, 13, 6, 37, 19};          // no multiple of 16
constexpr Dims kRelease{2, 128, 64, 512, 128};  // V2-Lite's, fewer heads
constexpr int32_t kUnusedPage = 0x7fffff00;     // a read of it is far out of bounds

size_t at(int64_t i) { return static_cast<size_t>(i); }

// A prompt: its new rows are positions [context, context + q_len).
struct Prompt {
  int32_t context, q_len;
  int32_t keys() const { return context + q_len; }
};

// Latents and queries by request and position, whatever the step that computes them.
struct Tokens {
  Floats q;      // [keys, N·(P+R)]
  Floats cache;  // [keys, L+R]
};

Tokens make_tokens(const BackendCase& c, const Dims& d, int32_t keys, uint32_t seed) {
  return {random_values(c, int64_t{keys} * d.N * d.D(), 2 * seed, 1.5f),
          random_values(c, int64_t{keys} * d.row(), 2 * seed + 1)};
}

Floats make_kv_b(const BackendCase& c, const Dims& d) {
  return random_values(c, int64_t{d.kv()} * d.L, 99, 1.0f / std::sqrt(static_cast<float>(d.L)));
}

// A cache in which the requests' pages lie scattered. All rows but their first keys[i] are NaN.
struct Cache {
  std::vector<int32_t> table;        // with unused entries behind each request's
  std::vector<int32_t> table_begin;  // by request
  void* rows = nullptr;
};

Cache make_cache(const BackendCase& c, Device& dev, const Dims& d,
                 const std::vector<Tokens>& tokens, const std::vector<int32_t>& keys) {
  Cache cache;
  int32_t pages = 2;
  for (const int32_t n : keys) pages += n / kPageTokens + 1;
  std::vector<int32_t> order(at(pages));
  for (int32_t i = 0; i < pages; ++i) order[at(i)] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(5));
  Floats rows(at(int64_t{pages} * kPageTokens * d.row()), std::numeric_limits<float>::quiet_NaN());
  size_t next = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    cache.table_begin.push_back(static_cast<int32_t>(cache.table.size()));
    for (int32_t p = 0; p < keys[i]; ++p) {
      if (p % kPageTokens == 0) cache.table.push_back(order[next++]);
      std::copy_n(
          tokens[i].cache.begin() + int64_t{p} * d.row(), d.row(),
          rows.begin() + (int64_t{cache.table.back()} * kPageTokens + p % kPageTokens) * d.row());
    }
    cache.table.insert(cache.table.end(), 3, kUnusedPage);
  }
  (void)c;
  cache.rows = dev.array(rows);
  return cache;
}

// One step of prompts through kv_up and mla_prefill over a workspace of W rows. [T, N·V], the rows
// of the prompts one behind the other. Workspace, state and output are NaN where nothing wrote
// them.
Floats run_prefill(const BackendCase& c, Device& dev, const Dims& d,
                   const std::vector<Tokens>& tokens, const std::vector<Prompt>& prompts, int32_t W,
                   float scale, int32_t* passes = nullptr) {
  StepPlan plan;
  std::vector<int32_t> keys;
  Floats q;
  const int64_t width = d.N * d.D(), stride = width + 5;
  for (size_t i = 0; i < prompts.size(); ++i) {
    keys.push_back(prompts[i].keys());
    const Floats rows = rows_of(tokens[i].q, width, prompts[i].context, prompts[i].q_len);
    plan.prefill.push_back({static_cast<int32_t>(static_cast<int64_t>(q.size()) / width),
                            prompts[i].q_len, prompts[i].context, 0});
    q.insert(q.end(), rows.begin(), rows.end());
  }
  const Cache cache = make_cache(c, dev, d, tokens, keys);
  for (size_t i = 0; i < prompts.size(); ++i) plan.prefill[i].table_begin = cache.table_begin[i];
  cut_passes(plan, W);
  if (passes) *passes = static_cast<int32_t>(plan.passes.size());
  const int64_t T = static_cast<int64_t>(q.size()) / width;
  const Matrix kv_b = dev.matrix(MatrixKind::kv_b, 1, d.kv(), d.L, make_kv_b(c, d), d.N, d.P);
  const void* dev_q = dev.array(padded(q, width, stride));
  const int32_t* table = dev.plain(cache.table);
  const PrefillSpan* prefill = dev.plain(plan.prefill);
  const KeySpan* all_spans = dev.plain(plan.key_spans);
  void* workspace = dev.poisoned(int64_t{W} * d.kv());
  float* state_max = dev.poisoned_plain<float>(T * d.N);
  float* state_sum = dev.poisoned_plain<float>(T * d.N);
  float* state_out = dev.poisoned_plain<float>(T * d.N * d.V);
  void* out = dev.poisoned(T * d.N * d.V);
  for (const Pass& pass : plan.passes) {
    dev.poison(workspace, int64_t{W} * d.kv());
    const KeySpan* spans = all_spans + pass.span_begin;
    const int32_t num_spans = pass.span_end - pass.span_begin;
    dev->kv_up({.cache = cache.rows,
                .page_table = table,
                .prefill = prefill,
                .spans = spans,
                .num_spans = num_spans,
                .kv_b = kv_b,
                .workspace = workspace,
                .L = d.L,
                .R = d.R});
    dev->mla_prefill({.q = dev_q,
                      .q_stride = stride,
                      .workspace = workspace,
                      .cache = cache.rows,
                      .page_table = table,
                      .prefill = prefill,
                      .spans = spans,
                      .num_spans = num_spans,
                      .state_max = state_max,
                      .state_sum = state_sum,
                      .state_out = state_out,
                      .out = out,
                      .N = d.N,
                      .P = d.P,
                      .R = d.R,
                      .L = d.L,
                      .V = d.V,
                      .scale = scale});
  }
  return dev.read(out, T * d.N * d.V);
}

// Attention of the query at position keys - 1 of a request, [N·V] in double; K_nope|V are rounded
// as they are in the workspace.
std::vector<double> reference_kv(const BackendCase& c, const Dims& d, const Tokens& tokens,
                                 const Floats& kv_b) {
  std::vector<double> kv =
      product(columns(tokens.cache, d.row(), 0, d.L), kv_b.data(), d.kv(), d.L);
  for (double& x : kv) x = c.round(static_cast<float>(x));
  return kv;
}

// `p_of` is what a probability is multiplied with V as; the row sum is of those that are not
// rounded.
void reference_row(
    const Dims& d, const Tokens& tokens, const std::vector<double>& kv, int32_t keys, float scale,
    std::vector<double>& out, double (*p_of)(double) = [](double p) { return p; }) {
  for (int32_t h = 0; h < d.N; ++h) {
    const float* q = tokens.q.data() + (int64_t{keys - 1} * d.N + h) * d.D();
    std::vector<double> p;
    double max = -1e300, sum = 0.0;
    for (int32_t k = 0; k < keys; ++k) {
      const double* key = kv.data() + (int64_t{k} * d.N + h) * (d.P + d.V);
      const float* k_pe = tokens.cache.data() + int64_t{k} * d.row() + d.L;
      double s = 0.0;
      for (int32_t i = 0; i < d.P; ++i) s += double{q[i]} * key[i];
      for (int32_t i = 0; i < d.R; ++i) s += double{q[d.P + i]} * double{k_pe[i]};
      p.push_back(s * double{scale});
      max = std::max(max, p.back());
    }
    std::vector<double> o(at(d.V), 0.0);
    for (int32_t k = 0; k < keys; ++k) {
      const double weight = std::exp(p[at(k)] - max);
      const double* value = kv.data() + (int64_t{k} * d.N + h) * (d.P + d.V) + d.P;
      for (int32_t v = 0; v < d.V; ++v) o[at(v)] += p_of(weight) * value[v];
      sum += weight;
    }
    for (const double x : o) out.push_back(x / sum);
  }
}

std::vector<double> reference_prefill(const BackendCase& c, const Dims& d,
                                      const std::vector<Tokens>& tokens,
                                      const std::vector<Prompt>& prompts, float scale) {
  const Floats kv_b = make_kv_b(c, d);
  std::vector<double> out;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::vector<double> kv = reference_kv(c, d, tokens[i], kv_b);
    for (int32_t p = prompts[i].context; p < prompts[i].keys(); ++p)
      reference_row(d, tokens[i], kv, p + 1, scale, out);
  }
  return out;
}

std::vector<Tokens> tokens_of(const BackendCase& c, const Dims& d,
                              const std::vector<Prompt>& prompts) {
  std::vector<Tokens> tokens;
  for (size_t i = 0; i < prompts.size(); ++i)
    tokens.push_back(make_tokens(c, d, prompts[i].keys(), static_cast<uint32_t>(10 + i)));
  return tokens;
}

// Contexts of 0 and of several tiles, at, under and over a page and a tile; chunks of one token.
const std::vector<Prompt> kRagged = {{0, 1},    {0, 65},  {63, 3},   {64, 1},   {65, 17},
                                     {127, 1},  {128, 1}, {129, 63}, {0, 129},  {255, 2},
                                     {256, 64}, {513, 1}, {0, 3},    {383, 127}};

TEST_CASE("Prefill of a ragged batch is attention over the cache in every order of the requests") {
  for (const BackendCase& c : backend_cases())
    for (const Dims& d : {kEven, kOdd}) {
      std::vector<Prompt> prompts = kRagged;
      for (int order = 0; order < 2; ++order) {
        const std::vector<Tokens> tokens = tokens_of(c, d, prompts);
        // With and without m²: the scale is used, and in no place twice.
        const float scale = (order ? 1.0f : 1.59f) / std::sqrt(static_cast<float>(d.D()));
        const std::vector<double> want = reference_prefill(c, d, tokens, prompts, scale);
        for (const int32_t W : {4096, 128, 384}) {
          Device dev(c);
          INFO("order " << order << ", workspace " << W);
          check_near(c, run_prefill(c, dev, d, tokens, prompts, W, scale), want, d.N * d.V, 4e-3);
          CHECK(dev.guards_hold());
        }
        std::reverse(prompts.begin(), prompts.end());
      }
    }
}

TEST_CASE("Prefill bits do not depend on how the passes are cut nor on the threads") {
  for (const BackendCase& c : backend_cases())
    for (const Dims& d : {kEven, kOdd}) {
      const std::vector<Tokens> tokens = tokens_of(c, d, kRagged);
      Device one(c);
      int32_t passes = 0;
      const Floats whole = run_prefill(c, one, d, tokens, kRagged, 8192, 0.3f, &passes);
      CHECK(passes == 1);
      for (const int32_t W : {128, 256, 640, 1024})
        for (const int threads : {1, 2, 3}) {
          Device dev(c, threads);
          INFO(c.name << ", workspace " << W << ", " << threads << " threads");
          CHECK(same_bits(run_prefill(c, dev, d, tokens, kRagged, W, 0.3f, &passes), whole));
          CHECK(passes > 1);
        }
    }
}

TEST_CASE("Prefill bits of a request are those it has alone") {
  for (const BackendCase& c : backend_cases()) {
    const std::vector<Tokens> tokens = tokens_of(c, kOdd, kRagged);
    Device dev(c);
    const Floats together = run_prefill(c, dev, kOdd, tokens, kRagged, 1024, 0.3f);
    Floats alone;
    for (size_t i = 0; i < kRagged.size(); ++i) {
      const Floats part = run_prefill(c, dev, kOdd, {tokens[i]}, {kRagged[i]}, 1024, 0.3f);
      alone.insert(alone.end(), part.begin(), part.end());
    }
    CHECK(same_bits(together, alone));
  }
}

// The cache of a chunk holds nothing but NaN past the chunk's last key; the whole prompt's does
// not.
TEST_CASE("Prefill bits of a prompt are the same whole and in chunks of any size") {
  const int32_t W = 256;
  for (const BackendCase& c : backend_cases())
    for (const int32_t length : {1, 63, 64, 65, 127, 128, 129, W - 1, W, W + 1, 2 * W + 1}) {
      const Dims& d = length == W + 1 ? kOdd : kEven;
      const std::vector<Tokens> tokens = {make_tokens(c, d, length, 77)};
      Device dev(c);
      const Floats whole = run_prefill(c, dev, d, tokens, {{0, length}}, 4096, 0.3f);
      for (const int32_t chunk : {16, 17, 64, 127, 128, 251, length - 1}) {
        if (chunk < 1 || chunk >= length) continue;
        Floats out;
        for (int32_t begin = 0; begin < length; begin += chunk) {
          const Floats part =
              run_prefill(c, dev, d, tokens, {{begin, std::min(chunk, length - begin)}}, W, 0.3f);
          out.insert(out.end(), part.begin(), part.end());
        }
        INFO(c.name << ", " << length << " tokens in chunks of " << chunk);
        CHECK(same_bits(out, whole));
      }
    }
}

// Within one tile every rounding point can be followed: the output is the rounded reference.
TEST_CASE("Prefill multiplies rounded probabilities and divides by the sum of unrounded ones") {
  const BackendCase c = backend_cases()[0];
  for (const Dims& d : {kEven, kOdd}) {
    const std::vector<Tokens> tokens = {make_tokens(c, d, kKeyTile, 31)};
    const std::vector<double> kv = reference_kv(c, d, tokens[0], make_kv_b(c, d));
    std::vector<double> want;
    for (int32_t keys = 1; keys <= kKeyTile; ++keys)
      reference_row(d, tokens[0], kv, keys, 0.3f, want,
                    [](double p) { return double{to_f32(to_bf16(static_cast<float>(p)))}; });
    Device dev(c);
    check_rounded_once(c, run_prefill(c, dev, d, tokens, {{0, kKeyTile}}, kKeyTile, 0.3f), want);
  }
}

// Scores that grow by tiles rescale the running output; those that fall leave it.
TEST_CASE("Prefill carries its running maximum through rising and falling scores") {
  for (const BackendCase& c : backend_cases())
    for (const bool rising : {true, false}) {
      const Dims& d = kEven;
      const std::vector<Prompt> prompts = {{500, 20}};
      std::vector<Tokens> tokens = tokens_of(c, d, prompts);
      for (int32_t k = 0; k < 520; ++k) {
        float* k_pe = tokens[0].cache.data() + int64_t{k} * d.row() + d.L;
        std::fill_n(k_pe, d.R, c.round(static_cast<float>(rising ? k : 519 - k) / 16.0f));
      }
      for (int64_t i = 0; i < 520 * d.N; ++i)
        std::fill_n(tokens[0].q.data() + i * d.D() + d.P, d.R, 1.0f);
      const std::vector<double> want = reference_prefill(c, d, tokens, prompts, 0.5f);
      Device dev(c);
      const Floats one_pass = run_prefill(c, dev, d, tokens, prompts, 1024, 0.5f);
      INFO("rising " << rising);
      check_near(c, one_pass, want, d.N * d.V, 4e-3);
      CHECK(same_bits(run_prefill(c, dev, d, tokens, prompts, 128, 0.5f), one_pass));
    }
}

TEST_CASE("K and V of a pass are the cached latents times kv_b and no other row is written") {
  for (const BackendCase& c : backend_cases())
    for (const Dims& d : {kEven, kOdd, kRelease}) {
      const std::vector<Prompt> prompts = {{130, 70}, {0, 65}};
      const std::vector<Tokens> tokens = tokens_of(c, d, prompts);
      std::vector<Floats> bits;
      for (const int threads : {1, 2, 3}) {
        Device dev(c, threads);
        const Cache cache = make_cache(c, dev, d, tokens, {200, 65});
        const std::vector<PrefillSpan> prefill = {{0, 70, 130, cache.table_begin[0]},
                                                  {70, 65, 0, cache.table_begin[1]}};
        // The second request first, gaps around both.
        const std::vector<KeySpan> spans = {{1, 0, 65, 3}, {0, 128, 200, 70}};
        const Floats kv_b = make_kv_b(c, d);
        void* workspace = dev.poisoned(145 * d.kv());
        dev->kv_up({.cache = cache.rows,
                    .page_table = dev.plain(cache.table),
                    .prefill = dev.plain(prefill),
                    .spans = dev.plain(spans),
                    .num_spans = 2,
                    .kv_b = dev.matrix(MatrixKind::kv_b, 1, d.kv(), d.L, kv_b, d.N, d.P),
                    .workspace = workspace,
                    .L = d.L,
                    .R = d.R});
        const Floats got = dev.read(workspace, 145 * d.kv());
        for (int32_t row = 0; row < 145; ++row)
          if (row < 3 || (row >= 68 && row < 70) || row >= 142) {
            INFO("row " << row);
            CHECK(std::isnan(got[at(int64_t{row} * d.kv())]));
          }
        const auto want = [&](size_t i, int32_t first, int32_t rows) {
          return product(columns(rows_of(tokens[i].cache, d.row(), first, rows), d.row(), 0, d.L),
                         kv_b.data(), d.kv(), d.L);
        };
        check_near(c, rows_of(got, d.kv(), 3, 65), want(1, 0, 65), d.kv(), 3e-3);
        check_near(c, rows_of(got, d.kv(), 70, 72), want(0, 128, 72), d.kv(), 3e-3);
        check_rounded_once(c, rows_of(got, d.kv(), 70, 72), want(0, 128, 72));
        CHECK(dev.guards_hold());
        bits.push_back(got);
      }
      CHECK(same_bits(bits[1], bits[0]));
      CHECK(same_bits(bits[2], bits[0]));
    }
}

// Rows [first, first + rows) of `key_lens`, row d of them in step row 2·d + 1. [rows, N·V]
Floats run_decode(const BackendCase& c, Device& dev, const Dims& d,
                  const std::vector<Tokens>& tokens, const std::vector<int32_t>& key_lens,
                  size_t first, size_t rows, float scale) {
  const std::vector<Tokens> used(tokens.begin() + static_cast<std::ptrdiff_t>(first),
                                 tokens.begin() + static_cast<std::ptrdiff_t>(first + rows));
  const std::vector<int32_t> keys(key_lens.begin() + static_cast<std::ptrdiff_t>(first),
                                  key_lens.begin() + static_cast<std::ptrdiff_t>(first + rows));
  const Cache cache = make_cache(c, dev, d, used, keys);
  const int64_t width = d.N * d.D(), stride = width + 3, T = 2 * static_cast<int64_t>(rows) + 1;
  Floats q(at(T * stride), std::numeric_limits<float>::quiet_NaN());
  std::vector<DecodeRow> decode;
  for (size_t i = 0; i < rows; ++i) {
    const int32_t row = 2 * static_cast<int32_t>(i) + 1;
    decode.push_back({row, keys[i], cache.table_begin[i]});
    if (keys[i])
      std::copy_n(used[i].q.begin() + (keys[i] - 1) * width, width, q.begin() + row * stride);
  }
  const int64_t D = static_cast<int64_t>(rows);
  void* out = dev.poisoned(T * d.N * d.V);
  dev->mla_decode({.q = dev.array(q),
                   .q_stride = stride,
                   .cache = cache.rows,
                   .page_table = dev.plain(cache.table),
                   .rows = dev.plain(decode),
                   .D = static_cast<int32_t>(rows),
                   .kv_b = dev.matrix(MatrixKind::kv_b, 1, d.kv(), d.L, make_kv_b(c, d), d.N, d.P),
                   .q_lat = dev.poisoned(D * d.N * d.L),
                   .o_lat = dev.poisoned(D * d.N * d.L),
                   .out = out,
                   .N = d.N,
                   .P = d.P,
                   .R = d.R,
                   .L = d.L,
                   .V = d.V,
                   .scale = scale});
  const Floats all = dev.read(out, T * d.N * d.V);
  Floats got;
  for (int64_t t = 0; t < T; ++t) {
    const Floats row = rows_of(all, d.N * d.V, t, 1);
    if (t % 2) {
      got.insert(got.end(), row.begin(), row.end());
    } else {
      CHECK(std::all_of(row.begin(), row.end(), [](float x) { return std::isnan(x); }));
    }
  }
  return got;
}

const std::vector<int32_t> kKeyLens = {1, 255, 2, 256, 257, 63, 513, 64, 65, 512, 127, 129, 700};

std::vector<Tokens> decode_tokens(const BackendCase& c, const Dims& d) {
  std::vector<Tokens> tokens;
  for (size_t i = 0; i < kKeyLens.size(); ++i)
    tokens.push_back(make_tokens(c, d, kKeyLens[i], static_cast<uint32_t>(200 + i)));
  return tokens;
}

TEST_CASE("Decode of a ragged batch is attention over the cache around pages and splits") {
  for (const BackendCase& c : backend_cases())
    for (const Dims& d : {kEven, kOdd, Dims{17, 8, 4, 24, 8}}) {
      const std::vector<Tokens> tokens = decode_tokens(c, d);
      const Floats kv_b = make_kv_b(c, d);
      for (const float m2 : {1.0f, 1.59f}) {
        const float scale = m2 / std::sqrt(static_cast<float>(d.D()));
        std::vector<double> want;
        for (size_t i = 0; i < kKeyLens.size(); ++i) {
          // K and V are never rounded on the absorbed path.
          const std::vector<double> kv =
              product(columns(tokens[i].cache, d.row(), 0, d.L), kv_b.data(), d.kv(), d.L);
          reference_row(d, tokens[i], kv, kKeyLens[i], scale, want);
        }
        Device dev(c);
        // q_lat, P, O_lat and O are rounded, and a row has few elements; at the released dimensions
        // it is within 4e-3, below.
        check_near(c, run_decode(c, dev, d, tokens, kKeyLens, 0, kKeyLens.size(), scale), want,
                   d.N * d.V, 9e-3);
        CHECK(dev.guards_hold());
      }
    }
}

// Within one split: q_lat, P, O_lat and O are rounded, the sum of P is not of rounded ones.
TEST_CASE("Decode rounds its four values once each and sums unrounded probabilities") {
  const BackendCase c = backend_cases()[0];
  const Dims& d = kOdd;
  const Floats kv_b = make_kv_b(c, d);
  const auto round = [&](double x) { return double{c.round(static_cast<float>(x))}; };
  std::vector<Tokens> tokens;
  std::vector<int32_t> key_lens;
  std::vector<double> want;
  for (int32_t keys = 1; keys <= 100; ++keys) {
    key_lens.push_back(keys);
    tokens.push_back(make_tokens(c, d, keys, static_cast<uint32_t>(400 + keys)));
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
        const double weight = std::exp((scores[at(k)] - max) * double{0.3f});
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
  check_rounded_once(c, run_decode(c, dev, d, tokens, key_lens, 0, 100, 0.3f), want, 0.02);
}

TEST_CASE("Decode bits of a row depend neither on the batch nor on the threads") {
  for (const BackendCase& c : backend_cases()) {
    const std::vector<Tokens> tokens = decode_tokens(c, kOdd);
    check_row_bits(c, static_cast<int64_t>(kKeyLens.size()),
                   [&](Device& dev, int64_t first, int64_t rows) {
                     return run_decode(c, dev, kOdd, tokens, kKeyLens, at(first), at(rows), 0.3f);
                   });
  }
}

TEST_CASE("Decode bits hold for more rows than a unit of work takes") {
  for (const BackendCase& c : backend_cases()) {
    const std::vector<int32_t> key_lens(129, 3);
    std::vector<Tokens> tokens;
    for (uint32_t i = 0; i < 129; ++i) tokens.push_back(make_tokens(c, kOdd, 3, i));
    check_row_bits(c, 129, [&](Device& dev, int64_t first, int64_t rows) {
      return run_decode(c, dev, kOdd, tokens, key_lens, at(first), at(rows), 0.3f);
    });
  }
}

TEST_CASE("A decode row without keys has an output of zero and its neighbours keep their bits") {
  for (const BackendCase& c : backend_cases()) {
    const Dims& d = kOdd;
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
  const Dims d{1, 16, 64, 512, 16};
  const int64_t low = 1, high = 58400, keys = 65;
  for (const BackendCase& c : backend_cases()) {
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
      void* workspace = dev.poisoned(keys * d.kv());
      void* out = dev.poisoned(keys * d.N * d.V);
      dev->kv_up({.cache = cache,
                  .page_table = table,
                  .prefill = prefill,
                  .spans = spans,
                  .num_spans = 1,
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
                        .state_max = nullptr,
                        .state_sum = nullptr,
                        .state_out = nullptr,
                        .out = out,
                        .N = d.N,
                        .P = d.P,
                        .R = d.R,
                        .L = d.L,
                        .V = d.V,
                        .scale = 0.2f});
      Floats result = dev.read(out, keys * d.N * d.V);
      void* decoded = dev.poisoned(keys * d.N * d.V);
      dev->mla_decode({.q = q,
                       .q_stride = d.D(),
                       .cache = cache,
                       .page_table = table,
                       .rows = dev.plain(std::vector<DecodeRow>{{64, 65, 0}}),
                       .D = 1,
                       .kv_b = kv_b,
                       .q_lat = dev.poisoned(d.L),
                       .o_lat = dev.poisoned(d.L),
                       .out = decoded,
                       .N = d.N,
                       .P = d.P,
                       .R = d.R,
                       .L = d.L,
                       .V = d.V,
                       .scale = 0.2f});
      const Floats last = rows_of(dev.read(decoded, keys * d.N * d.V), d.N * d.V, keys - 1, 1);
      CHECK(compare_rows(last, rows_of(result, d.N * d.V, keys - 1, 1), d.N * d.V).within(1e-2));
      result.insert(result.end(), last.begin(), last.end());
      results.push_back(result);
    }
    INFO(c.name);
    CHECK(same_bits(results[1], results[0]));
  }
}

}  // namespace
}  // namespace mla::test
