// Bits of the CUDA backend where its kernels change, and of one op called several times.
#ifdef MLA_WITH_CUDA
#include "tests/ops/attention_fixture.h"

namespace mla::test::cuda_bits_test {
namespace {

BackendCase cuda_case() { return backend_cases().back(); }

bool no_nan(const Floats& x) {
  return std::none_of(x.begin(), x.end(), [](float v) { return std::isnan(v); });
}

struct Moe {
  int64_t H, I;
  int32_t E, K, S;
  Matrix gate_up, down;
};

Moe make_moe(const BackendCase& c, Device& dev) {
  Moe m{256, 96, 64, 6, 2, {}, {}};
  const int64_t experts = m.E + m.S;
  m.gate_up = dev.matrix(MatrixKind::gate_up, experts, 2 * m.I, m.H,
                         weights(c, experts * 2 * m.I * m.H, m.H, 1));
  m.down =
      dev.matrix(MatrixKind::linear, experts, m.H, m.I, weights(c, experts * m.H * m.I, m.I, 2));
  return m;
}

Floats run_experts(Device& dev, const Moe& m, const Floats& x, const std::vector<int32_t>& ids) {
  const int64_t T = static_cast<int64_t>(x.size()) / m.H, width = m.K + m.S;
  void* out = dev.poisoned(T * width * m.H);
  dev->experts({.x = dev.array(x),
                .ids = dev.plain(ids),
                .gate_up = m.gate_up,
                .down = m.down,
                .inner = dev.poisoned(T * width * m.I),
                .out = out,
                .T = T,
                .E = m.E,
                .K = m.K,
                .S = m.S});
  return dev.read(out, T * width * m.H);
}

// K distinct experts a token: at random, or the first K for every second token.
std::vector<int32_t> routing(const Moe& m, int64_t T, bool skewed) {
  std::vector<int32_t> ids, experts(at(m.E));
  for (int32_t e = 0; e < m.E; ++e) experts[at(e)] = e;
  std::mt19937 random(3);
  for (int64_t t = 0; t < T; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (int32_t k = 0; k < m.K; ++k) ids.push_back(skewed && t % 2 ? k : experts[at(k)]);
  }
  return ids;
}

TEST_CASE("Bits of experts do not depend on the number of rows where the kernels change") {
  MLA_NEED_CUDA();
  const BackendCase c = cuda_case();
  constexpr int64_t kMost = 1024;
  for (const bool skewed : {false, true}) {
    Device dev(c);
    const Moe m = make_moe(c, dev);
    const int64_t width = (m.K + m.S) * m.H;
    const Floats x = random_values(c, kMost * m.H, 4);
    const std::vector<int32_t> ids = routing(m, kMost, skewed);
    const Floats whole = run_experts(dev, m, x, ids);
    CHECK(no_nan(whole));
    for (const int64_t T : {1, 7, 64, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1024})
      for (const int64_t first : {int64_t{0}, kMost - T}) {
        const std::vector<int32_t> part(ids.begin() + first * m.K, ids.begin() + (first + T) * m.K);
        INFO(T << " rows from " << first << ", skewed " << skewed);
        CHECK(same_bits(run_experts(dev, m, rows_of(x, m.H, first, T), part),
                        rows_of(whole, width, first, T)));
      }
    CHECK(dev.guards_hold());
  }
}

// The op on fresh arrays, poisoned outputs: all of it is written, with the same bits each time.
void check_repeats(Device& dev, const std::string& name, const std::function<Floats()>& op) {
  const Floats first = op();
  INFO(name);
  CHECK(no_nan(first));
  for (int i = 0; i < 3; ++i) CHECK(same_bits(op(), first));
  CHECK(dev.guards_hold());
}

TEST_CASE("Every op gives the same bits each time and writes all of its output") {
  MLA_NEED_CUDA();
  const BackendCase c = cuda_case();
  const BackendCase f32{c.name, c.make, DType::f32};
  const int64_t T = 300, H = 2048;
  Device dev(c);
  const Floats x = random_values(c, T * H, 1);
  const Floats weight = random_values(f32, H, 2), delta = random_values(f32, T * H, 3);

  const Matrix table = dev.matrix(MatrixKind::embedding, 1, 64, H, random_values(c, 64 * H, 4));
  check_repeats(dev, "embed", [&] {
    std::vector<int32_t> ids;
    for (int32_t t = 0; t < T; ++t) ids.push_back(t * 7 % 64);
    void* out = dev.poisoned(T * H);
    dev->embed({.ids = dev.plain(ids), .sampled = nullptr, .table = table, .out = out, .T = T});
    return dev.read(out, T * H);
  });
  check_repeats(dev, "norm", [&] {
    void* out = dev.poisoned(T * H);
    dev->norm({.x = dev.array(x),
               .x_stride = H,
               .weight = dev.plain(weight),
               .out = out,
               .T = T,
               .dim = H,
               .eps = 1e-6f});
    return dev.read(out, T * H);
  });
  check_repeats(dev, "add_norm", [&] {
    void* residual = dev.array(x);
    void* out = dev.poisoned(T * H);
    dev->add_norm({.residual = residual,
                   .delta = dev.plain(delta),
                   .weight = dev.plain(weight),
                   .rows = nullptr,
                   .out = out,
                   .T = T,
                   .H = H,
                   .eps = 1e-6f});
    Floats result = dev.read(out, T * H);
    const Floats kept = dev.read(residual, T * H);
    result.insert(result.end(), kept.begin(), kept.end());
    return result;
  });

  const int64_t n = 528;
  const Floats w = weights(c, n * H, H, 5);
  const Matrix linear = dev.matrix(MatrixKind::linear, 1, n, H, w);
  const Matrix gate_up = dev.matrix(MatrixKind::gate_up, 1, n, H, w);
  for (const int64_t rows : {int64_t{5}, T}) {
    check_repeats(dev, "linear", [&] {
      float* out = dev.poisoned_plain<float>(rows * n);
      dev->linear({.x = dev.array(rows_of(x, H, 0, rows)),
                   .w = linear,
                   .out = out,
                   .out_f32 = true,
                   .T = rows});
      return dev.read_plain<float>(out, rows * n);
    });
    check_repeats(dev, "gated_linear", [&] {
      void* out = dev.poisoned(rows * n / 2);
      dev->gated_linear(
          {.x = dev.array(rows_of(x, H, 0, rows)), .w = gate_up, .out = out, .T = rows});
      return dev.read(out, rows * n / 2);
    });
  }

  const Dims d{16, kRelease.P, kRelease.R, kRelease.L, kRelease.V};
  check_repeats(dev, "rope_cache", [&] {
    const int64_t rows = 65;
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    for (int32_t t = 0; t < rows; ++t) {
      positions.push_back(t);
      slots.push_back(rows - 1 - t);
    }
    void* q = dev.array(random_values(c, rows * d.N * d.D(), 6));
    void* cache = dev.poisoned(rows * d.row());
    dev->rope_cache({.q = q,
                     .q_stride = d.N * d.D(),
                     .kv_a = dev.array(random_values(c, rows * d.row(), 7)),
                     .kv_stride = d.row(),
                     .norm_weight = dev.plain(Floats(at(d.L), 1.0f)),
                     .rope_table = dev.plain(random_values(f32, rows * d.R, 8)),
                     .positions = dev.plain(positions),
                     .slots = dev.plain(slots),
                     .cache = cache,
                     .T = rows,
                     .N = d.N,
                     .P = d.P,
                     .R = d.R,
                     .L = d.L,
                     .eps = 1e-6f});
    Floats result = dev.read(q, rows * d.N * d.D());
    const Floats cached = dev.read(cache, rows * d.row());
    result.insert(result.end(), cached.begin(), cached.end());
    return result;
  });
  const std::vector<Prompt> prompts = {{0, 300}, {130, 70}, {513, 1}};
  const std::vector<Tokens> prompt_tokens = tokens_of(c, d, prompts);
  for (const int32_t W : {128, 1024})
    check_repeats(dev, "prefill",
                  [&] { return run_prefill(c, dev, d, prompt_tokens, prompts, W, 0.1f); });
  const std::vector<int32_t> key_lens = {1, 2049, 64, 700, 257, 256};
  std::vector<Tokens> tokens;
  for (const int32_t keys : key_lens)
    tokens.push_back(make_tokens(c, d, keys, static_cast<uint32_t>(keys)));
  check_repeats(dev, "decode",
                [&] { return run_decode(c, dev, d, tokens, key_lens, 0, key_lens.size(), 0.1f); });

  const int32_t E = 64, K = 6, S = 2;
  const Matrix gate = dev.matrix(MatrixKind::linear, 1, E, H, weights(c, E * H, H, 9));
  check_repeats(dev, "router", [&] {
    auto* ids = dev.poisoned_plain<int32_t>(T * K);
    auto* scores = dev.poisoned_plain<float>(T * K);
    dev->router({.x = dev.array(x),
                 .gate = gate,
                 .positions = nullptr,
                 .logits = dev.poisoned_plain<float>(T * E),
                 .ids = ids,
                 .weights = scores,
                 .T = T,
                 .E = E,
                 .K = K,
                 .groups = 1,
                 .kept_groups = 1,
                 .scaling_factor = 1.0f});
    Floats result = dev.read_plain<float>(scores, T * K);
    for (const int32_t id : dev.read_plain<int32_t>(ids, T * K)) {
      CHECK((id >= 0 && id < E));
      result.push_back(static_cast<float>(id));
    }
    return result;
  });
  const Moe m = make_moe(c, dev);
  for (const int64_t rows : {int64_t{5}, T, int64_t{600}})
    check_repeats(dev, "experts", [&] {
      return run_experts(dev, m, random_values(c, rows * m.H, 10), routing(m, rows, false));
    });
  const Floats expert_out = random_values(c, T * (K + S) * H, 11);
  check_repeats(dev, "combine", [&] {
    void* residual = dev.array(x);
    dev->combine({.expert_out = dev.array(expert_out),
                  .weights = dev.plain(random_values(f32, T * K, 12)),
                  .residual = residual,
                  .T = T,
                  .H = H,
                  .K = K,
                  .S = S});
    return dev.read(residual, T * H);
  });

  const int32_t rows = 8, vocab = 102400;
  const Floats logits = random_values(f32, int64_t{rows} * vocab, 13, 3.0f);
  std::vector<SampleSpec> specs;
  for (uint32_t i = 0; i < rows; ++i)
    specs.push_back({.temperature = i % 2 ? 0.8f : 0.0f,
                     .top_p = i % 3 ? 1.0f : 0.9f,
                     .top_k = i % 4 == 3 ? 50 : 0,
                     .position = i,
                     .seed = 14,
                     .num_top = 5});
  check_repeats(dev, "sample", [&] {
    auto* sampled = dev.poisoned_plain<int32_t>(rows);
    auto* logprobs = dev.poisoned_plain<float>(rows);
    auto* top_ids = dev.poisoned_plain<int32_t>(rows * 5);
    auto* top_logprobs = dev.poisoned_plain<float>(rows * 5);
    dev->sample({.logits = dev.plain(logits),
                 .specs = dev.plain(specs),
                 .edits = nullptr,
                 .tokens = sampled,
                 .logprobs = logprobs,
                 .top_ids = top_ids,
                 .top_logprobs = top_logprobs,
                 .S = rows,
                 .vocab = vocab,
                 .max_top = 5});
    Floats result = dev.read_plain<float>(logprobs, rows);
    const Floats top = dev.read_plain<float>(top_logprobs, rows * 5);
    result.insert(result.end(), top.begin(), top.end());
    for (const int32_t id : dev.read_plain<int32_t>(sampled, rows)) {
      CHECK((id >= 0 && id < vocab));
      result.push_back(static_cast<float>(id));
    }
    for (const int32_t id : dev.read_plain<int32_t>(top_ids, rows * 5)) {
      CHECK((id >= 0 && id < vocab));
      result.push_back(static_cast<float>(id));
    }
    return result;
  });
}

}  // namespace
}  // namespace mla::test::cuda_bits_test
#endif  // MLA_WITH_CUDA
