// Router and experts.
#include <algorithm>
#include <limits>
#include <numeric>

#include "kernels/cpu/cpu_backend_impl.h"

namespace mla::cpu {
namespace {

// Scores of one row: softmax of the logits. A sum that is NaN leaves NaN scores.
void softmax(const float* logits, int32_t n, float* scores) {
  float max = -std::numeric_limits<float>::infinity();
  for (int32_t e = 0; e < n; ++e) max = logits[e] > max ? logits[e] : max;
  float sum = 0.0f;
  for (int32_t e = 0; e < n; ++e) {
    scores[e] = exp_f32(logits[e] - max);
    sum += scores[e];
  }
  for (int32_t e = 0; e < n; ++e) scores[e] /= sum;
}

// group_limited_greedy: the groups with the largest best score stay, the others' scores become 0.
// Ties go to the lower group.
void limit_groups(float* scores, int32_t E, int32_t groups, int32_t kept) {
  const int32_t size = E / groups;
  std::vector<float> best(groups);
  for (int32_t g = 0; g < groups; ++g)
    best[g] = *std::max_element(scores + g * size, scores + (g + 1) * size);
  std::vector<bool> keep(groups, false);
  for (int32_t round = 0; round < kept; ++round) {
    int32_t pick = -1;
    for (int32_t g = 0; g < groups; ++g)
      if (!keep[g] && (pick < 0 || best[g] > best[pick])) pick = g;
    keep[pick] = true;
  }
  for (int32_t g = 0; g < groups; ++g)
    if (!keep[g]) std::fill_n(scores + g * size, size, 0.0f);
}

// K rounds of argmax over what is left; a comparison with NaN is false, so ids stay distinct.
void top_k(const float* scores, int32_t E, int32_t K, float factor, int32_t* ids, float* weights) {
  std::vector<bool> taken(E, false);
  for (int32_t k = 0; k < K; ++k) {
    int32_t pick = -1;
    for (int32_t e = 0; e < E; ++e)
      if (!taken[e] && (pick < 0 || scores[e] > scores[pick])) pick = e;
    taken[pick] = true;
    ids[k] = pick;
    weights[k] = scores[pick] * factor;
  }
}

}  // namespace

template <class T>
void CpuBackend<T>::router(const RouterParams& p) {
  linear({.x = p.x, .w = p.gate, .out = p.logits, .out_f32 = true, .T = p.T});
#pragma omp parallel num_threads(threads_)
  {
    std::vector<float> scores(p.E);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.T; ++t) {
      if (p.positions && p.positions[t] < 0) {
        std::fill_n(p.ids + t * p.K, p.K, -1);
        std::fill_n(p.weights + t * p.K, p.K, 0.0f);
        continue;
      }
      softmax(p.logits + t * p.E, p.E, scores.data());
      if (p.groups > 1) limit_groups(scores.data(), p.E, p.groups, p.kept_groups);
      top_k(scores.data(), p.E, p.K, p.scaling_factor, p.ids + t * p.K, p.weights + t * p.K);
    }
  }
}

namespace {

// Slots (t·(K+S) + k) grouped by expert in a stable order: [begin[e], begin[e+1]) of `slots`. Slots
// without an expert are in no group.
struct Permutation {
  std::vector<int64_t> begin, slots;
};

Permutation group_slots(const ExpertsParams& p) {
  const int64_t width = p.K + p.S, experts = p.E + p.S;
  const auto expert_of = [&](int64_t t, int64_t k) {
    return k < p.K ? int64_t{p.ids[t * p.K + k]} : p.E + (k - p.K);
  };
  Permutation result;
  result.begin.assign(static_cast<size_t>(experts) + 1, 0);
  for (int64_t t = 0; t < p.T; ++t)
    for (int64_t k = 0; k < width; ++k)
      if (const int64_t e = expert_of(t, k); e >= 0) ++result.begin[static_cast<size_t>(e) + 1];
  std::partial_sum(result.begin.begin(), result.begin.end(), result.begin.begin());
  std::vector<int64_t> next(result.begin.begin(), result.begin.end() - 1);
  result.slots.resize(static_cast<size_t>(result.begin.back()));
  for (int64_t t = 0; t < p.T; ++t)
    for (int64_t k = 0; k < width; ++k)
      if (const int64_t e = expert_of(t, k); e >= 0)
        result.slots[static_cast<size_t>(next[static_cast<size_t>(e)]++)] = t * width + k;
  return result;
}

// Rows of one expert that are multiplied together.
struct Group {
  int64_t expert, begin, end;  // of Permutation::slots
};

std::vector<Group> cut_groups(const Permutation& permutation) {
  std::vector<Group> groups;
  for (size_t e = 0; e + 1 < permutation.begin.size(); ++e)
    for (int64_t i = permutation.begin[e]; i < permutation.begin[e + 1]; i += kRowChunk)
      groups.push_back(
          {static_cast<int64_t>(e), i, std::min(i + kRowChunk, permutation.begin[e + 1])});
  return groups;
}

constexpr int64_t kPanelsPerUnit = 8;

// For every group and every 8 panels of outputs: gathers the rows (of `x`, by row_of(slot)) as
// floats and calls work(group, rows, panel).
template <class T, class RowOf, class Work>
void for_each_panel(const std::vector<Group>& groups, const Permutation& permutation, const T* x,
                    int64_t cols, int64_t panels, int threads, RowOf row_of, Work work) {
  const int64_t blocks = ceil_div(panels, kPanelsPerUnit);
  const int64_t units = static_cast<int64_t>(groups.size()) * blocks;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> rows(static_cast<size_t>(kRowChunk * cols));
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; ++unit) {
      const Group& group = groups[static_cast<size_t>(unit / blocks)];
      for (int64_t i = group.begin; i < group.end; ++i)
        to_floats(x + row_of(permutation.slots[static_cast<size_t>(i)]) * cols,
                  rows.data() + (i - group.begin) * cols, cols);
      const int64_t first = unit % blocks * kPanelsPerUnit;
      for (int64_t panel = first; panel < std::min(panels, first + kPanelsPerUnit); ++panel)
        work(group, rows.data(), panel);
    }
  }
}

}  // namespace

template <class T>
void CpuBackend<T>::experts(const ExpertsParams& p) {
  const int64_t width = p.K + p.S, H = p.gate_up.cols, I = p.gate_up.rows / 2;
  const Permutation permutation = group_slots(p);
  const std::vector<Group> groups = cut_groups(permutation);
  const auto write = [&](const Group& group, const float* acc, int64_t dim, int64_t panel, T* out) {
    const int64_t n = std::min<int64_t>(kPanel, dim - panel * kPanel);
    for (int64_t i = group.begin; i < group.end; ++i)
      from_floats(acc + (i - group.begin) * kPanel,
                  out + permutation.slots[static_cast<size_t>(i)] * dim + panel * kPanel, n);
  };

  const int64_t inner_panels = ceil_div(I, kPanel);
  with_weights(p.gate_up, [&]<class W>(const W* weights) {
    for_each_panel(
        groups, permutation, static_cast<const T*>(p.x), H, inner_panels, threads_,
        [&](int64_t slot) { return slot / width; },
        [&](const Group& group, const float* rows, int64_t panel) {
          const int64_t n = group.end - group.begin;
          const W* gate = weights + group.expert * panel_elements(p.gate_up.kind, 2 * I, H);
          const W* up = gate + inner_panels * kPanel * H;
          float g[kRowChunk * kPanel], u[kRowChunk * kPanel];
          panel_product(rows, H, n, gate + panel * kPanel * H, H, g);
          panel_product(rows, H, n, up + panel * kPanel * H, H, u);
          for (int64_t i = 0; i < n * kPanel; ++i) g[i] = silu(g[i]) * u[i];
          write(group, g, I, panel, static_cast<T*>(p.inner));
        });
  });
  with_weights(p.down, [&]<class W>(const W* weights) {
    for_each_panel(
        groups, permutation, static_cast<const T*>(p.inner), I, ceil_div(H, kPanel), threads_,
        [](int64_t slot) { return slot; },
        [&](const Group& group, const float* rows, int64_t panel) {
          const W* down = weights + group.expert * panel_elements(p.down.kind, H, I);
          float acc[kRowChunk * kPanel];
          panel_product(rows, I, group.end - group.begin, down + panel * kPanel * I, I, acc);
          write(group, acc, H, panel, static_cast<T*>(p.out));
        });
  });
}

template void CpuBackend<float>::router(const RouterParams&);
template void CpuBackend<float>::experts(const ExpertsParams&);
template void CpuBackend<bf16>::router(const RouterParams&);
template void CpuBackend<bf16>::experts(const ExpertsParams&);

}  // namespace mla::cpu
