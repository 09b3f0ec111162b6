// CPython's random.Random, as far as drawing few-shot examples needs it.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace mla {

// random.Random(seed): MT19937, seeded with init_by_array([seed]) of Matsumoto and Nishimura's
// mt19937ar.c.
class PythonRandom {
 public:
  explicit PythonRandom(uint32_t seed);

  // random.sample(range(n), k): k different numbers of [0, n), in the order drawn. Throws Error
  // unless 0 <= k <= n.
  std::vector<int64_t> sample(int64_t n, int64_t k);

 private:
  int64_t below(int64_t n);  // of [0, n), 0 < n < 2^32

  std::mt19937 bits_;
};

}  // namespace mla
