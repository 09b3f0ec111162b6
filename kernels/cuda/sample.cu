// Sampling of one token a row, in two kernels; see sample.cuh.
#include <type_traits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/sample.cuh"

namespace mla::cuda {
namespace {

using namespace sampling;

// Lays the scratch out from `base`; returns its size in bytes. Every part is a multiple of 16.
size_t lay_out(char* base, int64_t rows, int64_t vocab, Scratch& out) {
  size_t used = 0;
  const auto take = [&](auto*& part, int64_t n) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(base + used);
    used += static_cast<size_t>(n) * sizeof(*part);
  };
  take(out.scan_arrivals, kMaxRows);
  take(out.draw_arrivals, kMaxRows);
  take(out.states, rows);
  take(out.chunks, rows * chunks_of(vocab));
  take(out.draws, rows * tiles_of(vocab));
  take(out.tops, rows * chunks_of(vocab) * kMaxTop);
  return used;
}

}  // namespace

size_t sample_scratch_bytes(int64_t max_samples, int64_t vocab) {
  Scratch scratch;
  return lay_out(nullptr, max_samples, vocab, scratch);
}

void sample(const SampleParams& p, void* scratch_base, Launch launch) {
  if (p.S == 0) return;
  if (p.S > kMaxRows || p.max_top > kMaxTop || p.vocab > kMaxVocab)
    fail("CUDA: sampling {} rows of {} logits, {} top logprobs: at most {} of {}, {}", p.S, p.vocab,
         p.max_top, kMaxRows, kMaxVocab, kMaxTop);
  Scratch scratch;
  lay_out(static_cast<char*>(scratch_base), p.S, p.vocab, scratch);
  launch_scan(p, scratch, launch);
  launch_draw(p, scratch, launch);
}

}  // namespace mla::cuda
