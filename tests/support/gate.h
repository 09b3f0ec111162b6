// A place where a thread stays until it is let go.
#pragma once

#include <condition_variable>
#include <mutex>

namespace mla::test {

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;

  void pass() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return open; });
  }
  void let_go() {
    const std::lock_guard lock(mutex);
    open = true;
    changed.notify_all();
  }
};

}  // namespace mla::test
