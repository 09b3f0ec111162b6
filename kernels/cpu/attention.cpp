// MLA: non-absorbed attention of prompt rows in passes, absorbed attention of generated rows.
#include <algorithm>
#include <limits>

#include "kernels/cpu/cpu_backend_impl.h"

namespace mla::cpu {
namespace {

constexpr int kUnitRows = 48;  // query rows of one unit of work
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

int64_t slot_of(const int32_t* table, int64_t position) {
  return int64_t{table[position / kPageTokens]} * kPageTokens + position % kPageTokens;
}

// The keys of one tile for one head, widened to floats. Keys past the request's last one are zero:
// they add nothing, and they are never a neighbour's row or a stale one.
struct KeyTile {
  std::vector<float> keys;    // panels of 16 keys: [kKeyTile/16][P+R][16]
  std::vector<float> values;  // panels of 16 values: [V/16 up][kKeyTile][16]
};

template <class T>
void load_tile(const MlaPrefillParams& p, const KeySpan& span, const int32_t* table, int32_t head,
               int32_t tile_begin, KeyTile& tile) {
  const int32_t D = p.P + p.R, kv_dim = p.P + p.V;
  const int64_t value_panels = ceil_div(p.V, kPanel);
  tile.keys.assign(static_cast<size_t>(kKeyTile) * D, 0.0f);
  tile.values.assign(static_cast<size_t>(value_panels * kPanel) * kKeyTile, 0.0f);
  const int32_t count = std::min(kKeyTile, span.key_end - tile_begin);
  for (int32_t k = 0; k < count; ++k) {
    const int64_t row = span.workspace_row + (tile_begin + k - span.key_begin);
    const T* kv = static_cast<const T*>(p.workspace) + (row * p.N + head) * kv_dim;
    const T* k_pe =
        static_cast<const T*>(p.cache) + slot_of(table, tile_begin + k) * (p.L + p.R) + p.L;
    float* key = tile.keys.data() + int64_t{k / kPanel} * D * kPanel + k % kPanel;
    for (int32_t d = 0; d < p.P; ++d) key[d * kPanel] = to_f32(kv[d]);
    for (int32_t d = 0; d < p.R; ++d) key[(p.P + d) * kPanel] = to_f32(k_pe[d]);
    for (int32_t v = 0; v < p.V; ++v)
      tile.values[static_cast<size_t>((int64_t{v / kPanel} * kKeyTile + k) * kPanel + v % kPanel)] =
          to_f32(kv[p.P + v]);
  }
}

// One softmax step of a row over a tile: `scores` become probabilities (rounded to T as P is), the
// running max and sum move on, and the factor for the running output is returned.
template <class T>
float softmax_step(float* scores, int32_t visible, float softmax_scale, float& max, float& sum) {
  float tile_max = kMinusInfinity;
  for (int32_t k = 0; k < kKeyTile; ++k) {
    scores[k] = k < visible ? scores[k] * softmax_scale : kMinusInfinity;
    tile_max = scores[k] > tile_max ? scores[k] : tile_max;
  }
  const float new_max = std::max(max, tile_max);
  const float factor = exp_f32(max - new_max);
  for (int32_t k = 0; k < kKeyTile; ++k) scores[k] = exp_f32(scores[k] - new_max);
  float tile_sum = 0.0f;
  for (int32_t k = 0; k < visible; ++k) tile_sum += scores[k];
  for (int32_t k = 0; k < kKeyTile; ++k) scores[k] = to_f32(from_f32<T>(scores[k]));
  max = new_max;
  sum = sum * factor + tile_sum;
  return factor;
}

// The running state of a unit's rows, in the unit's own memory: O with V rounded up to whole
// panels.
struct State {
  std::vector<float> max, sum, out;
};

struct Unit {
  int32_t span;  // of the pass
  int32_t head;
  int32_t query_begin;  // within the request's new rows
};

template <class T>
void attend(const MlaPrefillParams& p, const Unit& unit) {
  const KeySpan& span = p.spans[unit.span];
  const PrefillSpan& request = p.prefill[span.prefill];
  const int32_t* table = p.page_table + request.table_begin;
  const int32_t D = p.P + p.R, rows = std::min(kUnitRows, request.q_len - unit.query_begin);
  const int64_t out_width = ceil_div(p.V, kPanel) * kPanel;
  const int64_t first_row = request.row_begin + unit.query_begin;
  const int32_t first_position = request.context + unit.query_begin;

  std::vector<float> q(static_cast<size_t>(rows) * D), scores(static_cast<size_t>(rows) * kKeyTile);
  State state{std::vector<float>(rows, kMinusInfinity), std::vector<float>(rows, 0.0f),
              std::vector<float>(static_cast<size_t>(rows * out_width), 0.0f)};
  for (int32_t r = 0; r < rows; ++r) {
    const int64_t row = first_row + r, cell = row * p.N + unit.head;
    to_floats(static_cast<const T*>(p.q) + row * p.q_stride + unit.head * D, q.data() + r * D, D);
    if (span.key_begin == 0) continue;
    state.max[r] = p.state_max[cell];
    state.sum[r] = p.state_sum[cell];
    std::copy_n(p.state_out + cell * p.V, p.V, state.out.data() + r * out_width);
  }

  KeyTile tile;
  const int32_t last_position = first_position + rows - 1;
  for (int32_t begin = span.key_begin; begin < span.key_end && begin <= last_position;
       begin += kKeyTile) {
    load_tile<T>(p, span, table, unit.head, begin, tile);
    std::fill(scores.begin(), scores.end(), 0.0f);
    for (int32_t k = 0; k < kKeyTile; k += kPanel)
      micro_rows(rows, q.data(), D, tile.keys.data() + int64_t{k} * D, kPanel, D, scores.data() + k,
                 kKeyTile);
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t visible = std::clamp(first_position + r + 1 - begin, 0, kKeyTile);
      float* row_scores = scores.data() + r * kKeyTile;
      if (visible == 0) {  // a wholly masked tile: factor 1, nothing added
        std::fill_n(row_scores, kKeyTile, 0.0f);
        continue;
      }
      const float factor =
          softmax_step<T>(row_scores, visible, p.scale, state.max[r], state.sum[r]);
      scale(factor, state.out.data() + r * out_width, out_width);
    }
    for (int64_t v = 0; v < out_width; v += kPanel)
      micro_rows(rows, scores.data(), kKeyTile, tile.values.data() + v * kKeyTile, kPanel, kKeyTile,
                 state.out.data() + v, out_width);
  }

  const bool last = span.key_end == request.context + request.q_len;
  for (int32_t r = 0; r < rows; ++r) {
    const int64_t row = first_row + r, cell = row * p.N + unit.head;
    const float* out = state.out.data() + r * out_width;
    if (last) {
      T* to = static_cast<T*>(p.out) + cell * p.V;
      for (int32_t v = 0; v < p.V; ++v) to[v] = from_f32<T>(out[v] / state.sum[r]);
    } else {
      p.state_max[cell] = state.max[r];
      p.state_sum[cell] = state.sum[r];
      std::copy_n(out, p.V, p.state_out + cell * p.V);
    }
  }
}

}  // namespace

template <class T>
void CpuBackend<T>::mla_prefill(const MlaPrefillParams& p) {
  std::vector<Unit> units;
  for (int32_t s = 0; s < p.num_spans; ++s)
    for (int32_t h = 0; h < p.N; ++h)
      for (int32_t q = 0; q < p.prefill[p.spans[s].prefill].q_len; q += kUnitRows)
        units.push_back({s, h, q});
  const int64_t count = static_cast<int64_t>(units.size());
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
  for (int64_t u = count - 1; u >= 0; --u) attend<T>(p, units[static_cast<size_t>(u)]);
}

// q_lat = q_nope·W_UK for each head, rounded to T.
template <class T>
void CpuBackend<T>::absorbed_queries(const MlaDecodeParams& p) const {
  const int64_t panels = ceil_div(p.L, kPanel), chunks = ceil_div(p.D, kRowChunk);
  with_weights(p.kv_b, [&]<class W>(const W*) {
    const W* uk = static_cast<const W*>(p.kv_b.absorbed);
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t unit = 0; unit < p.N * chunks; ++unit) {
      const int64_t h = unit % p.N, first = unit / p.N * kRowChunk;
      const int64_t n = std::min<int64_t>(kRowChunk, p.D - first);
      std::vector<float> q(static_cast<size_t>(n * p.P));
      for (int64_t r = 0; r < n; ++r)
        to_floats(static_cast<const T*>(p.q) + (first + r) * p.q_stride + h * (p.P + p.R),
                  q.data() + r * p.P, p.P);
      for (int64_t panel = 0; panel < panels; ++panel) {
        float acc[kRowChunk * kPanel];
        panel_product(q.data(), p.P, n, uk + (h * panels + panel) * kPanel * p.P, p.P, acc);
        const int64_t width = std::min<int64_t>(kPanel, p.L - panel * kPanel);
        for (int64_t r = 0; r < n; ++r)
          from_floats(acc + r * kPanel,
                      static_cast<T*>(p.q_lat) + ((first + r) * p.N + h) * p.L + panel * kPanel,
                      width);
      }
    }
  });
}

// O = O_lat·W_UV for each head.
template <class T>
void CpuBackend<T>::absorbed_values(const MlaDecodeParams& p) const {
  const int64_t panels = ceil_div(p.V, kPanel), chunks = ceil_div(p.D, kRowChunk);
  with_weights(p.kv_b, [&]<class W>(const W*) {
    const W* uv =
        static_cast<const W*>(p.kv_b.absorbed) + p.N * panel_elements(MatrixKind::linear, p.L, p.P);
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (int64_t unit = 0; unit < p.N * chunks; ++unit) {
      const int64_t h = unit % p.N, first = unit / p.N * kRowChunk;
      const int64_t n = std::min<int64_t>(kRowChunk, p.D - first);
      std::vector<float> o(static_cast<size_t>(n * p.L));
      for (int64_t r = 0; r < n; ++r)
        to_floats(static_cast<const T*>(p.o_lat) + ((first + r) * p.N + h) * p.L,
                  o.data() + r * p.L, p.L);
      for (int64_t panel = 0; panel < panels; ++panel) {
        float acc[kRowChunk * kPanel];
        panel_product(o.data(), p.L, n, uv + (h * panels + panel) * kPanel * p.L, p.L, acc);
        const int64_t width = std::min<int64_t>(kPanel, p.V - panel * kPanel);
        for (int64_t r = 0; r < n; ++r)
          from_floats(acc + r * kPanel,
                      static_cast<T*>(p.out) + ((first + r) * p.N + h) * p.V + panel * kPanel,
                      width);
      }
    }
  });
}

namespace {

// Softmax over one split: scores [n] become probabilities (rounded to T), `max` and `sum` are set.
template <class T>
void split_softmax(float* scores, int32_t n, float& max, float& sum) {
  max = kMinusInfinity;
  for (int32_t k = 0; k < n; ++k) max = scores[k] > max ? scores[k] : max;
  for (int32_t k = 0; k < n; ++k) scores[k] = exp_f32(scores[k] - max);
  sum = 0.0f;
  for (int32_t k = 0; k < n; ++k) sum += scores[k];
  for (int32_t k = 0; k < n; ++k) scores[k] = to_f32(from_f32<T>(scores[k]));
}

// Running softmax of one head: unnormalised output with its max and sum of exponentials.
struct Running {
  float max = kMinusInfinity, sum = 0.0f;
  std::vector<float> out;

  explicit Running(int32_t L) : out(static_cast<size_t>(L), 0.0f) {}
  void clear() {
    max = kMinusInfinity;
    sum = 0.0f;
    std::fill(out.begin(), out.end(), 0.0f);
  }
  // The keys of `next` join those that are here.
  void fold(const Running& next) {
    const float new_max = std::max(max, next.max);
    const float old_factor = exp_f32(max - new_max), new_factor = exp_f32(next.max - new_max);
    sum = sum * old_factor + next.sum * new_factor;
    max = new_max;
    const auto n = static_cast<int64_t>(out.size());
    scale(old_factor, out.data(), n);
    axpy(new_factor, next.out.data(), out.data(), n);
  }
};

// O_lat of one row for heads [h_begin, h_end).
template <class T>
void decode_row(const MlaDecodeParams& p, int32_t d, int32_t h_begin, int32_t h_end) {
  const DecodeRow& row = p.rows[d];
  const int32_t* table = p.page_table + row.table_begin;
  const int32_t heads = h_end - h_begin, width = p.L + p.R;
  std::vector<float> q(static_cast<size_t>(heads) * width),
      keys(static_cast<size_t>(kDecodeSplit) * width);
  std::vector<Running> group(static_cast<size_t>(heads), Running(p.L)), total = group;
  Running split(p.L);
  for (int32_t h = 0; h < heads; ++h) {
    const T* q_lat = static_cast<const T*>(p.q_lat) + (int64_t{d} * p.N + h_begin + h) * p.L;
    const T* q_pe = static_cast<const T*>(p.q) + d * p.q_stride + (h_begin + h) * (p.P + p.R) + p.P;
    to_floats(q_lat, q.data() + h * width, p.L);
    to_floats(q_pe, q.data() + h * width + p.L, p.R);
  }
  for (int32_t begin = 0; begin < row.key_len; begin += kDecodeSplit) {
    const int32_t n = std::min(kDecodeSplit, row.key_len - begin);
    const bool group_ends =
        begin + n == row.key_len || (begin / kDecodeSplit + 1) % kDecodeGroup == 0;
    for (int32_t k = 0; k < n; ++k)
      to_floats(static_cast<const T*>(p.cache) + slot_of(table, begin + k) * width,
                keys.data() + k * width, width);
    for (size_t h = 0; h < static_cast<size_t>(heads); ++h) {
      float scores[kDecodeSplit];
      for (int32_t k = 0; k < n; ++k)
        scores[k] =
            dot(q.data() + static_cast<int64_t>(h) * width, keys.data() + k * width, width) *
            p.scale;
      split.clear();
      split_softmax<T>(scores, n, split.max, split.sum);
      for (int32_t k = 0; k < n; ++k)
        axpy(scores[k], keys.data() + k * width, split.out.data(), p.L);
      group[h].fold(split);
      if (!group_ends) continue;
      total[h].fold(group[h]);
      group[h].clear();
    }
  }
  for (int32_t h = 0; h < heads; ++h) {
    T* to = static_cast<T*>(p.o_lat) + (int64_t{d} * p.N + h_begin + h) * p.L;
    const Running& all = total[static_cast<size_t>(h)];
    // A row without keys, as padding has: its output is 0, not 0/0.
    const float divisor = row.key_len > 0 ? all.sum : 1.0f;
    for (int32_t l = 0; l < p.L; ++l)
      to[l] = from_f32<T>(all.out[static_cast<size_t>(l)] / divisor);
  }
}

}  // namespace

template <class T>
void CpuBackend<T>::decode_scores(const MlaDecodeParams& p) const {
  constexpr int32_t kHeads = 8;  // of one unit: keys are widened once for all of them
  const int32_t blocks = static_cast<int32_t>(ceil_div(p.N, kHeads));
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
  for (int32_t unit = 0; unit < p.D * blocks; ++unit) {
    const int32_t h = unit % blocks * kHeads;
    decode_row<T>(p, unit / blocks, h, std::min(p.N, h + kHeads));
  }
}

template <class T>
void CpuBackend<T>::mla_decode(const MlaDecodeParams& p) {
  absorbed_queries(p);
  decode_scores(p);
  absorbed_values(p);
}

template void CpuBackend<float>::mla_prefill(const MlaPrefillParams&);
template void CpuBackend<float>::mla_decode(const MlaDecodeParams&);
template void CpuBackend<bf16>::mla_prefill(const MlaPrefillParams&);
template void CpuBackend<bf16>::mla_decode(const MlaDecodeParams&);

}  // namespace mla::cpu
