// Requests in a scattered cache, one step of prompts or of generated tokens through the attention
// ops, and attention in double to compare with.
#pragma once

#include <map>
#include <tuple>

#include "lib/schedule/step_plan.h"
#include "tests/ops/backends.h"

namespace mla::test {

struct Dims {
  int32_t N, P, R, L, V;
  int32_t D() const { return P + R; }
  int32_t row() const { return L + R; }
  int32_t kv() const { return N * (P + V); }
};

inline constexpr Dims kEven{2, 16, 8, 32, 16};
inline constexpr Dims kOdd{3, 13, 6, 37, 19};          // no multiple of 16
inline constexpr Dims kRelease{2, 128, 64, 512, 128};  // V2-Lite's, fewer heads
inline constexpr int32_t kUnusedPage = 0x7fffff00;     // a read of it is far out of bounds

// On the GPU, which has the released widths alone: as many heads of those.
inline Dims fit(const BackendCase& c, const Dims& d) {
  return c.cuda ? Dims{d.N, kRelease.P, kRelease.R, kRelease.L, kRelease.V} : d;
}

inline size_t at(int64_t i) { return static_cast<size_t>(i); }

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

inline Tokens make_tokens(const BackendCase& c, const Dims& d, int32_t keys, uint32_t seed) {
  return {random_values(c, int64_t{keys} * d.N * d.D(), 2 * seed, 1.5f),
          random_values(c, int64_t{keys} * d.row(), 2 * seed + 1)};
}

inline const Floats& make_kv_b(const BackendCase& c, const Dims& d) {
  static std::map<std::tuple<DType, int32_t, int32_t, int32_t, int32_t>, Floats> made;
  Floats& kv_b = made[{c.dtype, d.N, d.P, d.V, d.L}];
  if (kv_b.empty())
    kv_b = random_values(c, int64_t{d.kv()} * d.L, 99, 1.0f / std::sqrt(static_cast<float>(d.L)));
  return kv_b;
}

// Multiples of `step`: with them sums of products are exact in fp32, so that what is rounded to
// bfloat16 is the same number in every order of adding.
inline Floats on_grid(Floats values, float step) {
  for (float& x : values) x = std::nearbyint(x / step) * step;
  return values;
}

// Tokens and kv_b of the tests that follow every rounding. On the GPU, where the sums are long,
// K, V, q_lat and scores are exact; else the few of them that fp32 rounds to the other side would
// move many outputs.
inline Tokens make_exact_tokens(const BackendCase& c, const Dims& d, int32_t keys, uint32_t seed) {
  Tokens tokens = make_tokens(c, d, keys, seed);
  if (c.cuda)
    tokens = {on_grid(std::move(tokens.q), 0.5f), on_grid(std::move(tokens.cache), 0.25f)};
  return tokens;
}

inline Floats make_exact_kv_b(const BackendCase& c, const Dims& d) {
  const Floats& kv_b = make_kv_b(c, d);
  return c.cuda ? on_grid(kv_b, 0x1p-6f) : kv_b;
}

// A cache in which the requests' pages lie scattered. All rows but their first keys[i] are NaN.
struct Cache {
  std::vector<int32_t> table;        // with unused entries behind each request's
  std::vector<int32_t> table_begin;  // by request
  void* rows = nullptr;
};

inline Cache make_cache(const BackendCase& c, Device& dev, const Dims& d,
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
inline Floats run_prefill(const BackendCase& c, Device& dev, const Dims& d,
                          const std::vector<Tokens>& tokens, const std::vector<Prompt>& prompts,
                          int32_t W, float scale, int32_t* passes = nullptr,
                          const Floats* kv_b_values = nullptr) {
  StepPlan plan;
  std::vector<int32_t> keys;
  Floats q;
  const int64_t width = d.N * d.D(), stride = c.stride(width + 5);
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
  const Matrix kv_b = dev.matrix(MatrixKind::kv_b, 1, d.kv(), d.L,
                                 kv_b_values ? *kv_b_values : make_kv_b(c, d), d.N, d.P);
  const void* dev_q = dev.array(padded(q, width, stride));
  const int32_t* table = dev.plain(cache.table);
  const PrefillSpan* prefill = dev.plain(plan.prefill);
  const KeySpan* all_spans = dev.plain(plan.key_spans);
  const WorkTile* tiles = dev.plain(plan.tiles);
  // Rows past the W of the pass may be read and are never written.
  const int64_t workspace_size = (int64_t{W} + kKeyTile) * d.kv();
  void* workspace = dev.poisoned(workspace_size);
  float* state_max = dev.poisoned_plain<float>(T * d.N);
  float* state_sum = dev.poisoned_plain<float>(T * d.N);
  float* state_out = dev.poisoned_plain<float>(T * d.N * d.V);
  void* out = dev.poisoned(T * d.N * d.V);
  for (const Pass& pass : plan.passes) {
    dev.poison(workspace, workspace_size);
    const KeySpan* spans = all_spans + pass.span_begin;
    const int32_t num_spans = pass.span_end - pass.span_begin;
    dev->kv_up({.cache = cache.rows,
                .page_table = table,
                .prefill = prefill,
                .spans = spans,
                .num_spans = num_spans,
                .tiles = tiles + pass.key_tile_begin,
                .num_tiles = pass.key_tile_end - pass.key_tile_begin,
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
                      .tiles = tiles + pass.query_tile_begin,
                      .num_tiles = pass.query_tile_end - pass.query_tile_begin,
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
  const Floats behind = dev.read(static_cast<std::byte*>(workspace) +
                                     int64_t{W} * d.kv() * static_cast<int64_t>(size_of(c.dtype)),
                                 int64_t{kKeyTile} * d.kv());
  CHECK(std::all_of(behind.begin(), behind.end(), [](float x) { return std::isnan(x); }));
  return dev.read(out, T * d.N * d.V);
}

// Attention of the query at position keys - 1 of a request, [N·V] in double; K_nope|V are rounded
// as they are in the workspace.
inline std::vector<double> reference_kv(const BackendCase& c, const Dims& d, const Tokens& tokens,
                                        const Floats& kv_b) {
  std::vector<double> kv =
      product(columns(tokens.cache, d.row(), 0, d.L), kv_b.data(), d.kv(), d.L);
  for (double& x : kv) x = c.round(static_cast<float>(x));
  return kv;
}

// `p_of` is what a probability is multiplied with V as; the row sum is of those that are not
// rounded.
inline void reference_row(
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

// The same row by the absorbed path, all in double: of K and V that are not rounded, without making
// them.
inline void reference_absorbed(const Dims& d, const Tokens& tokens, const Floats& kv_b,
                               int32_t keys, float scale, std::vector<double>& out) {
  for (int32_t h = 0; h < d.N; ++h) {
    const float* q = tokens.q.data() + (int64_t{keys - 1} * d.N + h) * d.D();
    const float* w = kv_b.data() + int64_t{h} * (d.P + d.V) * d.L;
    std::vector<double> q_lat(at(d.L), 0.0), o_lat(at(d.L), 0.0), p;
    for (int32_t i = 0; i < d.P; ++i)
      for (int32_t l = 0; l < d.L; ++l) q_lat[at(l)] += double{q[i]} * double{w[i * d.L + l]};
    for (int32_t k = 0; k < keys; ++k) {
      const float* row = tokens.cache.data() + int64_t{k} * d.row();
      double s = 0.0;
      for (int32_t l = 0; l < d.L; ++l) s += q_lat[at(l)] * double{row[l]};
      for (int32_t i = 0; i < d.R; ++i) s += double{q[d.P + i]} * double{row[d.L + i]};
      p.push_back(s * double{scale});
    }
    const double max = *std::max_element(p.begin(), p.end());
    double sum = 0.0;
    for (int32_t k = 0; k < keys; ++k) {
      const float* row = tokens.cache.data() + int64_t{k} * d.row();
      const double weight = std::exp(p[at(k)] - max);
      sum += weight;
      for (int32_t l = 0; l < d.L; ++l) o_lat[at(l)] += weight * double{row[l]};
    }
    for (int32_t v = 0; v < d.V; ++v) {
      double o = 0.0;
      for (int32_t l = 0; l < d.L; ++l) o += o_lat[at(l)] * double{w[int64_t{d.P + v} * d.L + l]};
      out.push_back(o / sum);
    }
  }
}

inline std::vector<double> reference_prefill(const BackendCase& c, const Dims& d,
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

inline std::vector<Tokens> tokens_of(const BackendCase& c, const Dims& d,
                                     const std::vector<Prompt>& prompts) {
  std::vector<Tokens> tokens;
  for (size_t i = 0; i < prompts.size(); ++i)
    tokens.push_back(make_tokens(c, d, prompts[i].keys(), static_cast<uint32_t>(10 + i)));
  return tokens;
}

// Decode rows of `key_lens` as a step has them, with their splits.
struct DecodeWork {
  std::vector<DecodeRow> rows;
  std::vector<DecodeSplit> splits, groups;

  void add(int32_t key_len, int32_t table_begin) {
    const auto d = static_cast<int32_t>(rows.size());
    rows.push_back({key_len, table_begin, static_cast<int32_t>(splits.size())});
    for (int32_t i = 0; i < decode_splits(key_len); ++i) {
      splits.push_back({d, i});
      if (i % kDecodeGroup == 0) groups.push_back({d, i});
    }
  }
};

// Decode rows `q` [rows, N·(P+R)] over a cache, as rows of a step behind one of a prompt; row i has
// key_lens[i] keys, whose pages the table has from table_begin[i] on. [rows, N·V]
inline Floats run_decode_rows(const BackendCase& c, Device& dev, const Dims& d, const Cache& cache,
                              const std::vector<int32_t>& table_begin,
                              const std::vector<int32_t>& key_lens, const Floats& q, float scale,
                              const Floats* kv_b_values = nullptr) {
  // Distances of 16 bytes, as the model's are.
  const int64_t width = d.N * d.D(), stride = (width + 15) / 8 * 8;
  const int64_t D = static_cast<int64_t>(key_lens.size());
  Floats all_q(at((D + 1) * stride), std::numeric_limits<float>::quiet_NaN());
  DecodeWork work;
  for (int64_t i = 0; i < D; ++i) {
    work.add(key_lens[at(i)], table_begin[at(i)]);
    std::copy_n(q.begin() + i * width, width, all_q.begin() + (i + 1) * stride);
  }
  const std::vector<int32_t> num_splits = {static_cast<int32_t>(work.splits.size()),
                                           static_cast<int32_t>(work.groups.size())};
  const auto behind_prompt = [&](void* base, int64_t elements) {
    return static_cast<std::byte*>(base) + elements * static_cast<int64_t>(size_of(c.dtype));
  };
  void* out = dev.poisoned((D + 1) * d.N * d.V);
  dev->mla_decode({.q = behind_prompt(dev.array(all_q), stride),
                   .q_stride = stride,
                   .cache = cache.rows,
                   .page_table = dev.plain(cache.table),
                   .rows = dev.plain(work.rows),
                   .D = static_cast<int32_t>(D),
                   .splits = dev.plain(work.splits),
                   .groups = dev.plain(work.groups),
                   .num_splits = dev.plain(num_splits),
                   .kv_b = dev.matrix(MatrixKind::kv_b, 1, d.kv(), d.L,
                                      kv_b_values ? *kv_b_values : make_kv_b(c, d), d.N, d.P),
                   .q_lat = dev.poisoned(D * d.N * d.L),
                   .o_lat = dev.poisoned(D * d.N * d.L),
                   .out = behind_prompt(out, d.N * d.V),
                   .N = d.N,
                   .P = d.P,
                   .R = d.R,
                   .L = d.L,
                   .V = d.V,
                   .scale = scale});
  const Floats all = dev.read(out, (D + 1) * d.N * d.V);
  const Floats before = rows_of(all, d.N * d.V, 0, 1);
  CHECK(std::all_of(before.begin(), before.end(), [](float x) { return std::isnan(x); }));
  return rows_of(all, d.N * d.V, 1, D);
}

// Rows [first, first + rows) of `key_lens`, each with a cache of its own. [rows, N·V]
inline Floats run_decode(const BackendCase& c, Device& dev, const Dims& d,
                         const std::vector<Tokens>& tokens, const std::vector<int32_t>& key_lens,
                         size_t first, size_t rows, float scale,
                         const Floats* kv_b_values = nullptr) {
  const std::vector<Tokens> used(tokens.begin() + static_cast<std::ptrdiff_t>(first),
                                 tokens.begin() + static_cast<std::ptrdiff_t>(first + rows));
  const std::vector<int32_t> keys(key_lens.begin() + static_cast<std::ptrdiff_t>(first),
                                  key_lens.begin() + static_cast<std::ptrdiff_t>(first + rows));
  const Cache cache = make_cache(c, dev, d, used, keys);
  const int64_t width = d.N * d.D();
  Floats q(at(static_cast<int64_t>(rows) * width), std::numeric_limits<float>::quiet_NaN());
  for (size_t i = 0; i < rows; ++i)
    if (keys[i])
      std::copy_n(used[i].q.begin() + (keys[i] - 1) * width, width,
                  q.begin() + static_cast<int64_t>(i) * width);
  return run_decode_rows(c, dev, d, cache, cache.table_begin, keys, q, scale, kv_b_values);
}

}  // namespace mla::test
