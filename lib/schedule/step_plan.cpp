#include "lib/schedule/step_plan.h"

#include <algorithm>
#include <cstddef>

#include "lib/base/error.h"

namespace mla {
namespace {

class PassCutter {
 public:
  PassCutter(StepPlan& plan, int32_t workspace_rows) : plan_(plan), capacity_(workspace_rows) {}

  void add(int32_t prefill, int32_t keys) {
    for (int32_t begin = 0; begin < keys;) {
      const int32_t room = capacity_ - rows_;
      // A cut is at a multiple of the key tile, and `begin` is one, so the piece is whole tiles.
      const int32_t piece = keys - begin <= room ? keys - begin : room / kKeyTile * kKeyTile;
      if (piece > 0) plan_.key_spans.push_back({prefill, begin, begin + piece, rows_});
      rows_ += piece;
      begin += piece;
      if (begin < keys) close();
    }
  }

  void close() {
    if (rows_ == 0) return;
    const auto end = static_cast<int32_t>(plan_.key_spans.size());
    Pass pass{first_span_, end, rows_};
    key_tiles(pass);
    query_tiles(pass);
    plan_.passes.push_back(pass);
    first_span_ = end;
    rows_ = 0;
  }

 private:
  int32_t num_tiles() const { return static_cast<int32_t>(plan_.tiles.size()); }
  const KeySpan& span(const Pass& pass, int32_t i) const {
    return plan_.key_spans[static_cast<size_t>(pass.span_begin + i)];
  }

  void key_tiles(Pass& pass) {
    pass.key_tile_begin = num_tiles();
    for (int32_t i = 0; i < pass.span_end - pass.span_begin; ++i) {
      const KeySpan& s = span(pass, i);
      for (int32_t begin = s.key_begin; begin < s.key_end; begin += kKeyTile)
        plan_.tiles.push_back({i, begin});
    }
    pass.key_tile_end = num_tiles();
  }

  // Keys of the span that the tile's last row sees; 0 or less: none.
  int32_t visible_keys(const KeySpan& s, int32_t begin) const {
    const PrefillSpan& request = plan_.prefill[static_cast<size_t>(s.prefill)];
    const int32_t end = request.context + std::min(begin + kQueryTile, request.q_len);
    return std::min(end, s.key_end) - s.key_begin;
  }

  void query_tiles(Pass& pass) {
    pass.query_tile_begin = num_tiles();
    for (int32_t i = 0; i < pass.span_end - pass.span_begin; ++i) {
      const KeySpan& s = span(pass, i);
      const PrefillSpan& request = plan_.prefill[static_cast<size_t>(s.prefill)];
      const bool last = s.key_end == request.context + request.q_len;
      for (int32_t begin = 0; begin < request.q_len; begin += kQueryTile)
        if (last || visible_keys(s, begin) > 0) plan_.tiles.push_back({i, begin});
    }
    pass.query_tile_end = num_tiles();
    std::stable_sort(plan_.tiles.begin() + pass.query_tile_begin, plan_.tiles.end(),
                     [&](const WorkTile& a, const WorkTile& b) {
                       return visible_keys(span(pass, a.span), a.begin) >
                              visible_keys(span(pass, b.span), b.begin);
                     });
  }

  StepPlan& plan_;
  const int32_t capacity_;
  int32_t first_span_ = 0;
  int32_t rows_ = 0;  // taken in the open pass
};

}  // namespace

void cut_passes(StepPlan& plan, int32_t workspace_rows) {
  if (workspace_rows < kKeyTile || workspace_rows % kKeyTile != 0) {
    fail("workspace rows: expected a positive multiple of {}, found {}", kKeyTile, workspace_rows);
  }
  plan.key_spans.clear();
  plan.passes.clear();
  plan.tiles.clear();
  PassCutter cutter(plan, workspace_rows);
  for (size_t i = 0; i < plan.prefill.size(); ++i) {
    cutter.add(static_cast<int32_t>(i), plan.prefill[i].context + plan.prefill[i].q_len);
  }
  cutter.close();
}

void add_decode_row(StepPlan& plan, int32_t key_len, int32_t table_begin) {
  const auto d = static_cast<int32_t>(plan.decode.size());
  plan.decode.push_back({key_len, table_begin, static_cast<int32_t>(plan.decode_splits.size())});
  for (int32_t i = 0; i < decode_splits(key_len); ++i) {
    plan.decode_splits.push_back({d, i});
    if (i % kDecodeGroup == 0) plan.decode_groups.push_back({d, i});
  }
}

void pad_decode_rows(StepPlan& plan, int32_t rows) {
  while (plan.rows() < rows) {
    add_decode_row(plan, 0, 0);
    plan.token_ids.push_back(0);
    plan.positions.push_back(-1);
    plan.slots.push_back(-1);
  }
}

}  // namespace mla
