#include "lib/model/rank_threads.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "lib/base/error.h"

namespace mla {
namespace {

using Clock = std::chrono::steady_clock;

Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

}  // namespace

// Outlives the RankThreads where a thread was left behind.
struct RankThreads::Shared {
  struct RankState {
    std::deque<Job> jobs;
    uint64_t done = 0;
    bool busy = false, ended = false;
  };

  Shared(int32_t size, Options o) : options(std::move(o)), ranks(static_cast<size_t>(size)) {}

  const Options options;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<RankState> ranks;
  uint64_t posted = 0;
  bool stopping = false;
  bool told = false;     // to stop
  bool telling = false;  // options.stop runs, which reaches what ranks clean up
  std::string error;     // of the first failure

  template <class Of>
  bool all(const Of& of) const {
    for (const RankState& rank : ranks)
      if (!of(rank)) return false;
    return true;
  }

  // Once. Without the lock: it may wait for what a rank holds.
  void stop(std::unique_lock<std::mutex>& lock, const std::string& why) {
    stopping = true;
    changed.notify_all();
    if (told || !options.stop) return;
    told = true;
    telling = true;
    lock.unlock();
    options.stop(why);
    lock.lock();
    telling = false;
    changed.notify_all();
  }

  void fail_with(std::unique_lock<std::mutex>& lock, const std::string& why) {
    if (!error.empty()) return;
    error = why;
    stop(lock, why);
  }

  void run_jobs(size_t index) {
    RankState& rank = ranks[index];
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stopping || !rank.jobs.empty(); });
      if (stopping) break;
      Job job = std::move(rank.jobs.front());
      rank.jobs.pop_front();
      rank.busy = true;
      lock.unlock();
      std::string why;
      try {
        job(static_cast<int32_t>(index));
      } catch (const std::exception& e) {
        why = fmt::format("rank {}: {}", index, e.what());
      }
      job = nullptr;
      lock.lock();
      rank.busy = false;
      ++rank.done;
      if (!why.empty()) fail_with(lock, why);
      changed.notify_all();
    }
    // Another may still read what this one has.
    const bool alone = changed.wait_for(lock, seconds(options.join_seconds), [&] {
      return !telling && all([](const RankState& r) { return !r.busy; });
    });
    if (alone && options.clean_up) {
      lock.unlock();
      options.clean_up(static_cast<int32_t>(index));
      lock.lock();
    }
    rank.ended = true;
    changed.notify_all();
  }

  // Jobs that ended and other signs of life.
  uint64_t signs() const {
    uint64_t sum = options.signs ? options.signs() : 0;
    for (const RankState& rank : ranks) sum += rank.done;
    return sum;
  }

  std::string late(uint64_t job) const {
    std::string names;
    int count = 0;
    for (size_t r = 0; r < ranks.size(); ++r)
      if (ranks[r].done < job) names += fmt::format("{}{}", count++ ? ", " : "", r);
    return (count == 1 ? "rank " : "ranks ") + names;
  }
};

struct RankThreads::Threads {
  std::vector<std::thread> list;
};

RankThreads::RankThreads(int32_t size, Options options)
    : shared_(std::make_shared<Shared>(size, std::move(options))),
      threads_(std::make_unique<Threads>()) {
  for (int32_t rank = 0; rank < size; ++rank)
    threads_->list.emplace_back(
        [shared = shared_, rank] { shared->run_jobs(static_cast<size_t>(rank)); });
}

RankThreads::~RankThreads() {
  std::unique_lock lock(shared_->mutex);
  shared_->stopping = true;
  shared_->changed.notify_all();
  if (!shared_->all([](const auto& r) { return !r.busy; }))
    shared_->stop(lock, "the run has ended");
  // Twice: ranks wait for each other as long, before the last clean up.
  const bool ended = shared_->changed.wait_for(
      lock, 2 * seconds(shared_->options.join_seconds),
      [&] { return shared_->all([](const auto& r) { return r.ended; }); });
  lock.unlock();
  for (std::thread& thread : threads_->list) ended ? thread.join() : thread.detach();
  if (!ended && shared_->options.abandoned) shared_->options.abandoned();
}

int32_t RankThreads::size() const { return static_cast<int32_t>(shared_->ranks.size()); }

uint64_t RankThreads::post(Job job) {
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->error.empty()) throw Error(shared_->error);
  for (auto& rank : shared_->ranks) rank.jobs.push_back(job);
  shared_->changed.notify_all();
  return ++shared_->posted;
}

void RankThreads::wait(uint64_t job, const std::function<void()>& tick) {
  Shared& s = *shared_;
  // A group's own bound, which knows more, ends first.
  const double timeout = s.options.timeout_seconds;
  const Clock::duration bound = seconds(timeout * 1.1 + 0.2);
  const Clock::duration pause = seconds(std::min(0.1, timeout / 10));
  std::unique_lock lock(s.mutex);
  uint64_t signs = s.signs();
  Clock::time_point since = Clock::now();
  for (;;) {
    const bool over = s.changed.wait_for(lock, pause, [&] {
      return !s.error.empty() || s.all([&](const auto& r) { return r.done >= job; });
    });
    if (!s.error.empty()) throw Error(s.error);
    if (over) return;
    if (tick) {
      lock.unlock();
      tick();
      lock.lock();
    }
    if (const uint64_t now = s.signs(); now != signs) {
      signs = now;
      since = Clock::now();
    } else if (Clock::now() - since > bound) {
      s.fail_with(lock, fmt::format("{} did not answer within {} s", s.late(job), timeout));
    }
  }
}

}  // namespace mla
