#include "lib/engine/parallel_batch.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "lib/base/error.h"

namespace mla {
namespace {

constexpr int64_t kWaiting = 256;   // requests of an engine that wait, beside those that run
constexpr int64_t kDecodeCost = 4;  // prompt tokens that take as long as a generated one
constexpr auto kLook = std::chrono::milliseconds(50);  // for a signal and the progress

// What the engines' threads have for the one that deals.
struct Outbox {
  std::mutex mutex;
  std::condition_variable filled;
  std::vector<std::pair<size_t, Engine::Finished>> items;  // with the engine's number
  std::string error;                                       // the first
};

// An engine on its thread.
class Worker {
 public:
  Worker(size_t number, Engine& engine, Outbox& outbox)
      : number_(number), engine_(engine), outbox_(outbox), thread_([this] { run(); }) {}
  ~Worker() {
    end();
    join();
  }
  // It ends behind the step that it is in.
  void end() {
    {
      const std::lock_guard lock(mutex_);
      end_ = true;
    }
    wake_.notify_one();
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  // Called by the thread that deals.
  void add(Request request) {
    const int64_t work = estimated_work(request, engine_.max_model_len());
    work_of_.emplace(request.index, work);
    work_ += work;
    {
      const std::lock_guard lock(mutex_);
      inbox_.push_back(std::move(request));
    }
    wake_.notify_one();
  }
  void finished(int64_t index) {
    const auto it = work_of_.find(index);
    work_ -= it->second;
    work_of_.erase(it);
  }
  int64_t work() const { return work_; }
  bool has_room() const {
    return static_cast<int64_t>(work_of_.size()) < engine_.max_seqs() + kWaiting;
  }
  bool idle() const { return work_of_.empty(); }
  int64_t prefill_tokens() const { return prefill_tokens_; }
  int64_t decode_tokens() const { return decode_tokens_; }

 private:
  void run() {
    try {
      while (take()) {
        while (!taken_.empty()) {
          engine_.add(std::move(taken_.front()), sink_);
          taken_.pop_front();
        }
        if (engine_.has_work()) engine_.step(sink_);
        prefill_tokens_ = engine_.scheduler_stats().prefill_tokens;
        decode_tokens_ = engine_.scheduler_stats().decode_tokens;
        hand_over();
      }
    } catch (const std::exception& e) {
      hand_over();  // what the step had finished before
      {
        const std::lock_guard lock(outbox_.mutex);
        if (outbox_.error.empty()) outbox_.error = fmt::format("engine {}: {}", number_, e.what());
      }
      outbox_.filled.notify_one();
    }
  }

  // Waits for requests where the engine has nothing to do. False at the end.
  bool take() {
    std::unique_lock lock(mutex_);
    if (!engine_.has_work()) wake_.wait(lock, [&] { return end_ || !inbox_.empty(); });
    taken_.swap(inbox_);
    return !end_;
  }

  void hand_over() {
    if (done_.empty()) return;
    {
      const std::lock_guard lock(outbox_.mutex);
      for (Engine::Finished& item : done_) outbox_.items.emplace_back(number_, std::move(item));
    }
    outbox_.filled.notify_one();
    done_.clear();
  }

  const size_t number_;
  Engine& engine_;
  Outbox& outbox_;
  // Of the thread that deals: the estimated work of requests that are not finished, by index.
  std::unordered_map<int64_t, int64_t> work_of_;
  int64_t work_ = 0;
  // Of both:
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Request> inbox_;
  bool end_ = false;
  std::atomic<int64_t> prefill_tokens_ = 0, decode_tokens_ = 0;
  // Of the engine's thread:
  std::deque<Request> taken_;
  std::vector<Engine::Finished> done_;
  const Engine::Sink sink_ = [this](const Engine::Finished& item) { done_.push_back(item); };
  std::thread thread_;  // the last one: it uses the others
};

int64_t index_of(const Engine::Finished& item) {
  return std::visit([](const auto& record) { return record.index; }, item);
}

class Dealer {
 public:
  Dealer(Batch& batch, std::span<Engine* const> engines) : batch_(batch) {
    for (size_t i = 0; i < engines.size(); ++i) workers_.emplace_back(i, *engines[i], outbox_);
  }

  void run() {
    for (deal(); batch_.goes_on() && !idle() && collect(); deal()) {
      int64_t prefill = 0, decode = 0;
      for (const Worker& worker : workers_) {
        prefill += worker.prefill_tokens();
        decode += worker.decode_tokens();
      }
      batch_.show_progress(prefill, decode);
    }
    end();
  }

 private:
  bool idle() const { return std::ranges::all_of(workers_, &Worker::idle); }

  // To the one with the least work before it, while one has room.
  void deal() {
    for (;;) {
      Worker* least = nullptr;
      for (Worker& worker : workers_)
        if (worker.has_room() && (!least || worker.work() < least->work())) least = &worker;
      if (!least) return;
      std::optional<Request> request = batch_.next(idle());
      if (!request) return;
      least->add(std::move(*request));
    }
  }

  // Waits for records, or a moment. False once an engine has failed.
  bool collect() {
    std::vector<std::pair<size_t, Engine::Finished>> items;
    bool good = true;
    {
      std::unique_lock lock(outbox_.mutex);
      outbox_.filled.wait_for(lock, kLook,
                              [&] { return !outbox_.items.empty() || !outbox_.error.empty(); });
      items.swap(outbox_.items);
      good = outbox_.error.empty();
    }
    finish(items);
    return good;
  }

  void finish(const std::vector<std::pair<size_t, Engine::Finished>>& items) {
    for (const auto& [number, item] : items) {
      workers_[number].finished(index_of(item));
      batch_.finished(item);
    }
  }

  // However the batch ends, what the engines have finished by then is kept. An engine may also fail
  // when nothing is left to answer.
  void end() {
    for (Worker& worker : workers_) worker.end();
    for (Worker& worker : workers_) worker.join();
    finish(outbox_.items);
    if (!outbox_.error.empty()) throw Error(outbox_.error);
  }

  Batch& batch_;
  Outbox outbox_;
  std::deque<Worker> workers_;  // after the outbox, which they use
};

}  // namespace

int64_t estimated_work(const Request& request, int32_t max_model_len) {
  int64_t tokens = 1;
  if (const auto* text = std::get_if<std::string>(&request.prompt)) {
    tokens = static_cast<int64_t>(text->size()) / 4 + 1;
  } else if (const auto* ids = std::get_if<std::vector<int32_t>>(&request.prompt)) {
    tokens = static_cast<int64_t>(ids->size());
  } else {
    for (const ChatMessage& message : std::get<std::vector<ChatMessage>>(request.prompt))
      tokens += static_cast<int64_t>(message.content.size()) / 4;
  }
  const SamplingParams& sampling = request.sampling;
  const int64_t room = std::max<int64_t>(max_model_len - tokens, 0);
  const int64_t generated = std::min<int64_t>(sampling.max_tokens.value_or(max_model_len), room);
  return tokens + kDecodeCost * generated * sampling.n;
}

void run_in_parallel(Batch& batch, std::span<Engine* const> engines) {
  Dealer(batch, engines).run();
}

}  // namespace mla
