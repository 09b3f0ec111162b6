#include "lib/schedule/step_plan.h"

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
    plan_.passes.push_back({first_span_, end, rows_});
    first_span_ = end;
    rows_ = 0;
  }

 private:
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
  PassCutter cutter(plan, workspace_rows);
  for (size_t i = 0; i < plan.prefill.size(); ++i) {
    cutter.add(static_cast<int32_t>(i), plan.prefill[i].context + plan.prefill[i].q_len);
  }
  cutter.close();
}

}  // namespace mla
