// The finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", OOPSLA 2014, with the constants of Stafford's Mix13).
#pragma once

#include <cstdint>

#include "kernels/device_too.h"

namespace mla {

MLA_DEVICE_TOO inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace mla
