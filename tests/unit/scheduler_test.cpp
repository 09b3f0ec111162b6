#include "lib/schedule/scheduler.h"

#include <string>
#include <utility>
#include <vector>

#include "lib/base/error.h"
#include "tests/support/catch.h"

namespace mla::test::scheduler_test {

namespace {

using mla::Scheduler;
using mla::SchedulerOptions;
using mla::SequenceState;
using mla::StepPlan;

std::vector<int32_t> prompt(int32_t length) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < length; ++i) tokens.push_back(100 + i);
  return tokens;
}

SchedulerOptions on(int32_t budget, int32_t max_seqs = 8) {
  return {.chunked = true,
          .max_batched_tokens = budget,
          .max_seqs = max_seqs,
          .max_model_len = 1000,
          .workspace_rows = 1024};
}

SchedulerOptions off(int32_t budget, int32_t max_seqs = 8) {
  SchedulerOptions options = on(budget, max_seqs);
  options.chunked = false;
  return options;
}

// Plans a step and commits token 7 for every sampled row.
StepPlan step(Scheduler& scheduler) {
  StepPlan plan = scheduler.next();
  scheduler.commit(plan, std::vector<int32_t>(plan.samples.size(), 7));
  return plan;
}

// The prompt chunks of a plan as pairs of context and new tokens.
std::vector<std::pair<int32_t, int32_t>> chunks(const StepPlan& plan) {
  std::vector<std::pair<int32_t, int32_t>> result;
  for (const mla::PrefillSpan& p : plan.prefill) result.emplace_back(p.context, p.q_len);
  return result;
}

using Chunks = std::vector<std::pair<int32_t, int32_t>>;

std::vector<int32_t> key_lens(const StepPlan& plan) {
  std::vector<int32_t> result;
  for (const mla::DecodeRow& d : plan.decode) result.push_back(d.key_len);
  return result;
}

std::vector<int64_t> sampled(const StepPlan& plan) {
  std::vector<int64_t> result;
  for (const mla::SampleRow& s : plan.samples) result.push_back(s.sequence);
  return result;
}

}  // namespace

TEST_CASE("The off mode takes whole prompts that fit together and then decodes") {
  Scheduler s(off(1000), 100);
  s.add(0, prompt(400), 10);
  s.add(1, prompt(600), 10);
  s.add(2, prompt(1), 10);
  StepPlan plan = step(s);
  CHECK(chunks(plan) == Chunks{{0, 400}, {0, 600}});
  CHECK(sampled(plan) == std::vector<int64_t>{0, 1});
  plan = step(s);
  CHECK(chunks(plan) == Chunks{{0, 1}});
  CHECK(plan.decode.empty());
  plan = step(s);
  CHECK(plan.prefill_rows == 0);
  CHECK(key_lens(plan) == std::vector<int32_t>{401, 601, 2});
  CHECK(s.stats().mixed_steps == 0);
  CHECK(s.stats().prefill_steps == 2);
  CHECK(s.stats().decode_steps == 1);
}

TEST_CASE("The on mode takes decodes first and cuts the last prompt") {
  Scheduler s(on(10), 100);
  s.add(0, prompt(4), 10);
  s.add(1, prompt(13), 10);
  StepPlan plan = step(s);
  CHECK(chunks(plan) == Chunks{{0, 4}, {0, 6}});
  CHECK(sampled(plan) == std::vector<int64_t>{0});
  CHECK(plan.samples[0].row == 3);
  CHECK(plan.samples[0].position == 4);
  s.add(2, prompt(5), 10);
  plan = step(s);
  CHECK(chunks(plan) == Chunks{{6, 7}, {0, 2}});
  CHECK(key_lens(plan) == std::vector<int32_t>{5});
  CHECK(plan.prefill_rows == 9);
  CHECK(sampled(plan) == std::vector<int64_t>{1, 0});
  CHECK(plan.passes.size() == 1);
  plan = step(s);
  CHECK(chunks(plan) == Chunks{{2, 3}});
  CHECK(key_lens(plan) == std::vector<int32_t>{6, 14});
  CHECK(s.stats().prompts_split == 2);
}

TEST_CASE("A last chunk of one token is a prompt token") {
  Scheduler s(on(64), 100);
  s.add(0, prompt(129), 10);
  CHECK(chunks(step(s)) == Chunks{{0, 64}});
  CHECK(chunks(step(s)) == Chunks{{64, 64}});
  const StepPlan plan = step(s);
  CHECK(chunks(plan) == Chunks{{128, 1}});
  CHECK(plan.decode.empty());
  CHECK(sampled(plan) == std::vector<int64_t>{0});
}

TEST_CASE("A budget of one runs one sequence at a time") {
  Scheduler s(on(1), 100);
  s.add(0, prompt(2), 1);
  s.add(1, prompt(1), 1);
  CHECK(step(s).samples.empty());
  CHECK(s.num_running() == 1);
  CHECK(sampled(step(s)) == std::vector<int64_t>{0});
  s.finish(0);
  CHECK(sampled(step(s)) == std::vector<int64_t>{1});
}

TEST_CASE("Slots follow the page table across pages") {
  Scheduler s(on(200), 100);
  s.add(0, prompt(70), 10);
  const StepPlan plan = step(s);
  const std::vector<int32_t>& pages = s.sequence(0).pages;
  REQUIRE(pages.size() == 2);
  CHECK(plan.page_table == pages);
  CHECK(plan.slots[63] == pages[0] * 64 + 63);
  CHECK(plan.slots[64] == pages[1] * 64);
  CHECK(plan.token_ids[69] == 169);
  CHECK(plan.positions[69] == 69);
}

TEST_CASE("Admission needs pages for the tokens and one page more unless nothing runs") {
  Scheduler s(on(1000), 4);
  s.add(0, prompt(128), 10);
  s.add(1, prompt(65), 10);
  step(s);
  CHECK(s.num_running() == 1);
  s.finish(0);
  s.add(2, prompt(64), 10);
  step(s);
  CHECK(s.num_running() == 2);
  s.finish(1);
  s.finish(2);
  s.add(3, prompt(246), 10);
  CHECK(chunks(step(s)) == Chunks{{0, 246}});
}

TEST_CASE("The latest is preempted and resumes its prompt and its generated tokens apart") {
  for (const bool chunked : {false, true}) {
    Scheduler s(chunked ? on(1000) : off(1000), 4);
    s.add(0, prompt(126), 100);
    s.add(1, prompt(10), 100);
    while (s.stats().preemptions == 0) step(s);  // the younger finds no page for position 64
    s.add(2, prompt(1), 10);
    step(s);
    CHECK(s.sequence(0).preemptions == 0);
    CHECK(s.sequence(1).state == SequenceState::waiting);
    CHECK(s.sequence(1).pages.empty());
    CHECK(s.num_waiting() == 2);  // nobody overtakes
    const int32_t size = s.sequence(1).size();
    s.finish(0);
    const StepPlan plan = step(s);
    CHECK(plan.prefill_ids == std::vector<int64_t>{1, 2});
    CHECK(chunks(plan) == Chunks{{0, 10}, {0, 1}});
    REQUIRE(plan.decode.size() == static_cast<size_t>(size - 10));
    CHECK(plan.decode[0].key_len == 11);
    CHECK(plan.decode.back().key_len == size);
    CHECK(sampled(plan) == std::vector<int64_t>{2, 1});
    CHECK(s.stats().preemptions == 1);
    CHECK(s.stats().recomputed_tokens == size - 1);
    CHECK(s.stats().prompts_split == 0);
    CHECK(s.sequence(1).prefill_chunks == 2);
    CHECK(s.sequence(1).first_pass_chunks == 1);
  }
}

TEST_CASE("An older sequence takes the pages of the latest and goes on in the same step") {
  Scheduler s(on(1000), 4);
  s.add(0, prompt(64), 100);
  s.add(1, prompt(64), 100);
  s.add(2, prompt(5), 100);
  CHECK(step(s).samples.size() == 3);
  CHECK(s.free_pages() == 1);
  const StepPlan plan = step(s);
  CHECK(sampled(plan) == std::vector<int64_t>{0, 1});
  CHECK(plan.rows() == 2);
  CHECK(s.sequence(2).preemptions == 1);
  CHECK(s.sequence(2).size() == 6);
  CHECK(s.free_pages() == 0);
}

TEST_CASE("The cap on decode splits leaves rows for later steps but never stops the first") {
  SchedulerOptions options = on(1000);
  options.max_decode_splits = 3;
  Scheduler s(options, 100);
  s.add(0, prompt(600), 10);  // three splits
  s.add(1, prompt(300), 10);  // two
  s.add(2, prompt(10), 10);   // one
  step(s);
  CHECK(key_lens(step(s)) == std::vector<int32_t>{601});
  s.finish(0);
  CHECK(key_lens(step(s)) == std::vector<int32_t>{301, 11});
  options.max_decode_splits = 1;
  Scheduler narrow(options, 100);
  narrow.add(0, prompt(600), 10);
  step(narrow);
  CHECK(key_lens(step(narrow)) == std::vector<int32_t>{601});
}

TEST_CASE("The splits of decode rows cover their keys once and in order") {
  Scheduler s(on(2000), 100);
  const std::vector<int32_t> lengths = {254, 255, 256, 511, 512, 1, 900};
  for (size_t i = 0; i < lengths.size(); ++i) s.add(static_cast<int64_t>(i), prompt(lengths[i]), 9);
  for (int i = 0; i < 2; ++i) step(s);
  StepPlan plan;
  while (plan.decode.size() < lengths.size()) plan = step(s);
  size_t next = 0;
  for (size_t d = 0; d < plan.decode.size(); ++d) {
    CHECK(plan.decode[d].split_begin == static_cast<int32_t>(next));
    for (int32_t i = 0; i * mla::kDecodeSplit < plan.decode[d].key_len; ++i) {
      REQUIRE(next < plan.decode_splits.size());
      CHECK(plan.decode_splits[next].row == static_cast<int32_t>(d));
      CHECK(plan.decode_splits[next++].split == i);
    }
  }
  CHECK(next == plan.decode_splits.size());
  size_t group = 0;
  for (const mla::DecodeSplit& split : plan.decode_splits) {
    if (split.split % mla::kDecodeGroup != 0) continue;
    REQUIRE(group < plan.decode_groups.size());
    CHECK(plan.decode_groups[group].row == split.row);
    CHECK(plan.decode_groups[group++].split == split.split);
  }
  CHECK(group == plan.decode_groups.size());
}

TEST_CASE("Requests that can never fit are errors with their numbers") {
  Scheduler s(on(10), 4);
  CHECK_THROWS_WITH(s.add(1, {}, 5), "the prompt is empty");
  CHECK_THROWS_WITH(s.add(1, prompt(1000), 5),
                    "the prompt has 1000 tokens, expected fewer than max_model_len "
                    "(1000)");
  CHECK_THROWS_WITH(s.add(1, prompt(200), 57),
                    "200 prompt tokens and 57 new ones need 5 pages of 64 tokens, the "
                    "pool has 4");
  CHECK_THROWS_AS(s.add(1, prompt(1), -1), mla::Error);
  CHECK_FALSE(s.has_work());
  s.add(1, prompt(200), 56);
  CHECK_THROWS_WITH(s.add(1, prompt(2), 5), "sequence 1: the id is in use already");
  CHECK(s.num_waiting() == 1);
}

TEST_CASE("Room is asked for at most max_model_len") {
  SchedulerOptions options = on(10);
  options.max_model_len = 128;
  Scheduler s(options, 2);
  s.add(0, prompt(100), 2147483647);
  CHECK(s.sequence(0).max_tokens == 128);
}

TEST_CASE("Options that cannot work are usage errors") {
  CHECK_THROWS_WITH(Scheduler(off(999, 33), 10),
                    "without chunked prefill a whole prompt runs in one step: expected "
                    "max_num_batched_tokens (999) to be at least max_model_len (1000), with "
                    "max_num_seqs 33");
  CHECK_NOTHROW(Scheduler(off(1000), 10));
  CHECK_NOTHROW(Scheduler(on(1), 10));
  CHECK_THROWS_AS(Scheduler(on(0), 10), mla::UsageError);
  CHECK_THROWS_AS(Scheduler(on(10, 0), 10), mla::UsageError);
  SchedulerOptions options = on(10);
  for (const int32_t rows : {0, -128, 100, 129}) {
    options.workspace_rows = rows;
    CHECK_THROWS_AS(Scheduler(options, 10), mla::UsageError);
  }
}

TEST_CASE("A sequence may be finished while it waits or runs or awaits its token") {
  Scheduler s(on(10, 1), 10);
  s.add(0, prompt(3), 5);
  s.add(1, prompt(3), 5);
  s.finish(1);
  const StepPlan plan = s.next();
  const StepPlan ahead = s.next();
  CHECK(s.next().empty());  // two tokens are not committed
  s.finish(0);
  s.commit(plan, {7});
  s.commit(ahead, {7});
  CHECK_FALSE(s.has_work());
  CHECK(s.free_pages() == 10);
  CHECK_THROWS_WITH(s.finish(0), "finish: there is no sequence 0");
  CHECK_THROWS_AS(s.sequence(0), mla::Error);
}

TEST_CASE("A plan made before the commit has the token's slot of the device for its id") {
  Scheduler s(on(10), 10);
  s.add(0, prompt(3), 3);
  s.add(1, prompt(2), 9);
  const StepPlan first = s.next();
  REQUIRE(first.samples.size() == 2);
  CHECK(first.samples[0].token_slot != first.samples[1].token_slot);
  const StepPlan second = s.next();
  REQUIRE(second.rows() == 2);
  CHECK(second.positions == std::vector<int32_t>{3, 2});
  for (size_t i = 0; i < 2; ++i) {
    CHECK(second.token_ids[i] == -1 - first.samples[i].token_slot);
    CHECK(second.samples[i].token_slot == first.samples[i].token_slot);
    CHECK(second.samples[i].position == first.samples[i].position + 1);
  }
  s.commit(first, {7, 8});
  const StepPlan third = s.next();
  CHECK(third.positions == std::vector<int32_t>{4, 3});
  s.commit(second, {9, 10});
  CHECK(s.next().positions == std::vector<int32_t>{4});  // 0 has three tokens on their way: all
  s.commit(third, {11, 12});
  CHECK(s.sequence(0).tokens == std::vector<int32_t>{100, 101, 102, 7, 9, 11});
  CHECK(s.sequence(1).tokens == std::vector<int32_t>{100, 101, 8, 10, 12});
}

TEST_CASE("A sequence preempted before its token is known waits for it at the head of the queue") {
  Scheduler s(on(1000), 4);
  s.add(0, prompt(64), 100);
  s.add(1, prompt(64), 100);
  s.add(2, prompt(5), 100);
  s.add(3, prompt(5), 1);
  const StepPlan first = s.next();
  CHECK(sampled(first) == std::vector<int64_t>{0, 1, 2});
  const StepPlan second = s.next();  // takes the page of 2
  CHECK(sampled(second) == std::vector<int64_t>{0, 1});
  CHECK(s.sequence(2).preemptions == 1);
  s.finish(0);
  s.finish(1);
  CHECK(s.next().empty());
  s.commit(first, {7, 7, 7});
  s.commit(second, {7, 7});
  const StepPlan third = s.next();
  CHECK(third.prefill_ids == std::vector<int64_t>{2, 3});
  CHECK(sampled(third) == std::vector<int64_t>{3, 2});
  CHECK(third.token_ids.back() == 7);
}

TEST_CASE("A token is appended once and only at its position") {
  Scheduler s(on(10), 10);
  s.add(0, prompt(3), 5);
  const StepPlan plan = s.next();
  CHECK_THROWS_WITH(s.commit(plan, {}), "commit: expected 1 tokens, one a sampled row, found 0");
  s.commit(plan, {7});
  s.commit(plan, {8});
  CHECK(s.sequence(0).tokens == std::vector<int32_t>{100, 101, 102, 7});
}

TEST_CASE("A sequence that has all its tokens is planned no more") {
  Scheduler s(on(10), 10);
  s.add(0, prompt(3), 0);
  CHECK(sampled(step(s)) == std::vector<int64_t>{0});
  CHECK(step(s).empty());
  CHECK(s.has_work());
  CHECK(s.stats().steps == 1);
}

TEST_CASE("A long queue costs a step nothing") {
  Scheduler s(on(2048, 1024), 100000);
  for (int64_t id = 0; id < 200000; ++id) s.add(id, {1, 2, 3}, 100);
  for (int i = 0; i < 50; ++i) step(s);
  CHECK(s.num_running() == 1024);
  CHECK(s.num_waiting() == 200000 - 1024);
}

}  // namespace mla::test::scheduler_test
