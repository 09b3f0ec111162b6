// What a run is doing, on standard error: a bar that is redrawn on a terminal, else a line every
// five seconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "lib/engine/run_batch.h"

namespace mla {

// On the steady clock.
double seconds_since(std::chrono::steady_clock::time_point start);

class Progress {
 public:
  // `mode`: auto (as above, nothing with `quiet`), always (with `quiet` too) or never.
  Progress(const std::string& mode, bool quiet);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // The phases. Each begins with what is known at once.
  void checking(const std::string& what);
  void loading(uint64_t total_bytes);
  void loaded(uint64_t bytes);  // so far
  // `total`: records to be run, -1 where that is not known; `kept`: records finished earlier.
  void running(const std::string& label, int64_t total, int64_t kept);
  void update(const BatchProgress& progress);
  // The last state as a line that stays.
  void finish();
  // Takes the bar from the terminal, so that something else can be printed.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  void begin();
  void show(double share, const std::string& text);
  void draw(double share, const std::string& eta, const std::string& text);
  std::string running_text() const;

  bool on_, bar_, colour_;
  bool drawn_ = false;
  Clock::time_point start_, shown_;
  uint64_t total_bytes_ = 0;
  std::string label_;
  int64_t total_ = -1, kept_ = 0;
  BatchProgress last_;
};

}  // namespace mla
