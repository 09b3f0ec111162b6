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

void StepTrace::track(int64_t run, int32_t number, const char* name) {
  write({{"name", "thread_name"},
         {"ph", "M"},
         {"pid", run},
         {"tid", number},
         {"args", {{"name", name}}}});
  write({{"name", "thread_sort_index"},
         {"ph", "M"},
         {"pid", run},
         {"tid", number},
         {"args", {{"sort_index", number}}}});
}

int64_t StepTrace::begin_run(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const int64_t run = ++runs_;
  write({{"name", "process_name"}, {"ph", "M"}, {"pid", run}, {"args", {{"name", name}}}});
  track(run, kPrefill, "prefill");
  track(run, kDecode, "decode");
  track(run, kSampling, "sampling");
  track(run, kDetokenising, "detokenising");
  track(run, kPlanning, "planning");
  return run;
}

void StepTrace::event(int64_t run, int32_t track, const char* name, int64_t begin, int64_t end,
                      OrderedJson arguments) {
  write({{"name", name},
         {"ph", "X"},
         {"pid", run},
         {"tid", track},
         {"ts", microseconds(begin - start_)},
         {"dur", microseconds(end > begin ? end - begin : 0)},
         {"args", std::move(arguments)}});
}

void StepTrace::add(int64_t run, const TracedStep& s) {
  const std::lock_guard lock(mutex_);
  if (s.prefill_tokens > 0)
    event(run, kPrefill, "prefill", s.compute_begin, s.compute_end,
          {{"step", s.number},
           {"tokens", s.prefill_tokens},
           {"requests", s.num_prompts},
           {"prompts", prompts_json(s)},
           {"decode_tokens_beside", s.decode_tokens}});
  if (s.decode_tokens > 0)
    event(run, kDecode, "decode", s.compute_begin, s.compute_end,
          {{"step", s.number},
           {"tokens", s.decode_tokens},
           {"requests", s.decode_tokens},
           {"prefill_tokens_beside", s.prefill_tokens}});
  if (s.sampled > 0)
    event(run, kSampling, "sampling", s.compute_end, s.sample_end,
          {{"step", s.number}, {"tokens", s.sampled}, {"requests", s.sampled}});
  event(run, kDetokenising, "detokenising", s.take_begin, s.take_end,
        {{"step", s.number}, {"tokens", s.sampled}, {"requests_finished", s.finished}});
  event(run, kPlanning, "planning and launching", s.plan_begin, s.plan_end,
        {{"step", s.number}, {"tokens", s.prefill_tokens + s.decode_tokens}});
}

void StepTrace::close() {
  if (!on()) return;
  out_ << "\n]\n";
  out_.close();
  if (!out_) fail("--trace: {}: it could not be written to its end; the trace is not whole", path_);
}

}  // namespace mla
