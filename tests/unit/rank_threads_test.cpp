// Threads of ranks: order, failures, ranks that hang. Nothing waits for ever.
#include "lib/model/rank_threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "lib/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/gate.h"

namespace mla::rank_threads_test {
namespace {

using test::error_text;
using test::Gate;

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST_CASE("Jobs run in order on a thread a rank, which cleans up at its end") {
  std::vector<int> seen[3];
  std::set<std::thread::id> ids;
  std::thread::id first[3], last[3];
  {
    RankThreads ranks(3, {.clean_up = [&](int32_t rank) {
                        seen[rank].push_back(-1);
                        last[rank] = std::this_thread::get_id();
                      }});
    CHECK(ranks.size() == 3);
    for (int job = 0; job < 100; ++job)
      ranks.post([&, job](int32_t rank) {
        seen[rank].push_back(job);
        first[rank] = std::this_thread::get_id();
      });
    ranks.run([](int32_t) {});
    for (const auto& jobs : seen) CHECK(jobs.size() == 100);
  }
  for (int rank = 0; rank < 3; ++rank) {
    REQUIRE(seen[rank].size() == 101);
    for (int job = 0; job < 100; ++job) CHECK(seen[rank][static_cast<size_t>(job)] == job);
    CHECK(seen[rank].back() == -1);
    CHECK(first[rank] == last[rank]);
    ids.insert(first[rank]);
  }
  CHECK(ids.size() == 3);
}

TEST_CASE("A rank that throws ends the others' waiting and is named in every later call") {
  const auto gate = std::make_shared<Gate>();
  std::string stopped;
  {
    RankThreads ranks(3, {.stop = [&, gate](const std::string& why) {
                        stopped = why;
                        gate->let_go();  // as an aborted collective does
                      }});
    const std::string text = error_text([&] {
      ranks.run([gate](int32_t rank) {
        if (rank == 1) fail("the disk is gone");
        gate->pass();
        fail("a consequence");
      });
    });
    CHECK(text == "rank 1: the disk is gone");
    CHECK(error_text([&] { ranks.post([](int32_t) {}); }) == text);
    CHECK(error_text([&] { ranks.run([](int32_t) {}); }) == text);
  }
  CHECK(stopped == "rank 1: the disk is gone");
}

TEST_CASE("A rank that hangs is named within the bound and left behind") {
  const auto gate = std::make_shared<Gate>();
  std::atomic<bool> abandoned{false};
  const auto cleaned = std::make_shared<std::atomic<int>>(0);
  const double seconds = seconds_of([&] {
    RankThreads ranks(2, {.timeout_seconds = 0.3,
                          .join_seconds = 0.2,
                          .clean_up = [cleaned](int32_t) { ++*cleaned; },
                          .abandoned = [&] { abandoned = true; }});
    CHECK(error_text([&] {
            ranks.run([gate](int32_t rank) {
              if (rank == 1) gate->pass();
            });
          }) == "rank 1 did not answer within 0.3 s");
  });
  CHECK(seconds >= 0.3);
  CHECK(seconds < 5);
  CHECK(abandoned);
  // What rank 1 may still look at is there.
  CHECK(*cleaned == 0);
  gate->let_go();
  for (int i = 0; i < 1000 && *cleaned == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(*cleaned == 1);
}

TEST_CASE("Signs of life and jobs that end put the bound off") {
  std::atomic<uint64_t> signs{0};
  RankThreads ranks(2, {.timeout_seconds = 0.4, .signs = [&] { return signs.load(); }});
  const auto slow = [&](int32_t rank) {
    for (int i = 0; i < 15; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      if (rank == 0) ++signs;
    }
  };
  CHECK(error_text([&] { ranks.run(slow); }) == "(no error)");
  // Jobs of 0.3 s each, all waited for at the end.
  uint64_t last = 0;
  for (int i = 0; i < 4; ++i)
    last = ranks.post([](int32_t) { std::this_thread::sleep_for(std::chrono::milliseconds(300)); });
  CHECK(error_text([&] { ranks.wait(last); }) == "(no error)");
}

TEST_CASE("What a waiting thread's tick throws passes and the ranks end") {
  const auto gate = std::make_shared<Gate>();
  std::atomic<bool> abandoned{false};
  {
    RankThreads ranks(2, {.stop = [gate](const std::string&) { gate->let_go(); },
                          .abandoned = [&] { abandoned = true; }});
    int ticks = 0;
    CHECK(error_text([&] {
            ranks.run([gate](int32_t) { gate->pass(); },
                      [&] {
                        if (++ticks == 3) fail("interrupted");
                      });
          }) == "interrupted");
  }
  CHECK(!abandoned);
}

TEST_CASE("No rank cleans up while the ranks are told to stop") {
  std::atomic<bool> telling{false};
  std::atomic<int> early{0}, cleaned{0};
  {
    RankThreads::Options options;
    options.join_seconds = 20;
    options.stop = [&](const std::string&) {
      telling = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      telling = false;
    };
    options.clean_up = [&](int32_t) {
      early += telling ? 1 : 0;
      ++cleaned;
    };
    RankThreads threads(3, options);
    const auto failing = [](int32_t rank) {
      if (rank == 1) fail("told to");
    };
    CHECK_THROWS_AS(threads.run(failing), Error);
  }
  CHECK(early == 0);
  CHECK(cleaned == 3);
}

}  // namespace
}  // namespace mla::rank_threads_test
