#include "lib/eval/python_random.h"

#include <bit>
#include <numeric>
#include <unordered_set>

#include "lib/base/error.h"

namespace mla {
namespace {

// A seed sequence (of the standard's std::mt19937) whose words are init_by_array([seed]).
struct InitByArray {
  using result_type = uint32_t;
  uint32_t seed;

  template <class Iterator>
  void generate(Iterator begin, Iterator end) const {
    const auto n = static_cast<uint32_t>(end - begin);  // 624
    const auto mixed = [&](uint32_t i, uint32_t factor) {
      const uint32_t before = begin[i - 1];
      return begin[i] ^ ((before ^ (before >> 30)) * factor);
    };
    begin[0] = 19650218u;
    for (uint32_t i = 1; i < n; ++i) {
      const uint32_t before = begin[i - 1];
      begin[i] = 1812433253u * (before ^ (before >> 30)) + i;
    }
    uint32_t i = 1;
    const auto next = [&] {
      if (++i < n) return;
      begin[0] = begin[n - 1];
      i = 1;
    };
    for (uint32_t k = 0; k < n; ++k, next()) begin[i] = mixed(i, 1664525u) + seed;
    for (uint32_t k = 1; k < n; ++k, next()) begin[i] = mixed(i, 1566083941u) - i;
    begin[0] = 0x80000000u;
  }
};

// Up to this many a population is drawn from as a list, as Random.sample does.
int64_t set_size(int64_t k) {
  int64_t table = k > 5 ? 1 : 0;  // 4 ** ceil(log(3 k, 4)), the table of a set of k
  while (table > 0 && table < 3 * k) table *= 4;
  return 21 + table;
}

}  // namespace

PythonRandom::PythonRandom(uint32_t seed) {
  InitByArray words{seed};
  bits_.seed(words);
}

int64_t PythonRandom::below(int64_t n) {
  const int width = std::bit_width(static_cast<uint32_t>(n));
  for (;;) {
    const auto drawn = static_cast<int64_t>(bits_() >> (32 - width));
    if (drawn < n) return drawn;
  }
}

std::vector<int64_t> PythonRandom::sample(int64_t n, int64_t k) {
  if (!(0 <= k && k <= n)) fail("a draw: expected 0 to {} of {}, found {}", n, n, k);
  std::vector<int64_t> drawn;
  if (n <= set_size(k)) {
    std::vector<int64_t> pool(static_cast<size_t>(n));
    std::iota(pool.begin(), pool.end(), int64_t{0});
    for (; k > 0; --k, pool.pop_back()) {
      int64_t& chosen = pool[static_cast<size_t>(below(static_cast<int64_t>(pool.size())))];
      drawn.push_back(chosen);
      chosen = pool.back();
    }
    return drawn;
  }
  std::unordered_set<int64_t> seen;
  while (std::ssize(drawn) < k) {
    const int64_t number = below(n);
    if (seen.insert(number).second) drawn.push_back(number);
  }
  return drawn;
}

}  // namespace mla
