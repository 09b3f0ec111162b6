// A model that hands everything on to another, for tests that change one thing.
#pragma once

#include <string>
#include <vector>

#include "lib/model/runner.h"

namespace mla::test {

class ForwardingRunner : public ModelRunner {
 public:
  explicit ForwardingRunner(ModelRunner& to) : to_(to) {}

  void launch(const StepPlan& plan, const std::vector<RowSampling>& sampling) override {
    to_.launch(plan, sampling);
  }
  StepOutput collect() override { return to_.collect(); }
  size_t in_flight() const override { return to_.in_flight(); }
  void set_clock() override { to_.set_clock(); }
  RowLogprobs row_logprobs(std::span<const int32_t> rows, std::span<const int32_t> tokens,
                           int32_t top) override {
    return to_.row_logprobs(rows, tokens, top);
  }
  void warm_up() override { to_.warm_up(); }
  std::string communication() override { return to_.communication(); }
  uint64_t memory_in_use() override { return to_.memory_in_use(); }

 private:
  ModelRunner& to_;
};

}  // namespace mla::test
