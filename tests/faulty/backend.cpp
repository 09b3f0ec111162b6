// The backend of mla-run-faulty: right, but for the fault that MLA_FAULT names.
//   logit   the first step after one that attends to an earlier chunk has one wrong logit, in its
//           first sampled row: chunked prefill off never meets it
//   throw:N  device N fails in its 40th step
//   hang:N   device N does not come back from it
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "apps/mla_run/device.h"
#include "kernels/cpu/cpu_backend.h"
#include "lib/base/error.h"
#include "tests/support/forwarding_backend.h"
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace mla {
namespace {

class WrongLogit : public test::ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  void mla_prefill(const MlaPrefillParams& p) override {
    ForwardingBackend::mla_prefill(p);
    if (done_ || armed_) return;
    std::vector<KeySpan> spans(static_cast<size_t>(p.num_spans));
    download(spans.data(), p.spans, spans.size() * sizeof(KeySpan));
    for (const KeySpan& span : spans) {
      PrefillSpan prefill;
      download(&prefill, p.prefill + span.prefill, sizeof prefill);
      armed_ |= prefill.context > 0;
    }
  }

  void sample(const SampleParams& p) override {
    if (armed_ && !done_ && p.S > 0) {
      const float wrong = 1000;
      upload(p.logits + p.vocab / 2, &wrong, sizeof wrong);
      done_ = true;
    }
    ForwardingBackend::sample(p);
  }

 private:
  bool armed_ = false, done_ = false;
};

class Failing : public test::ForwardingBackend {
 public:
  Failing(std::unique_ptr<Backend> to, int32_t number, bool hangs)
      : ForwardingBackend(std::move(to)), number_(number), hangs_(hangs) {}

  void sample(const SampleParams& p) override {
    ForwardingBackend::sample(p);
    if (++steps_ < 40) return;
    if (!hangs_) fail("device {} was told to fail", number_);
    std::fprintf(stderr, "device %d hangs\n", number_);
    for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
  }

 private:
  int32_t number_;
  bool hangs_;
  int steps_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_backend([[maybe_unused]] DeviceKind device, DType dtype, int threads,
                                      bool, int32_t number) {
  std::unique_ptr<Backend> backend;
#ifdef MLA_WITH_CUDA
  // Eagerly: a recorded step would not call the ops again.
  if (device == DeviceKind::cuda) backend = make_cuda_backend({.device = number, .graphs = false});
#endif
  if (!backend) backend = make_cpu_backend(dtype, threads);
  const char* name = std::getenv("MLA_FAULT");
  const std::string fault = name ? name : "";
  if (fault == "logit") return std::make_unique<WrongLogit>(std::move(backend));
  for (const bool hangs : {false, true})
    if (fault == fmt::format("{}:{}", hangs ? "hang" : "throw", number))
      return std::make_unique<Failing>(std::move(backend), number, hangs);
  return backend;
}

}  // namespace mla
