// Communication of ranks in threads.
#include "kernels/comm/thread_comm.h"

#include <chrono>
#include <functional>
#include <thread>

#include "lib/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace mla::comm_test {
namespace {

using test::error_text;
using Comms = std::vector<std::shared_ptr<Comm>>;

// What rank r says in call(r), each in its thread.
std::vector<std::string> on_ranks(const Comms& comms, const std::function<void(Comm&)>& call) {
  std::vector<std::string> texts(comms.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < comms.size(); ++r)
    threads.emplace_back([&, r] { texts[r] = error_text([&] { call(*comms[r]); }); });
  for (std::thread& thread : threads) thread.join();
  return texts;
}

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

constexpr double kLong = 60;

TEST_CASE("An all-reduce adds in order of ranks in fp32 and rounds once") {
  for (const int32_t size : {2, 3, 4}) {
    const Comms comms = make_thread_comms(size, DType::bf16, kLong);
    // Not exact in any order: large, small, large of the other sign …
    const auto value = [](int32_t rank, size_t i) {
      const float parts[] = {16777216.0f, 1.0f, -16777216.0f, 3.0f};
      return to_bf16(i == 0 ? parts[rank]
                            : static_cast<float>(rank + 1) * 0.37f + static_cast<float>(i) * 0.01f);
    };
    for (const size_t count : {size_t{1}, size_t{7}, size_t{1000}}) {
      std::vector<std::vector<bf16>> data(static_cast<size_t>(size));
      for (int32_t r = 0; r < size; ++r)
        for (size_t i = 0; i < count; ++i) data[static_cast<size_t>(r)].push_back(value(r, i));
      const auto texts = on_ranks(comms, [&](Comm& comm) {
        comm.all_reduce(data[static_cast<size_t>(comm.rank())].data(), static_cast<int64_t>(count),
                        nullptr);
      });
      for (int32_t r = 0; r < size; ++r) {
        INFO("rank " << r << " of " << size << ", " << count << " elements");
        CHECK(texts[static_cast<size_t>(r)] == "(no error)");
        for (size_t i = 0; i < count; ++i) {
          float sum = to_f32(value(0, i));
          for (int32_t other = 1; other < size; ++other) sum += to_f32(value(other, i));
          CHECK(data[static_cast<size_t>(r)][i] == to_bf16(sum));
        }
      }
    }
    // 2^24 + 1 is 2^24: in order of ranks the sum of the first is 0 or 3, from the end 4.
    if (size == 4) {
      std::vector<float> first(4);
      for (int32_t r = 0; r < 4; ++r) first[static_cast<size_t>(r)] = to_f32(value(r, 0));
      CHECK(((first[0] + first[1]) + first[2]) + first[3] !=
            ((first[3] + first[2]) + first[1]) + first[0]);
    }
  }
}

TEST_CASE("A sum in float32 is not rounded to bfloat16") {
  const Comms comms = make_thread_comms(2, DType::f32, kLong);
  std::vector<float> data[2] = {{1.0f}, {1e-6f}};
  on_ranks(comms, [&](Comm& comm) { comm.all_reduce(data[comm.rank()].data(), 1, nullptr); });
  CHECK(data[0][0] == 1.0f + 1e-6f);
  CHECK(data[1][0] == data[0][0]);
}

TEST_CASE("An all-gather has the parts by rank and calls may follow each other at once") {
  const Comms comms = make_thread_comms(3, DType::f32, kLong);
  const auto texts = on_ranks(comms, [&](Comm& comm) {
    for (int round = 0; round < 200; ++round) {
      const float mine = static_cast<float>(100 * round + comm.rank());
      const std::vector<float> local = {mine, mine + 0.5f};
      std::vector<float> all(6);
      comm.all_gather(local.data(), all.data(), 2);
      for (size_t r = 0; r < 3; ++r)
        if (all[2 * r] != static_cast<float>(100 * round) + static_cast<float>(r) ||
            all[2 * r + 1] != all[2 * r] + 0.5f)
          fail("round {}: part {} is {}", round, r, all[2 * r]);
      std::vector<float> sum = {mine};
      comm.all_reduce(sum.data(), 1, nullptr);
      if (sum[0] != static_cast<float>(300 * round + 3)) fail("round {}: sum {}", round, sum[0]);
    }
  });
  for (const std::string& text : texts) CHECK(text == "(no error)");
  CHECK(comms[0]->calls() == 400);
  CHECK(comms[1]->rank() == 1);
  CHECK(comms[1]->size() == 3);
  CHECK(comms[1]->name() == "threads");
}

TEST_CASE("A rank that does not come is named within the bound and the group is over") {
  const Comms comms = make_thread_comms(3, DType::f32, 0.2);
  std::vector<std::string> texts;
  const double seconds = seconds_of([&] {
    texts = on_ranks(comms, [](Comm& comm) {
      float x = 1;
      if (comm.rank() != 1) comm.all_reduce(&x, 1, nullptr);
    });
  });
  CHECK(seconds >= 0.19);
  CHECK(seconds < 5);
  for (const size_t r : {0, 2})
    CHECK(texts[r] == "all-reduce: rank 1 did not join it within 0.2 s");
  float x = 1;
  CHECK(error_text([&] { comms[1]->all_reduce(&x, 1, nullptr); }) == texts[0]);
}

TEST_CASE("An abort wakes the ranks that wait") {
  const Comms comms = make_thread_comms(2, DType::f32, kLong);
  std::vector<std::string> texts;
  const double seconds = seconds_of([&] {
    texts = on_ranks(comms, [](Comm& comm) {
      float x = 1, all[2];
      if (comm.rank() == 0) comm.all_gather(&x, all, 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      comm.abort("rank 1: out of luck");
    });
  });
  CHECK(seconds < 10);
  CHECK(texts[0] == "rank 1: out of luck");
  float x = 1;
  CHECK(error_text([&] { comms[1]->all_reduce(&x, 1, nullptr); }) == "rank 1: out of luck");
}

TEST_CASE("Ranks that make different calls are told") {
  const Comms comms = make_thread_comms(2, DType::f32, kLong);
  float x[2] = {};
  const auto counts =
      on_ranks(comms, [&](Comm& comm) { comm.all_reduce(&x[comm.rank()], comm.rank(), nullptr); });
  for (const std::string& text : counts)
    CHECK(text ==
          "ranks disagree: rank 0 came to all-reduce of 0 elements, rank 1 to all-reduce of 1");
  CHECK(error_text([] { make_thread_comms(1, DType::f32, 1); }) ==
        "threads that communicate: expected at least 2, found 1");
}

TEST_CASE("Two ranks need no scratch to add and more a chunk of each") {
  CHECK(reduce_scratch(1, 1000) == 0);
  CHECK(reduce_scratch(2, 1000) == 0);
  CHECK(reduce_scratch(4, 1000) == 4000);
  CHECK(reduce_scratch(4, int64_t{1} << 40) == 4 * kReduceChunk);
}

}  // namespace
}  // namespace mla::comm_test
