// One thread a rank, with a queue of jobs. Whatever a rank does, those who wait for it go on within
// a bounded time: when one fails or gives no sign of life, all are told to stop, and a thread that
// does not stop is left behind.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace mla {

class RankThreads {
 public:
  struct Options {
    // Waiting ends after so long without a sign of life from any rank: a job that ended, a change
    // of `signs`.
    double timeout_seconds = 300;
    // How long the destructor waits for threads to end.
    double join_seconds = 10;
    // From any thread, and until the last of ours has ended: they own copies.
    std::function<uint64_t()> signs;  // may be empty
    // Called once at most: ends what ranks wait for in each other.
    std::function<void(const std::string&)> stop;
    std::function<void(int32_t rank)> clean_up;  // in the rank's thread, at its end
    std::function<void()> abandoned;             // a thread was left behind
  };
  // A job on the thread of each rank. It owns what it uses.
  using Job = std::function<void(int32_t rank)>;

  RankThreads(int32_t size, Options options);
  // No rank's clean_up() runs while another still runs a job.
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  int32_t size() const;
  // Queues a job after the others. Throws as wait() does where a rank has failed.
  uint64_t post(Job job);
  // Returns when every rank has run the job. Throws Error that begins with "rank R: ", of the first
  // rank that failed in any job, or says which did not answer in time; so do all later calls.
  // `tick` is called now and then, by the waiting thread, and may throw.
  void wait(uint64_t job, const std::function<void()>& tick = {});
  void run(Job job, const std::function<void()>& tick = {}) { wait(post(std::move(job)), tick); }

 private:
  struct Shared;
  struct Threads;
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<Threads> threads_;
};

}  // namespace mla
