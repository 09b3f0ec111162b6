// A rank that fails, hangs or computes something else ends the run with its number, within a bound.
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "kernels/comm/thread_comm.h"
#include "lib/base/error.h"
#include "tests/e2e/bit_contract.h"
#include "tests/support/error_text.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/gate.h"

namespace mla::test::rank_faults_test {
namespace {

enum class Fault { throws, hangs, hangs_behind_gather, other_logits };

// A rank's end of a group with a fault in its call number `at`.
class FaultyComm final : public Comm {
 public:
  FaultyComm(std::shared_ptr<Comm> comm, Fault fault, uint64_t at, std::shared_ptr<Gate> gate)
      : Comm(comm->rank(), comm->size()),
        comm_(std::move(comm)),
        fault_(fault),
        at_(at),
        gate_(std::move(gate)) {}

  std::string name() const override { return comm_->name(); }
  void abort(const std::string& why) override { comm_->abort(why); }

 private:
  void reduce(void* data, int64_t count, void* scratch) override {
    if (calls() == at_ && fault_ == Fault::throws) fail("an ECC error");
    if (calls() == at_ && fault_ == Fault::hangs) gate_->pass();
    comm_->all_reduce(data, count, scratch);
  }
  void gather(const float* local, float* all, int64_t count) override {
    comm_->all_gather(local, all, count);
    if (calls() >= at_ && fault_ == Fault::hangs_behind_gather) gate_->pass();
    if (calls() >= at_ && fault_ == Fault::other_logits) all[0] += 100;
  }

  std::shared_ptr<Comm> comm_;
  Fault fault_;
  uint64_t at_;
  std::shared_ptr<Gate> gate_;
};

struct Setup {
  TempDir dir;
  std::unique_ptr<LoadedModel> loaded;
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  bool abandoned = false;

  Setup() {
    write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir.path() + "/m");
    loaded = std::make_unique<LoadedModel>(dir / "m", DType::f32, 1, BackendKind::cpu, 2);
  }
  // A rank that was left behind ends before what it looks at.
  ~Setup() {
    gate->let_go();
    for (int i = 0; i < 2000 && gate.use_count() > 1; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  TensorParallelModel::Options options(Fault fault, uint64_t at) {
    TensorParallelModel::Options o = loaded->rank_options();
    o.make_comm = [comms = make_thread_comms(2, DType::f32, 0.5), fault, at, g = gate](
                      int32_t rank, Backend&) -> std::shared_ptr<Comm> {
      if (rank == 0) return comms[0];
      return std::make_shared<FaultyComm>(comms[1], fault, at, g);
    };
    o.timeout_seconds = 0.5;
    o.join_seconds = 0.5;
    o.abandoned = [this] { abandoned = true; };
    return o;
  }

  // What requests through the engine end with, and how many were answered before.
  std::string run(Fault fault, uint64_t at, int* answered) {
    const MemoryPlan plan = plan_for(*loaded, {.max_seqs = 2});
    return error_text([&] {
      TensorParallelModel model(loaded->config, options(fault, at));
      model.load(loaded->rank_load(), plan.limits, {});
      model.warm_up();
      Engine engine(loaded->config, model, {}, plan, 0, true);
      const Engine::Sink sink = [&](const Engine::Finished&) { ++*answered; };
      for (int i = 0; i < 8; ++i) {
        Request request;
        request.index = i;
        request.id = i;
        request.prompt = std::vector<int32_t>{5, 6, 7 + i};
        request.sampling.max_tokens = 4;
        request.sampling.ignore_eos = true;
        engine.add(std::move(request), sink);
      }
      while (engine.has_work()) engine.step(sink);
    });
  }
};

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Its layers take 0.8 s each.
class SlowBackend : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  void rope_cache(const RopeCacheParams& p) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
    ForwardingBackend::rope_cache(p);
  }
};

// Three layers: seven collectives a step. The first two requests end in step 4.
constexpr uint64_t kInStepSix = 5 * 7 + 3;

TEST_CASE("Without a fault all requests are answered") {
  Setup s;
  int answered = 0;
  CHECK(s.run(Fault::throws, 1 << 30, &answered) == "(no error)");
  CHECK(answered == 8);
  CHECK(!s.abandoned);
}

// As of -dp without -tp: there are no collectives that would show that it goes on.
TEST_CASE("A step of a single rank may take longer than the bound, as its layers do not") {
  TempDir dir;
  write_synthetic_checkpoint(source_path("tests/data/expected/lite_yarn"), dir.path() + "/m");
  LoadedModel loaded(dir / "m", DType::f32, 1, BackendKind::cpu, 1);
  TensorParallelModel::Options options = loaded.rank_options();
  options.make_backend = [make = options.make_backend](int32_t rank) {
    return std::make_unique<SlowBackend>(make(rank));
  };
  options.timeout_seconds = 1.2;  // a look now and then makes 1.6 of it
  const MemoryPlan plan = plan_for(loaded, {.max_seqs = 1});
  TensorParallelModel model(loaded.config, options);
  model.load(loaded.rank_load(), plan.limits, {});
  Engine engine(loaded.config, model, {}, plan, 0, true);
  int answered = 0;
  const Engine::Sink sink = [&](const Engine::Finished&) { ++answered; };
  Request request;
  request.id = 0;
  request.prompt = std::vector<int32_t>{5, 6, 7};
  request.sampling.max_tokens = 1;
  engine.add(std::move(request), sink);
  const double seconds = seconds_of([&] {
    while (engine.has_work()) engine.step(sink);
  });
  CHECK(answered == 1);
  CHECK(seconds > 2.3);
}

TEST_CASE("A rank that throws in a step ends the run with its number and message") {
  Setup s;
  int answered = 0;
  std::string text;
  const double seconds = seconds_of([&] { text = s.run(Fault::throws, kInStepSix, &answered); });
  CHECK(text == "rank 1: an ECC error");
  CHECK(answered == 2);
  CHECK(!s.abandoned);
  CHECK(seconds < 20);
}

TEST_CASE("A rank that hangs before a collective ends the run within the bound") {
  Setup s;
  int answered = 0;
  std::string text;
  const double seconds = seconds_of([&] { text = s.run(Fault::hangs, kInStepSix, &answered); });
  CHECK(text == "rank 0: all-reduce: rank 1 did not join it within 0.5 s");
  CHECK(answered == 2);
  CHECK(s.abandoned);
  CHECK(seconds >= 0.5);
  CHECK(seconds < 20);
}

TEST_CASE("A rank that hangs where no other waits for it ends the run within the bound") {
  Setup s;
  int answered = 0;
  std::string text;
  const double seconds =
      seconds_of([&] { text = s.run(Fault::hangs_behind_gather, kInStepSix, &answered); });
  INFO(text);
  // By the engine's wait or, where a step was planned ahead, by the next collective.
  CHECK((text == "rank 1 did not answer within 0.5 s" ||
         text == "rank 0: all-reduce: rank 1 did not join it within 0.5 s"));
  CHECK(s.abandoned);
  CHECK(seconds < 20);
}

TEST_CASE("Ranks that sample from different logits are found at once") {
  Setup s;
  int answered = 0;
  const std::string text = s.run(Fault::other_logits, kInStepSix, &answered);
  CHECK(text == "ranks disagree: tokens or logprobs of rank 1 are not the bits of rank 0");
  CHECK(answered == 2);
}

TEST_CASE("A rank that cannot be made or loaded is named") {
  Setup s;
  TensorParallelModel::Options options = s.options(Fault::throws, 1 << 30);
  options.make_backend = [make = options.make_backend](int32_t rank) {
    if (rank == 1) fail("the KV cache: 5 bytes could not be allocated");
    return make(rank);
  };
  CHECK(error_text([&] { TensorParallelModel(s.loaded->config, options); }) ==
        "rank 1: the KV cache: 5 bytes could not be allocated");

  TensorParallelModel model(s.loaded->config, s.options(Fault::throws, 1 << 30));
  const StepLimits limits = plan_for(*s.loaded, {}).limits;
  const auto load = [real = s.loaded->rank_load()](Rank rank, Backend& to,
                                                   const LoadProgress& progress) {
    if (rank.index == 0) fail("lm_head.weight: the file ends");
    return real(rank, to, progress);
  };
  CHECK(error_text([&] { model.load(load, limits, {}); }) ==
        "rank 0: lm_head.weight: the file ends");
  CHECK(error_text([&] { model.warm_up(); }) == "rank 0: lm_head.weight: the file ends");
}

TEST_CASE("What progress throws while ranks load passes and none is left behind") {
  Setup s;
  const StepLimits limits = plan_for(*s.loaded, {}).limits;
  const auto slow = [](Rank, Backend&, const LoadProgress& progress) -> ModelWeights {
    for (uint64_t i = 1;; ++i) {
      progress(i);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  const std::string text = error_text([&] {
    TensorParallelModel model(s.loaded->config, s.options(Fault::throws, 1 << 30));
    model.load(slow, limits, [](uint64_t bytes) {
      if (bytes > 10) fail("interrupted");
    });
  });
  CHECK(text == "interrupted");
  CHECK(!s.abandoned);
}

}  // namespace
}  // namespace mla::test::rank_faults_test
