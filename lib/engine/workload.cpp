#include "lib/engine/workload.h"

#include <array>
#include <charconv>
#include <chrono>
#include <random>

#include "lib/base/error.h"

namespace mla {
namespace {

constexpr std::array<const char*, 3> kKinds = {"prefill", "decode", "mixed"};
constexpr int32_t kMaxCount = 1 << 28;

int64_t total_steps(const EngineTimes& t) {
  return t.prefill.steps + t.decode.steps + t.mixed.steps;
}
double total_seconds(const EngineTimes& t) {
  return t.prefill.seconds + t.decode.seconds + t.mixed.seconds;
}

Request make_request(const Workload& workload, const Bench& bench, int64_t index,
                     std::mt19937_64& random) {
  std::vector<int32_t> tokens(static_cast<size_t>(workload.input_len));
  for (int32_t& token : tokens)
    token = static_cast<int32_t>(random() % static_cast<uint64_t>(bench.config.vocab_size));
  Request request{.index = index, .line = index + 1, .id = index + 1, .prompt = std::move(tokens)};
  request.sampling = bench.sampling;
  request.sampling.max_tokens = static_cast<int32_t>(workload.max_tokens());
  request.sampling.ignore_eos = true;
  return request;
}

}  // namespace

std::string Workload::name() const {
  std::string text = fmt::format("{}:{}x{}", kKinds[static_cast<size_t>(kind)], prompts, input_len);
  if (kind != WorkloadKind::prefill) text += fmt::format("x{}", output_len);
  return text;
}

Workload parse_workload(const std::string& text) {
  const auto wrong = [&](const std::string& expected) {
    usage_fail("workload '{}': expected {}", text, expected);
  };
  const size_t colon = text.find(':');
  Workload workload;
  size_t kind = 0;
  while (kind < kKinds.size() && text.substr(0, colon) != kKinds[kind]) ++kind;
  if (colon == std::string::npos || kind == kKinds.size())
    wrong("prefill:PROMPTSxINPUT, decode:BATCHxCONTEXTxOUTPUT or mixed:PROMPTSxINPUTxOUTPUT");
  workload.kind = static_cast<WorkloadKind>(kind);

  std::vector<int32_t*> numbers = {&workload.prompts, &workload.input_len};
  if (workload.kind != WorkloadKind::prefill) numbers.push_back(&workload.output_len);
  const char* at = text.data() + colon + 1;
  const char* const end = text.data() + text.size();
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0 && (at == end || *at++ != 'x'))
      wrong(fmt::format("{} numbers with x between them", numbers.size()));
    const auto [next, error] = std::from_chars(at, end, *numbers[i]);
    if (error != std::errc() || *numbers[i] < 1 || *numbers[i] > kMaxCount)
      wrong(fmt::format("{} numbers of 1 to {} with x between them", numbers.size(), kMaxCount));
    at = next;
  }
  if (at != end) wrong(fmt::format("{} numbers and nothing behind them", numbers.size()));
  return workload;
}

void check_fits(const Workload& w, const MemoryPlan& plan) {
  const StepLimits& limits = plan.limits;
  const std::string name = w.name();
  if (w.model_len() > limits.max_model_len)
    usage_fail("{} needs a max_model_len of {} ({} prompt tokens and {} generated), found {}", name,
               w.model_len(), w.input_len, w.max_tokens(), limits.max_model_len);
  const int64_t pages = pages_of(w.model_len());
  if (w.kind != WorkloadKind::decode) {
    if (pages > limits.num_pages)
      usage_fail("{} needs {} KV pages of {} tokens for a request, found {}", name, pages,
                 kPageTokens, limits.num_pages);
    return;
  }
  if (w.prompts > limits.max_seqs)
    usage_fail("{} needs a max_num_seqs of {}, found {} (max_num_batched_tokens {})", name,
               w.prompts, limits.max_seqs, limits.max_rows);
  // The scheduler admits a request beside others while a page is to spare.
  const int64_t needed =
      std::max(w.prompts * pages, w.prompts * pages_of(w.input_len) + (w.prompts > 1 ? 1 : 0));
  if (needed > limits.num_pages)
    usage_fail(
        "{} needs {} KV pages of {} tokens for all its sequences at once, found {}; raise "
        "--kv-cache-memory-bytes or --gpu-memory-utilization, or lower the batch",
        name, needed, kPageTokens, limits.num_pages);
  const int64_t splits =
      int64_t{w.prompts} * decode_splits(static_cast<int32_t>(w.input_len + w.output_len));
  if (splits > limits.max_decode_splits)
    usage_fail("{} needs {} decode splits of {} keys in a step, the plan has {}", name, splits,
               kDecodeSplit, limits.max_decode_splits);
}

Measured measure(const Workload& workload, const Bench& bench) {
  using Clock = std::chrono::steady_clock;
  Engine engine(bench.config, bench.model, bench.text, bench.plan, bench.seed, bench.pipelined);
  int64_t answered = 0;
  const Engine::Sink sink = [&](const Engine::Finished& item) {
    if (const auto* bad = std::get_if<BadLine>(&item))
      fail("{}: request {}: {}", workload.name(), bad->line, bad->message);
    const auto tokens = std::get<Result>(item).completion_tokens();
    if (tokens != workload.max_tokens())
      fail("{}: expected {} tokens of a request, found {}", workload.name(), workload.max_tokens(),
           tokens);
    ++answered;
  };
  std::mt19937_64 random(bench.seed);
  for (int64_t i = 0; i < workload.prompts; ++i)
    engine.add(make_request(workload, bench, i, random), sink);

  std::deque<Work> launched;  // of the steps that are not collected yet
  engine.observe([&](const StepPlan& plan) { launched.push_back(bench.counter.step(plan)); });
  const bool decode = workload.kind == WorkloadKind::decode;
  Measured m;
  double step_seconds = 0, host_seconds = 0, engine_seconds = 0;
  const auto start = Clock::now();
  while (engine.has_work()) {
    const EngineTimes before = engine.times();
    engine.step(sink);
    const EngineTimes& after = engine.times();
    const bool collected = total_steps(after) > total_steps(before);
    bool counts = !decode;
    if (collected && decode)
      counts = after.decode.steps > before.decode.steps &&
               after.decode.decode_rows - before.decode.decode_rows == workload.prompts;
    if (counts) {
      engine_seconds += after.total_seconds - before.total_seconds;
      host_seconds +=
          after.total_seconds - before.total_seconds - (after.model_seconds - before.model_seconds);
    }
    if (!collected) continue;
    const Work work = launched.front();
    launched.pop_front();
    if (!counts) {
      ++m.steps_apart;
      continue;
    }
    ++m.steps;
    m.work += work;
    m.limit_seconds += limit_seconds(work, bench.peaks);
    step_seconds += total_seconds(after) - total_seconds(before);
  }
  const double wall = std::chrono::duration<double>(Clock::now() - start).count();
  if (answered != workload.prompts)
    fail("{}: expected {} results, found {}", workload.name(), workload.prompts, answered);
  if (m.steps == 0)
    fail(
        "{}: no step decoded all {} sequences: the first ended before the last had its prompt; "
        "raise the output length, the token budget, or use --chunked-prefill off",
        workload.name(), workload.prompts);

  m.seconds = decode ? step_seconds : wall;
  m.tokens =
      int64_t{workload.prompts} * (decode                                 ? m.steps
                                   : workload.kind == WorkloadKind::mixed ? workload.model_len()
                                                                          : workload.input_len);
  m.preemptions = engine.scheduler_stats().preemptions;
  m.host_share = engine_seconds > 0 ? std::max(0.0, host_seconds / engine_seconds) : 0;
  return m;
}

}  // namespace mla
