#include "kernels/cuda/scratch.h"

namespace mla::cuda {

Scratch Scratch::carve(void* base, const ModelShape& s, size_t& bytes) {
  bytes = 0;
  const auto take = [&](int64_t count, size_t element) -> void* {
    void* at = base ? static_cast<std::byte*>(base) + bytes : nullptr;
    bytes += (static_cast<size_t>(count) * element + 255) / 256 * 256;
    return at;
  };
  const auto ints = [&](int64_t count) { return static_cast<int32_t*>(take(count, 4)); };
  Scratch r{};
  r.max_mlp_rows = s.max_mlp_rows;
  r.max_splits = s.max_splits;
  r.max_samples = s.max_samples;
  const int64_t slots = s.max_mlp_rows * s.K;
  r.gathered = take(slots * s.H, 2);
  r.grouping.begin = ints(s.E + 1);
  r.grouping.slots = ints(slots);
  r.grouping.counts = ints((s.max_mlp_rows + kGroupBlock - 1) / kGroupBlock * s.E);
  r.partial = static_cast<float*>(take(s.max_splits * s.N * (kL + 2), 4));
  r.arrivals = ints(s.max_decode_rows);
  r.taken = ints((s.N + 15) / 16);
  r.sample = take(static_cast<int64_t>(sample_scratch_bytes(s.max_samples, s.vocab)), 1);
  return r;
}

}  // namespace mla::cuda
