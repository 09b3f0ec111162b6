#include "kernels/comm/thread_comm.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "lib/base/error.h"

namespace mla {
namespace {

// What the ranks share.
class Group {
 public:
  Group(int32_t size, DType run_dtype, double timeout_seconds)
      : dtype(run_dtype), timeout_(timeout_seconds), calls_(static_cast<size_t>(size)) {}

  struct Call {
    const void* data = nullptr;
    int64_t count = 0;
    const char* op = nullptr;  // null: not here
  };

  // Returns when all ranks are here; call(rank) is then what each came with. Throws Error.
  void meet(int32_t rank, const Call& call) {
    std::unique_lock lock(mutex_);
    if (!why_.empty()) throw Error(why_);
    calls_[static_cast<size_t>(rank)] = call;
    const uint64_t meeting = meetings_;
    if (++here_ == calls_.size()) {
      check_alike();
      here_ = 0;
      ++meetings_;
      met_ = calls_;
      for (Call& c : calls_) c.op = nullptr;
      changed_.notify_all();
      return;
    }
    const auto over = [&] { return meetings_ != meeting || !why_.empty(); };
    const bool in_time = changed_.wait_for(lock, std::chrono::duration<double>(timeout_), over);
    if (meetings_ != meeting) return;
    if (!in_time)
      end(fmt::format("{}: {} did not join it within {} s", call.op, absent(), timeout_));
    throw Error(why_);
  }
  // What a rank came with. Stays until this rank comes to the next meeting.
  const Call& call(size_t rank) const { return met_[rank]; }
  size_t size() const { return calls_.size(); }

  void abort(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (why_.empty()) end(why);
  }

  const DType dtype;

 private:
  void end(const std::string& why) {
    why_ = why;
    changed_.notify_all();
  }
  void check_alike() {
    const Call& first = calls_.front();
    for (size_t r = 1; r < calls_.size(); ++r) {
      const Call& other = calls_[r];
      if (other.count == first.count && std::strcmp(other.op, first.op) == 0) continue;
      end(fmt::format("ranks disagree: rank 0 came to {} of {} elements, rank {} to {} of {}",
                      first.op, first.count, r, other.op, other.count));
      throw Error(why_);
    }
  }
  std::string absent() const {
    std::string names;
    int count = 0;
    for (size_t r = 0; r < calls_.size(); ++r)
      if (!calls_[r].op) names += fmt::format("{}{}", count++ ? ", " : "", r);
    return (count == 1 ? "rank " : "ranks ") + names;
  }

  const double timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t here_ = 0;
  uint64_t meetings_ = 0;
  std::vector<Call> calls_, met_;
  std::string why_;  // the group has ended
};

class ThreadComm final : public Comm {
 public:
  ThreadComm(int32_t rank, std::shared_ptr<Group> group)
      : Comm(rank, static_cast<int32_t>(group->size())), group_(std::move(group)) {}

  std::string name() const override { return "threads"; }
  void abort(const std::string& why) override { group_->abort(why); }

 private:
  void reduce(void* data, int64_t count, void*) override {
    if (group_->dtype == DType::bf16) {
      sum(static_cast<bf16*>(data), count);
    } else {
      sum(static_cast<float*>(data), count);
    }
  }

  // Each rank adds all of it: nothing is waited for but that nobody writes what another still
  // reads.
  template <class T>
  void sum(T* data, int64_t count) {
    group_->meet(rank(), {data, count, "all-reduce"});
    std::vector<T> total(static_cast<size_t>(count));
    for (size_t i = 0; i < total.size(); ++i) {
      float x = to_f32(part<T>(0)[i]);
      for (size_t r = 1; r < group_->size(); ++r) x += to_f32(part<T>(r)[i]);
      total[i] = from_f32<T>(x);
    }
    group_->meet(rank(), {data, count, "end of an all-reduce"});
    if (count > 0) std::memcpy(data, total.data(), total.size() * sizeof(T));
  }

  void gather(const float* local, float* all, int64_t count) override {
    group_->meet(rank(), {local, count, "all-gather"});
    for (size_t r = 0; r < group_->size(); ++r)
      std::copy_n(part<float>(r), count, all + static_cast<int64_t>(r) * count);
    group_->meet(rank(), {local, count, "end of an all-gather"});
  }

  template <class T>
  const T* part(size_t rank) const {
    return static_cast<const T*>(group_->call(rank).data);
  }

  std::shared_ptr<Group> group_;
};

}  // namespace

std::vector<std::shared_ptr<Comm>> make_thread_comms(int32_t size, DType dtype,
                                                     double timeout_seconds) {
  if (size < 2) fail("threads that communicate: expected at least 2, found {}", size);
  const auto group = std::make_shared<Group>(size, dtype, timeout_seconds);
  std::vector<std::shared_ptr<Comm>> comms;
  for (int32_t rank = 0; rank < size; ++rank)
    comms.push_back(std::make_shared<ThreadComm>(rank, group));
  return comms;
}

}  // namespace mla
