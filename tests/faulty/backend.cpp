// The backend of mla-run-faulty: right, but for the fault that MLA_FAULT names.
//   logit   the first step after one that attends to an earlier chunk has one wrong logit, in its
//           first sampled row: chunked prefill off never meets it
#include <cstdlib>
#include <string_view>
#include <vector>

#include "apps/mla_run/device.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/support/forwarding_backend.h"
#ifdef MLA_WITH_CUDA
#include "kernels/cuda/cuda_backend.h"
#endif

namespace mla {
namespace {

class FaultyBackend : public test::ForwardingBackend {
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

}  // namespace

std::unique_ptr<Backend> make_backend([[maybe_unused]] DeviceKind device, DType dtype, int threads,
                                      bool) {
  std::unique_ptr<Backend> backend;
#ifdef MLA_WITH_CUDA
  // Eagerly: a recorded step would not call the ops again.
  if (device == DeviceKind::cuda) backend = make_cuda_backend({.device = 0, .graphs = false});
#endif
  if (!backend) backend = make_cpu_backend(dtype, threads);
  const char* fault = std::getenv("MLA_FAULT");
  if (fault && std::string_view(fault) == "logit")
    return std::make_unique<FaultyBackend>(std::move(backend));
  return backend;
}

}  // namespace mla
