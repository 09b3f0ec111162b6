// kv_up and mla_prefill against plain loops in double, and their bits against themselves.
#include "tests/ops/attention_fixture.h"

namespace mla::test::attention_test {
namespace {

// Contexts of 0 and of several tiles, at, under and over a page and a tile; chunks of one token.
const std::vector<Prompt> kRagged = {{0, 1},    {0, 65},  {63, 3},   {64, 1},   {65, 17},
                                     {127, 1},  {128, 1}, {129, 63}, {0, 129},  {255, 2},
                                     {256, 64}, {513, 1}, {0, 3},    {383, 127}};

TEST_CASE("Prefill of a ragged batch is attention over the cache in every order of the requests") {
  for (const BackendCase& c : backend_cases())
    for (const Dims& d : {fit(c, kEven), fit(c, kOdd)}) {
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
    for (const Dims& d : {fit(c, kEven), fit(c, kOdd)}) {
      const std::vector<Tokens> tokens = tokens_of(c, d, kRagged);
      Device one(c);
      int32_t passes = 0;
      const Floats whole = run_prefill(c, one, d, tokens, kRagged, 8192, 0.3f, &passes);
      CHECK(passes == 1);
      for (const int32_t W : {128, 256, 640, 1024})
        for (const int threads : c.cuda ? std::vector<int>{1} : std::vector<int>{1, 2, 3}) {
          Device dev(c, threads);
          INFO(c.name << ", workspace " << W << ", " << threads << " threads");
          CHECK(same_bits(run_prefill(c, dev, d, tokens, kRagged, W, 0.3f, &passes), whole));
          CHECK(passes > 1);
        }
    }
}

TEST_CASE("Prefill bits of a request are those it has alone") {
  for (const BackendCase& c : backend_cases()) {
    const Dims d = fit(c, kOdd);
    const std::vector<Tokens> tokens = tokens_of(c, d, kRagged);
    Device dev(c);
    const Floats together = run_prefill(c, dev, d, tokens, kRagged, 1024, 0.3f);
    Floats alone;
    for (size_t i = 0; i < kRagged.size(); ++i) {
      const Floats part = run_prefill(c, dev, d, {tokens[i]}, {kRagged[i]}, 1024, 0.3f);
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
      const Dims d = fit(c, length == W + 1 ? kOdd : kEven);
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
  for (const BackendCase& c : bf16_cases())
    for (const Dims& d : {fit(c, kEven), fit(c, kOdd)}) {
      const float scale = c.cuda ? 0.08f : 0.3f;
      const std::vector<Tokens> tokens = {make_exact_tokens(c, d, kKeyTile, 31)};
      const Floats kv_b = make_exact_kv_b(c, d);
      const std::vector<double> kv = reference_kv(c, d, tokens[0], kv_b);
      std::vector<double> want;
      for (int32_t keys = 1; keys <= kKeyTile; ++keys)
        reference_row(d, tokens[0], kv, keys, scale, want,
                      [](double p) { return double{to_f32(to_bf16(static_cast<float>(p)))}; });
      Device dev(c);
      check_rounded_once(
          c, run_prefill(c, dev, d, tokens, {{0, kKeyTile}}, kKeyTile, scale, nullptr, &kv_b),
          want);
    }
}

// Scores that grow by tiles rescale the running output; those that fall leave it.
TEST_CASE("Prefill carries its running maximum through rising and falling scores") {
  for (const BackendCase& c : backend_cases())
    for (const bool rising : {true, false}) {
      const Dims d = fit(c, kEven);
      // Neighbouring keys are 1/4 apart in the exponent.
      const float scale = 0.5f * static_cast<float>(kEven.R) / static_cast<float>(d.R);
      const std::vector<Prompt> prompts = {{500, 20}};
      std::vector<Tokens> tokens = tokens_of(c, d, prompts);
      for (int32_t k = 0; k < 520; ++k) {
        float* k_pe = tokens[0].cache.data() + int64_t{k} * d.row() + d.L;
        std::fill_n(k_pe, d.R, c.round(static_cast<float>(rising ? k : 519 - k) / 16.0f));
      }
      for (int64_t i = 0; i < 520 * d.N; ++i)
        std::fill_n(tokens[0].q.data() + i * d.D() + d.P, d.R, 1.0f);
      const std::vector<double> want = reference_prefill(c, d, tokens, prompts, scale);
      Device dev(c);
      const Floats one_pass = run_prefill(c, dev, d, tokens, prompts, 1024, scale);
      INFO("rising " << rising);
      check_near(c, one_pass, want, d.N * d.V, 4e-3);
      CHECK(same_bits(run_prefill(c, dev, d, tokens, prompts, 128, scale), one_pass));
    }
}

TEST_CASE("K and V of a pass are the cached latents times kv_b and no other row is written") {
  for (const BackendCase& c : backend_cases())
    for (const Dims& d : c.cuda ? std::vector<Dims>{fit(c, kEven), fit(c, kOdd)}
                                : std::vector<Dims>{kEven, kOdd, kRelease}) {
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
        const int32_t W = 145, allocated = W + kKeyTile;
        void* workspace = dev.poisoned(int64_t{allocated} * d.kv());
        dev->kv_up({.cache = cache.rows,
                    .page_table = dev.plain(cache.table),
                    .prefill = dev.plain(prefill),
                    .spans = dev.plain(spans),
                    .num_spans = 2,
                    .tiles = dev.plain(std::vector<WorkTile>{{0, 0}, {1, 128}}),
                    .num_tiles = 2,
                    .kv_b = dev.matrix(MatrixKind::kv_b, 1, d.kv(), d.L, kv_b, d.N, d.P),
                    .workspace = workspace,
                    .L = d.L,
                    .R = d.R});
        const Floats got = dev.read(workspace, int64_t{allocated} * d.kv());
        for (int32_t row = 0; row < allocated; ++row)
          if (row < 3 || (row >= 68 && row < 70) || row >= 142) {
            INFO("row " << row);
            const Floats other = rows_of(got, d.kv(), row, 1);
            CHECK(std::all_of(other.begin(), other.end(), [](float x) { return std::isnan(x); }));
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

}  // namespace
}  // namespace mla::test::attention_test
