#include "tests/support/naive_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "lib/base/error.h"

namespace mla::test {
namespace {

constexpr double kPi = 3.14159265358979323846;

// yarn_get_mscale of DeepSeek's modelling code.
double get_mscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double dot(const float* a, const float* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

void add_to(std::vector<float>& x, const std::vector<float>& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// The k best of `scores`, best first, ties to the lower index; `gap` becomes the lesser of itself
// and the distance to the next one.
std::vector<int64_t> top_k(const std::vector<float>& scores, int64_t k, float& gap) {
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  const size_t kept = static_cast<size_t>(k);
  if (kept < order.size()) {
    const float last = scores[static_cast<size_t>(order[kept - 1])];
    gap = std::min(gap, last - scores[static_cast<size_t>(order[kept])]);
  }
  order.resize(kept);
  return order;
}

}  // namespace

NaiveRope naive_rope(const ModelConfig& c) {
  NaiveRope rope;
  const int64_t dim = c.qk_rope_head_dim;
  const YarnConfig& y = c.yarn_config;
  rope.softmax_scale = 1.0 / std::sqrt(static_cast<double>(c.qk_nope_head_dim + dim));
  double low = 0.0, high = 0.0;
  if (c.yarn) {
    if (y.mscale_all_dim != 0.0) {
      const double m = get_mscale(y.factor, y.mscale_all_dim);
      rope.softmax_scale *= m * m;
    }
    rope.multiplier = y.mscale != 0.0 && y.mscale_all_dim != 0.0
                          ? get_mscale(y.factor, y.mscale) / get_mscale(y.factor, y.mscale_all_dim)
                          : get_mscale(y.factor, 1.0);
    // The dimension that turns `rotations` times within the original context.
    const auto correction_dim = [&](double rotations) {
      const double length = static_cast<double>(y.original_max_position_embeddings);
      return static_cast<double>(dim) * std::log(length / (rotations * 2.0 * kPi)) /
             (2.0 * std::log(c.rope_theta));
    };
    low = std::max(std::floor(correction_dim(y.beta_fast)), 0.0);
    high = std::min(std::ceil(correction_dim(y.beta_slow)), static_cast<double>(dim - 1));
    if (low == high) high += 0.001;
  }
  for (int64_t i = 0; i < dim / 2; ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(dim);
    double freq = 1.0 / std::pow(c.rope_theta, exponent);
    if (c.yarn) {
      const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
      freq = freq / y.factor * ramp + freq * (1.0 - ramp);
    }
    rope.inv_freq.push_back(static_cast<float>(freq));
  }
  return rope;
}

NaiveModel::NaiveModel(const Checkpoint& checkpoint, const ModelConfig& config) : config_(config) {
  const auto load = [&](const std::string& name, int64_t rows, int64_t cols) {
    const TensorView view = checkpoint.tensor(name);
    if (view.elements() != rows * cols) {
      fail("{}: expected {} x {} elements, found {}", name, rows, cols, view.elements());
    }
    Matrix m{rows, cols, std::vector<float>(static_cast<size_t>(rows * cols))};
    view.read_f32(0, rows * cols, m.data.data());
    weights_[name] = std::move(m);
  };
  const ModelConfig& c = config_;
  const int64_t h = c.hidden_size, heads = c.num_heads, latent = c.kv_lora_rank;
  const int64_t qk = c.qk_nope_head_dim + c.qk_rope_head_dim;
  const auto load_mlp = [&](const std::string& prefix, int64_t width) {
    load(prefix + "gate_proj.weight", width, h);
    load(prefix + "up_proj.weight", width, h);
    load(prefix + "down_proj.weight", h, width);
  };
  load("model.embed_tokens.weight", c.vocab_size, h);
  for (int32_t layer = 0; layer < c.num_layers; ++layer) {
    const std::string p = "model.layers." + std::to_string(layer) + ".";
    const std::string a = p + "self_attn.";
    load(p + "input_layernorm.weight", 1, h);
    load(p + "post_attention_layernorm.weight", 1, h);
    if (c.q_lora_rank == 0) {
      load(a + "q_proj.weight", heads * qk, h);
    } else {
      load(a + "q_a_proj.weight", c.q_lora_rank, h);
      load(a + "q_a_layernorm.weight", 1, c.q_lora_rank);
      load(a + "q_b_proj.weight", heads * qk, c.q_lora_rank);
    }
    load(a + "kv_a_proj_with_mqa.weight", latent + c.qk_rope_head_dim, h);
    load(a + "kv_a_layernorm.weight", 1, latent);
    load(a + "kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), latent);
    load(a + "o_proj.weight", h, heads * c.v_head_dim);
    if (layer < c.first_k_dense_replace) {
      load_mlp(p + "mlp.", c.intermediate_size);
      continue;
    }
    load(p + "mlp.gate.weight", c.num_experts, h);
    for (int32_t e = 0; e < c.num_experts; ++e) {
      load_mlp(p + "mlp.experts." + std::to_string(e) + ".", c.moe_intermediate_size);
    }
    if (c.num_shared_experts > 0) {
      load_mlp(p + "mlp.shared_experts.", int64_t{c.moe_intermediate_size} * c.num_shared_experts);
    }
  }
  load("model.norm.weight", 1, h);
  if (!c.tie_word_embeddings) load("lm_head.weight", c.vocab_size, h);
}

const NaiveModel::Matrix& NaiveModel::weight(const std::string& name) const {
  const auto it = weights_.find(name);
  if (it == weights_.end()) fail("naive model: no tensor {}", name);
  return it->second;
}

std::vector<float> NaiveModel::linear(const std::vector<float>& x, const std::string& name) const {
  const Matrix& w = weight(name);
  const int64_t tokens = static_cast<int64_t>(x.size()) / w.cols;
  std::vector<float> y(static_cast<size_t>(tokens * w.rows));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t o = 0; o < w.rows; ++o) {
      y[static_cast<size_t>(t * w.rows + o)] = static_cast<float>(dot(
          &x[static_cast<size_t>(t * w.cols)], &w.data[static_cast<size_t>(o * w.cols)], w.cols));
    }
  }
  return y;
}

std::vector<float> NaiveModel::rms_norm(const std::vector<float>& x, int64_t stride, int64_t first,
                                        const std::string& name) const {
  const Matrix& w = weight(name);
  const int64_t width = w.cols, tokens = static_cast<int64_t>(x.size()) / stride;
  std::vector<float> y(static_cast<size_t>(tokens * width));
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = &x[static_cast<size_t>(t * stride + first)];
    const double mean = dot(row, row, width) / static_cast<double>(width);
    const double inverse = 1.0 / std::sqrt(mean + static_cast<double>(config_.rms_norm_eps));
    for (int64_t i = 0; i < width; ++i) {
      y[static_cast<size_t>(t * width + i)] =
          static_cast<float>(row[i] * inverse) * w.data[static_cast<size_t>(i)];
    }
  }
  return y;
}

std::vector<float> NaiveModel::attention(const std::vector<float>& x, const std::string& p) const {
  const ModelConfig& c = config_;
  const int64_t heads = c.num_heads, nope = c.qk_nope_head_dim, dim = c.qk_rope_head_dim;
  const int64_t v_dim = c.v_head_dim, latent = c.kv_lora_rank;
  const int64_t tokens = static_cast<int64_t>(x.size()) / c.hidden_size;
  const NaiveRope rope = naive_rope(c);
  // Pairs (2i, 2i+1); the angle is fp32 inv_freq × fp32 position.
  const auto rotate = [&](float* pair_row, int64_t position) {
    for (int64_t i = 0; i < dim / 2; ++i) {
      const float angle = rope.inv_freq[static_cast<size_t>(i)] * static_cast<float>(position);
      const float cosine = static_cast<float>(std::cos(double{angle}) * rope.multiplier);
      const float sine = static_cast<float>(std::sin(double{angle}) * rope.multiplier);
      const float re = pair_row[2 * i], im = pair_row[2 * i + 1];
      pair_row[2 * i] = re * cosine - im * sine;
      pair_row[2 * i + 1] = re * sine + im * cosine;
    }
  };

  // q [T, N, nope + rope]
  std::vector<float> q;
  if (c.q_lora_rank == 0) {
    q = linear(x, p + "q_proj.weight");
  } else {
    const std::vector<float> q_a = linear(x, p + "q_a_proj.weight");
    q = linear(rms_norm(q_a, c.q_lora_rank, 0, p + "q_a_layernorm.weight"), p + "q_b_proj.weight");
  }
  // kv_a [T, latent + rope]: the latent, then k_pe, which all heads share.
  std::vector<float> kv_a = linear(x, p + "kv_a_proj_with_mqa.weight");
  const std::vector<float> normed = rms_norm(kv_a, latent + dim, 0, p + "kv_a_layernorm.weight");
  // kv [T, N, nope + v]
  const std::vector<float> kv = linear(normed, p + "kv_b_proj.weight");
  for (int64_t t = 0; t < tokens; ++t) {
    rotate(&kv_a[static_cast<size_t>(t * (latent + dim) + latent)], t);
    for (int64_t n = 0; n < heads; ++n) {
      rotate(&q[static_cast<size_t>((t * heads + n) * (nope + dim) + nope)], t);
    }
  }

  std::vector<float> out(static_cast<size_t>(tokens * heads * v_dim));
  std::vector<double> score(static_cast<size_t>(tokens)), sum(static_cast<size_t>(v_dim));
  for (int64_t n = 0; n < heads; ++n) {
    for (int64_t t = 0; t < tokens; ++t) {
      const float* query = &q[static_cast<size_t>((t * heads + n) * (nope + dim))];
      double largest = -std::numeric_limits<double>::infinity();
      for (int64_t s = 0; s <= t; ++s) {
        const float* key = &kv[static_cast<size_t>((s * heads + n) * (nope + v_dim))];
        const float* k_pe = &kv_a[static_cast<size_t>(s * (latent + dim) + latent)];
        const double value =
            (dot(query, key, nope) + dot(query + nope, k_pe, dim)) * rope.softmax_scale;
        score[static_cast<size_t>(s)] = value;
        largest = std::max(largest, value);
      }
      double total = 0.0;
      std::fill(sum.begin(), sum.end(), 0.0);
      for (int64_t s = 0; s <= t; ++s) {
        const double weight_of_key = std::exp(score[static_cast<size_t>(s)] - largest);
        const float* value = &kv[static_cast<size_t>((s * heads + n) * (nope + v_dim) + nope)];
        total += weight_of_key;
        for (int64_t i = 0; i < v_dim; ++i) sum[static_cast<size_t>(i)] += weight_of_key * value[i];
      }
      for (int64_t i = 0; i < v_dim; ++i) {
        out[static_cast<size_t>((t * heads + n) * v_dim + i)] =
            static_cast<float>(sum[static_cast<size_t>(i)] / total);
      }
    }
  }
  return linear(out, p + "o_proj.weight");
}

std::vector<float> NaiveModel::mlp(const std::vector<float>& x, const std::string& p) const {
  std::vector<float> gate = linear(x, p + "gate_proj.weight");
  const std::vector<float> up = linear(x, p + "up_proj.weight");
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  return linear(gate, p + "down_proj.weight");
}

std::vector<float> NaiveModel::moe(const std::vector<float>& x, const std::string& p,
                                   std::vector<float>& router_gap) const {
  const ModelConfig& c = config_;
  const size_t h = static_cast<size_t>(c.hidden_size), experts = static_cast<size_t>(c.num_experts);
  const std::vector<float> logits = linear(x, p + "gate.weight");
  std::vector<float> out(x.size(), 0.0f);
  for (size_t t = 0; t < x.size() / h; ++t) {
    // Softmax over all experts; the weights of the chosen are not normalised again.
    const auto begin = logits.begin() + static_cast<int64_t>(t * experts);
    std::vector<float> scores(begin, begin + static_cast<int64_t>(experts));
    const float largest = *std::max_element(scores.begin(), scores.end());
    double total = 0.0;
    for (float& s : scores) total += s = std::exp(s - largest);
    for (float& s : scores) s = static_cast<float>(s / total);
    if (c.group_limited) {
      // A group's score is its largest; the scores of the groups that do not stay become 0.
      const size_t groups = static_cast<size_t>(c.num_groups), size = experts / groups;
      std::vector<float> best(groups), kept(experts, 0.0f);
      for (size_t e = 0; e < experts; ++e) best[e / size] = std::max(best[e / size], scores[e]);
      for (const int64_t g : top_k(best, c.topk_group, router_gap[t])) {
        const size_t first = static_cast<size_t>(g) * size;
        for (size_t e = first; e < first + size; ++e) kept[e] = scores[e];
      }
      scores = kept;
    }
    const std::vector<float> row(x.begin() + static_cast<int64_t>(t * h),
                                 x.begin() + static_cast<int64_t>((t + 1) * h));
    for (const int64_t e : top_k(scores, c.num_experts_per_tok, router_gap[t])) {
      const std::vector<float> y = mlp(row, p + "experts." + std::to_string(e) + ".");
      const float w = scores[static_cast<size_t>(e)] * c.routed_scaling_factor;
      for (size_t i = 0; i < h; ++i) out[t * h + i] += w * y[i];
    }
  }
  if (c.num_shared_experts > 0) add_to(out, mlp(x, p + "shared_experts."));
  return out;
}

NaiveOutput NaiveModel::run(std::span<const int32_t> ids) const {
  const ModelConfig& c = config_;
  const int64_t h = c.hidden_size;
  NaiveOutput output;
  output.router_gap.assign(ids.size(), std::numeric_limits<float>::infinity());
  const Matrix& embedding = weight("model.embed_tokens.weight");
  std::vector<float> x;  // the residual stream [T, H]
  for (const int32_t id : ids) {
    if (id < 0 || id >= c.vocab_size)
      fail("token id: expected below {}, found {}", c.vocab_size, id);
    const auto row = embedding.data.begin() + id * h;
    x.insert(x.end(), row, row + h);
  }
  for (int32_t layer = 0; layer < c.num_layers; ++layer) {
    const std::string p = "model.layers." + std::to_string(layer) + ".";
    add_to(x, attention(rms_norm(x, h, 0, p + "input_layernorm.weight"), p + "self_attn."));
    const std::vector<float> y = rms_norm(x, h, 0, p + "post_attention_layernorm.weight");
    const bool dense = layer < c.first_k_dense_replace;
    add_to(x, dense ? mlp(y, p + "mlp.") : moe(y, p + "mlp.", output.router_gap));
  }
  output.logits = linear(rms_norm(x, h, 0, "model.norm.weight"),
                         c.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
  return output;
}

}  // namespace mla::test
