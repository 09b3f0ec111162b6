#include "lib/engine/step_trace.h"

#include <cerrno>
#include <chrono>
#include <cstring>

#include "lib/base/error.h"

namespace mla {
namespace {

enum Track : int32_t { kPrefill = 1, kDecode, kSampling, kDetokenising, kPlanning };

double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

OrderedJson prompts_json(const TracedStep& step) {
  OrderedJson list = OrderedJson::array();
  for (const TracedStep::Prompt& prompt : step.prompts)
    list.push_back({{"id", prompt.id}, {"context", prompt.context}, {"tokens", prompt.tokens}});
  return list;
}

}  // namespace

int64_t steady_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

StepTrace::StepTrace(const std::string& path) : path_(path), start_(steady_ns()) {
  if (!on()) return;
  out_.open(path, std::ios::binary | std::ios::trunc);
  if (!out_) fail("--trace: {}: cannot be opened: {}", path, std::strerror(errno));
  out_ << "[";
}

void StepTrace::write(const OrderedJson& event) {
  out_ << (first_ ? "\n" : ",\n") << event.dump();
  first_ = false;
}

void StepTrace::track(int32_t number, const char* name) {
  write({{"name", "thread_name"},
         {"ph", "M"},
         {"pid", run_},
         {"tid", number},
         {"args", {{"name", name}}}});
  write({{"name", "thread_sort_index"},
         {"ph", "M"},
         {"pid", run_},
         {"tid", number},
         {"args", {{"sort_index", number}}}});
}

void StepTrace::begin_run(const std::string& name) {
  if (!on()) return;
  ++run_;
  write({{"name", "process_name"}, {"ph", "M"}, {"pid", run_}, {"args", {{"name", name}}}});
  track(kPrefill, "prefill");
  track(kDecode, "decode");
  track(kSampling, "sampling");
  track(kDetokenising, "detokenising");
  track(kPlanning, "planning");
}

void StepTrace::event(int32_t track, const char* name, int64_t begin, int64_t end,
                      OrderedJson arguments) {
  write({{"name", name},
         {"ph", "X"},
         {"pid", run_},
         {"tid", track},
         {"ts", microseconds(begin - start_)},
         {"dur", microseconds(end > begin ? end - begin : 0)},
         {"args", std::move(arguments)}});
}

void StepTrace::add(const TracedStep& s) {
  if (!on()) return;
  if (s.prefill_tokens > 0)
    event(kPrefill, "prefill", s.compute_begin, s.compute_end,
          {{"step", s.number},
           {"tokens", s.prefill_tokens},
           {"requests", s.num_prompts},
           {"prompts", prompts_json(s)},
           {"decode_tokens_beside", s.decode_tokens}});
  if (s.decode_tokens > 0)
    event(kDecode, "decode", s.compute_begin, s.compute_end,
          {{"step", s.number},
           {"tokens", s.decode_tokens},
           {"requests", s.decode_tokens},
           {"prefill_tokens_beside", s.prefill_tokens}});
  if (s.sampled > 0)
    event(kSampling, "sampling", s.compute_end, s.sample_end,
          {{"step", s.number}, {"tokens", s.sampled}, {"requests", s.sampled}});
  event(kDetokenising, "detokenising", s.take_begin, s.take_end,
        {{"step", s.number}, {"tokens", s.sampled}, {"requests_finished", s.finished}});
  event(kPlanning, "planning and launching", s.plan_begin, s.plan_end,
        {{"step", s.number}, {"tokens", s.prefill_tokens + s.decode_tokens}});
}

void StepTrace::close() {
  if (!on()) return;
  out_ << "\n]\n";
  out_.close();
  if (!out_) fail("--trace: {}: it could not be written to its end", path_);
}

}  // namespace mla
