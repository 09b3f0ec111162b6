// Carves named buffers out of one allocation. Without memory it only counts: the memory plan and
// the model make the same walk, so what is planned is what is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/base/error.h"

namespace mla {

class Arena {
 public:
  static constexpr size_t kAlign = 256;

  Arena() = default;  // counts only
  Arena(void* base, size_t size) : base_(static_cast<std::byte*>(base)), size_(size) {}

  // `count` elements of `element_bytes`; null while counting. Throws Error past the end.
  void* take(int64_t count, size_t element_bytes) {
    const size_t bytes = static_cast<size_t>(count) * element_bytes;
    const size_t begin = used_;
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    if (!base_) return nullptr;
    if (used_ > size_) fail("memory plan: expected at most {} bytes, needed {}", size_, used_);
    return base_ + begin;
  }
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take(count, sizeof(T)));
  }

  size_t used() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;
};

}  // namespace mla
