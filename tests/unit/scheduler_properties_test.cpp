// Random workloads against a simulated model: the checks of a plan, step by step, and the same text
// for every mode, budget, workspace and pool.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "lib/base/error.h"
#include "lib/schedule/scheduler.h"
#include "tests/support/catch.h"

namespace mla::test::scheduler_properties_test {

namespace {

using mla::kDecodeSplit;
using mla::kKeyTile;
using mla::kPageTokens;
using mla::Scheduler;
using mla::SchedulerOptions;
using mla::Sequence;
using mla::StepPlan;

void expect(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  // A number of [low, high]. std::uniform_int_distribution differs between libraries.
  int32_t in(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(engine_() % static_cast<uint32_t>(high - low + 1));
  }
  bool one_in(int32_t n) { return in(1, n) == 1; }
  template <class T>
  T any(const std::vector<T>& of) {
    return of[static_cast<size_t>(in(0, static_cast<int32_t>(of.size()) - 1))];
  }

 private:
  std::mt19937 engine_;
};

struct Request {
  std::vector<int32_t> prompt;
  int32_t max_new = 1;
  int32_t arrival = 0;     // the step before which it is added
  int32_t cancelled = -1;  // the step in which it is taken away, -1: never
  mla::PrefixReuse reuse = mla::PrefixReuse::none;
};

struct Case {
  SchedulerOptions options;
  int32_t pages = 0;
  bool lag = false;  // commit comes after the next plan, which has rows of unknown tokens
  std::vector<Request> requests;
};

// The model: the next token is a hash of all tokens before it.
uint64_t fold(uint64_t hash, int32_t token) {
  return (hash ^ static_cast<uint64_t>(token)) * 0x9e3779b97f4a7c15u + (hash >> 29);
}
int32_t token_of(uint64_t hash) { return static_cast<int32_t>((hash >> 33) % 997); }
bool stops(int32_t token) { return token % 499 == 0; }

int32_t max_tokens_of(const Request& r, const SchedulerOptions& o) {
  return std::min(static_cast<int32_t>(r.prompt.size()) + r.max_new, o.max_model_len);
}

bool ended(const std::vector<int32_t>& tokens, const Request& r, const SchedulerOptions& o) {
  return tokens.size() > r.prompt.size() &&
         (static_cast<int32_t>(tokens.size()) >= max_tokens_of(r, o) || stops(tokens.back()));
}

// What the request gives without any scheduler.
std::vector<int32_t> alone(const Request& r, const SchedulerOptions& o) {
  std::vector<int32_t> tokens = r.prompt;
  uint64_t hash = 1;
  for (const int32_t t : tokens) hash = fold(hash, t);
  while (!ended(tokens, r, o)) {
    tokens.push_back(token_of(hash));
    hash = fold(hash, tokens.back());
  }
  return tokens;
}

void check_passes(const StepPlan& plan, int32_t workspace) {
  std::vector<int32_t> reached(plan.prefill.size(), 0);
  int32_t next_span = 0;
  int32_t last_request = 0;
  for (size_t p = 0; p < plan.passes.size(); ++p) {
    const mla::Pass& pass = plan.passes[p];
    expect(pass.span_begin == next_span, "passes follow each other");
    expect(pass.span_end > pass.span_begin, "no pass is empty");
    next_span = pass.span_end;
    int32_t rows = 0;
    std::set<int32_t> seen;
    for (int32_t i = pass.span_begin; i < pass.span_end; ++i) {
      const mla::KeySpan& s = plan.key_spans.at(static_cast<size_t>(i));
      const mla::PrefillSpan& r = plan.prefill.at(static_cast<size_t>(s.prefill));
      expect(s.prefill >= last_request, "requests are taken in order");
      last_request = s.prefill;
      expect(seen.insert(s.prefill).second, "one span a request in a pass");
      expect(s.key_begin == reached[static_cast<size_t>(s.prefill)], "keys in order, each once");
      expect(s.key_end > s.key_begin, "no span is empty");
      expect(s.key_begin % kKeyTile == 0, "a span begins at a key tile");
      expect(s.key_end % kKeyTile == 0 || s.key_end == r.context + r.q_len,
             "a span ends at a key tile or with the request");
      expect(s.workspace_row == rows, "workspace rows are packed");
      rows += s.key_end - s.key_begin;
      reached[static_cast<size_t>(s.prefill)] = s.key_end;
    }
    expect(rows == pass.rows && rows <= workspace, "the rows of a pass fit the workspace");
    expect(p + 1 == plan.passes.size() || rows > workspace - kKeyTile,
           "a pass that is not the last leaves less than a tile unused");
  }
  expect(next_span == static_cast<int32_t>(plan.key_spans.size()), "every span is in a pass");
  for (size_t i = 0; i < reached.size(); ++i) {
    expect(reached[i] == plan.prefill[i].context + plan.prefill[i].q_len, "all keys are covered");
  }
}

class Simulation {
 public:
  explicit Simulation(const Case& c)
      : case_(c),
        scheduler_(c.options, c.pages),
        cache_(static_cast<size_t>(c.pages) * kPageTokens),
        token_slots_(static_cast<size_t>(c.options.max_seqs), -1) {}

  // The tokens of each request at its end.
  std::vector<std::vector<int32_t>> run() {
    results_.resize(case_.requests.size());
    arrive();
    const int64_t limit = step_limit();
    StepPlan late;
    while (scheduler_.has_work() || added_ < case_.requests.size()) {
      expect(step_ < limit, "the number of steps is bounded");
      arrive();
      StepPlan plan = next();
      cancel();
      if (case_.lag) std::swap(plan, late);
      commit(plan);
      ++step_;
    }
    commit(late);
    expect(scheduler_.free_pages() == case_.pages, "all pages come back");
    expect(scheduler_.num_running() == 0 && scheduler_.num_waiting() == 0, "nothing is left");
    return std::move(results_);
  }

  const mla::SchedulerStats& stats() const { return scheduler_.stats(); }
  int64_t unknown() const { return unknown_; }
  int64_t found() const { return found_; }  // prompt tokens that were not computed

 private:
  struct Cell {
    int64_t owner = -1;
    int32_t position = -1;
    int32_t token = -1;
    int32_t residence = -1;  // the owner's preemptions when it was written
    uint64_t prefix = 0;     // of a prompt token: a hash of the prompt up to it, else 0
  };
  struct Before {
    int32_t computed, preemptions, length;
    bool running;
  };

  // A step has a row or waits for an arrival or a commit. A preemption pays for a page that a new
  // token needs, and costs at most a whole sequence.
  int64_t step_limit() const {
    int64_t rows = 1, growths = 0, longest = 0, arrivals = 0;
    for (const Request& r : case_.requests) {
      rows += max_tokens_of(r, case_.options);
      growths += r.max_new / kPageTokens + 1;
      longest = std::max<int64_t>(longest, max_tokens_of(r, case_.options));
      arrivals = std::max<int64_t>(arrivals, r.arrival);
    }
    return (rows + growths * longest) * (case_.lag ? 2 : 1) + arrivals + 1;
  }

  void arrive() {
    while (added_ < case_.requests.size() && case_.requests[added_].arrival <= step_) {
      const Request& r = case_.requests[added_];
      scheduler_.add(static_cast<int64_t>(added_), r.prompt, r.max_new, r.reuse);
      prefixes_.emplace_back();
      uint64_t hash = 1;
      for (const int32_t token : r.prompt) prefixes_.back().push_back(hash = fold(hash, token));
      live_.insert(static_cast<int64_t>(added_++));
    }
  }

  void end(int64_t id) {
    results_[static_cast<size_t>(id)] = scheduler_.sequence(id).tokens;
    scheduler_.finish(id);
    live_.erase(id);
  }

  void cancel() {
    for (size_t i = 0; i < added_; ++i) {
      const auto id = static_cast<int64_t>(i);
      const int32_t at = case_.requests[i].cancelled;
      if (at >= 0 && at <= step_ && live_.contains(id)) end(id);
    }
  }

  StepPlan next() {
    std::map<int64_t, Before> before;
    int64_t oldest = -1;
    for (const int64_t id : live_) {
      const Sequence& s = scheduler_.sequence(id);
      before[id] = {s.computed, s.preemptions, s.length(), s.state == mla::SequenceState::running};
      if (oldest < 0 && s.state == mla::SequenceState::running) oldest = id;
    }
    StepPlan plan = scheduler_.next();
    expect(oldest < 0 || scheduler_.sequence(oldest).preemptions == before[oldest].preemptions,
           "the oldest is never preempted");
    expect(case_.lag || live_.empty() || !plan.empty(), "a step with work has rows");
    check_queue();
    check_sizes(plan);
    check_passes(plan, case_.options.workspace_rows);
    check_rows(plan, before);
    return plan;
  }

  void check_queue() {
    owner_.assign(static_cast<size_t>(case_.pages), -1);
    int32_t running = 0;
    bool waits = false;
    std::set<int32_t> slots;
    for (const int64_t id : live_) {
      const Sequence& s = scheduler_.sequence(id);
      expect(!(waits && s.state == mla::SequenceState::running), "the older ones run");
      waits = s.state == mla::SequenceState::waiting;
      running += waits ? 0 : 1;
      expect(!waits || (s.pages.empty() && s.computed == 0), "a waiting sequence holds nothing");
      expect(waits || (s.token_slot >= 0 && s.token_slot < case_.options.max_seqs &&
                       slots.insert(s.token_slot).second),
             "a running sequence has a token slot of its own");
      expect(s.in_flight <= (case_.lag ? 2 : 1), "few tokens are in flight");
      expect(s.length() <= s.max_tokens, "no token is sampled beyond the last one");
      for (const int32_t page : s.pages) {
        int64_t& owner = owner_.at(static_cast<size_t>(page));
        expect(owner == -1 || (shares(id) && shares(owner)), "only those that share have one page");
        owner = owner == -1 ? id : kShared;
      }
    }
    const int32_t most = std::min(case_.options.max_seqs, case_.options.max_batched_tokens);
    expect(running <= most && running == scheduler_.num_running(), "few enough run");
    const auto held =
        std::count_if(owner_.begin(), owner_.end(), [](int64_t o) { return o != -1; });
    expect(held + scheduler_.free_pages() == case_.pages, "no page is lost");
  }

  void check_sizes(const StepPlan& plan) const {
    const auto rows = static_cast<size_t>(plan.rows());
    expect(plan.rows() <= case_.options.max_batched_tokens, "the budget holds");
    expect(plan.positions.size() == rows && plan.slots.size() == rows, "one of each a row");
    expect(plan.prefill_ids.size() == plan.prefill.size(), "one id a span");
    expect(plan.decode.size() + static_cast<size_t>(plan.prefill_rows) == rows,
           "each row is of one kind");
    int64_t splits = 0;
    for (const mla::DecodeRow& d : plan.decode) {
      splits += (d.key_len + kDecodeSplit - 1) / kDecodeSplit;
    }
    expect(case_.options.max_decode_splits == 0 || plan.decode.size() <= 1 ||
               splits <= case_.options.max_decode_splits,
           "the splits hold");
    int64_t key_pages = 0;
    for (const mla::PrefillSpan& p : plan.prefill) key_pages += mla::pages_of(p.context + p.q_len);
    expect(plan.prefill.size() <= 1 || key_pages <= case_.pages, "the keys of prompts are bounded");
  }

  bool shares(int64_t id) const {
    return id == kShared || scheduler_.sequence(id).reuse != mla::PrefixReuse::none;
  }

  // The sequence whose page table begins at `table_begin`, which is its whole table. A generated
  // token's page is its own.
  const Sequence& sequence_at(const StepPlan& plan, const mla::DecodeRow& row) const {
    const auto page = static_cast<size_t>(row.table_begin + (row.key_len - 1) / kPageTokens);
    const int64_t owner = owner_.at(static_cast<size_t>(plan.page_table.at(page)));
    expect(owner >= 0, "the page table names pages that are held");
    return sequence_at(plan, owner, row.table_begin);
  }
  const Sequence& sequence_at(const StepPlan& plan, int64_t id, int32_t table_begin) const {
    const auto begin = static_cast<size_t>(table_begin);
    const Sequence& s = scheduler_.sequence(id);
    expect(begin + s.pages.size() <= plan.page_table.size(), "the page table is whole");
    expect(std::equal(s.pages.begin(), s.pages.end(), plan.page_table.begin() + table_begin),
           "the page table is the sequence's");
    return s;
  }

  void check_rows(const StepPlan& plan, const std::map<int64_t, Before>& before) {
    std::map<int64_t, int32_t> computed;  // what the rows seen so far have reached
    std::set<int64_t> written, plain_decodes;
    std::map<int64_t, int32_t> newest;  // the row of a sequence's last token
    int32_t row = 0;
    const auto take = [&](const Sequence& s, int32_t position) {
      const Before& was = before.at(s.id);
      const bool goes_on = was.running && was.preemptions == s.preemptions;
      const int32_t start = goes_on ? was.computed : position;
      if (!computed.contains(s.id) && !goes_on) {
        expect(position % kPageTokens == 0 && position < s.prompt_len, "whole pages are found");
        expect(position == 0 || s.reuse == mla::PrefixReuse::take, "by those that take them");
        found_ += position;
      }
      int32_t& reached = computed.try_emplace(s.id, start).first->second;
      const auto r = static_cast<size_t>(row);
      expect(position == reached++, "positions come once and in order");
      expect(position < was.length, "only tokens that are there or sampled");
      expect(plan.positions[r] == position, "the row's position");
      const int32_t id = plan.token_ids[r];
      const int32_t token = id < 0 ? token_slots_.at(static_cast<size_t>(-1 - id)) : id;
      expect(token == (position < s.size() ? s.tokens[static_cast<size_t>(position)]
                                           : drawn_.at({s.id, position})),
             "the row's token");
      unknown_ += id < 0;
      expect(position >= s.size() || id >= 0, "a token that is known is named");
      const int64_t slot =
          int64_t{s.pages.at(static_cast<size_t>(position / kPageTokens))} * kPageTokens +
          position % kPageTokens;
      expect(plan.slots[r] == slot, "the row's slot is its page table's");
      expect(written.insert(slot).second, "no slot is written twice");
      cache_.at(static_cast<size_t>(slot)) = {s.id, position, token, s.preemptions,
                                              prefix_of(s, position)};
      if (position + 1 == was.length) newest[s.id] = row;
      ++row;
    };
    for (size_t i = 0; i < plan.prefill.size(); ++i) {
      const mla::PrefillSpan& p = plan.prefill[i];
      const Sequence& s = sequence_at(plan, plan.prefill_ids[i], p.table_begin);
      expect(p.row_begin == row && p.q_len >= 1, "prompt rows follow each other");
      expect(p.context + p.q_len <= s.prompt_len, "prompt rows are prompt tokens");
      expect(case_.options.chunked ||
                 (p.context + p.q_len == s.prompt_len && (p.context == 0 || shares(s.id))),
             "the off mode takes whole prompts");
      for (int32_t t = 0; t < p.q_len; ++t) take(s, p.context + t);
    }
    expect(row == plan.prefill_rows, "prompt rows come first");
    int32_t splits = 0;
    for (const mla::DecodeRow& d : plan.decode) {
      const Sequence& s = sequence_at(plan, d);
      expect(d.split_begin == splits, "splits follow each other");
      for (int32_t i = 0; i * kDecodeSplit < d.key_len; ++i, ++splits) {
        const mla::DecodeSplit& split = plan.decode_splits.at(static_cast<size_t>(splits));
        expect(split.row == row - plan.prefill_rows && split.split == i, "every split of the row");
      }
      expect(d.key_len > s.prompt_len, "decode rows are generated tokens");
      if (!computed.contains(s.id) && d.key_len == before.at(s.id).length)
        plain_decodes.insert(s.id);
      take(s, d.key_len - 1);
    }
    expect(splits == static_cast<int32_t>(plan.decode_splits.size()), "no split is another's");
    expect(case_.options.chunked || plain_decodes.empty() || plan.prefill.empty(),
           "the off mode never mixes");
    for (const auto& [id, reached] : computed) {
      expect(scheduler_.sequence(id).computed == reached, "computed says what was planned");
    }
    check_tables(plan, computed.size());
    check_samples(plan, newest, before);
    read(plan);
  }

  void check_tables(const StepPlan& plan, size_t sequences) const {
    std::set<int32_t> tables;
    for (const mla::PrefillSpan& p : plan.prefill) tables.insert(p.table_begin);
    for (const mla::DecodeRow& d : plan.decode) tables.insert(d.table_begin);
    expect(tables.size() == sequences, "one page table a sequence");
    const std::set<int32_t> pages(plan.page_table.begin(), plan.page_table.end());
    for (const int32_t page : pages) {
      const auto times = std::count(plan.page_table.begin(), plan.page_table.end(), page);
      expect(times == 1 || owner_[static_cast<size_t>(page)] == kShared,
             "only a shared page stands twice in the page table");
    }
  }

  void check_samples(const StepPlan& plan, const std::map<int64_t, int32_t>& newest,
                     const std::map<int64_t, Before>& before) const {
    std::map<int64_t, int32_t> sampled;
    for (const mla::SampleRow& s : plan.samples) {
      expect(sampled.emplace(s.sequence, s.row).second, "one sample a sequence");
      expect(s.position == before.at(s.sequence).length, "the next token is sampled");
      expect(s.token_slot == scheduler_.sequence(s.sequence).token_slot, "into its own slot");
    }
    expect(sampled == newest, "exactly the rows of the newest tokens sample");
  }

  uint64_t prefix_of(const Sequence& s, int32_t position) const {
    return position < s.prompt_len
               ? prefixes_[static_cast<size_t>(s.id)][static_cast<size_t>(position)]
               : 0;
  }

  // All rows are written by now: every key must be there, of this sequence and this residence, or
  // of a prompt that is the same up to it.
  void read(const StepPlan& plan) {
    std::map<int64_t, uint64_t> hashes;
    const auto keys = [&](const Sequence& s, int32_t table_begin, int32_t count) {
      uint64_t hash = 1;
      for (int32_t k = 0; k < count; ++k) {
        const int64_t page = plan.page_table[static_cast<size_t>(table_begin + k / kPageTokens)];
        const Cell& cell = cache_[static_cast<size_t>(page * kPageTokens + k % kPageTokens)];
        const bool own = cell.owner == s.id && cell.residence == s.preemptions;
        const bool shared = s.reuse == mla::PrefixReuse::take && k < s.prompt_len;
        expect(cell.position == k && cell.prefix == prefix_of(s, k) && (own || shared),
               "a row's keys are written");
        hash = fold(hash, cell.token);
      }
      hashes[s.id] = hash;
    };
    for (size_t i = 0; i < plan.prefill.size(); ++i) {
      const mla::PrefillSpan& p = plan.prefill[i];
      keys(scheduler_.sequence(plan.prefill_ids[i]), p.table_begin, p.context + p.q_len);
    }
    for (const mla::DecodeRow& d : plan.decode)
      keys(sequence_at(plan, d), d.table_begin, d.key_len);
    for (const mla::SampleRow& s : plan.samples) {
      const int32_t token = token_of(hashes.at(s.sequence));
      drawn_[{s.sequence, s.position}] = token;
      token_slots_.at(static_cast<size_t>(s.token_slot)) = token;
    }
  }

  void commit(const StepPlan& plan) {
    std::vector<int32_t> tokens;
    for (const mla::SampleRow& s : plan.samples) {
      tokens.push_back(drawn_.at({s.sequence, s.position}));
    }
    scheduler_.commit(plan, tokens);
    for (const mla::SampleRow& s : plan.samples) {
      if (!live_.contains(s.sequence)) continue;
      const Request& r = case_.requests[static_cast<size_t>(s.sequence)];
      if (ended(scheduler_.sequence(s.sequence).tokens, r, case_.options)) end(s.sequence);
    }
  }

  const Case& case_;
  Scheduler scheduler_;
  std::vector<Cell> cache_;
  std::vector<int32_t> token_slots_;  // of the device
  int64_t unknown_ = 0;               // rows whose token was not committed yet
  int64_t found_ = 0;
  static constexpr int64_t kShared = -2;
  std::vector<int64_t> owner_;                   // of each page; -1: none, kShared: several
  std::vector<std::vector<uint64_t>> prefixes_;  // of each request's prompt
  std::set<int64_t> live_;
  std::map<std::pair<int64_t, int32_t>, int32_t> drawn_;
  std::vector<std::vector<int32_t>> results_;
  size_t added_ = 0;
  int64_t step_ = 0;
};

Case random_case(Random& random) {
  Case c;
  SchedulerOptions& o = c.options;
  o.chunked = random.one_in(2);
  o.max_model_len = random.any<int32_t>({3, 65, 130, 300, 300, 600});
  o.max_batched_tokens =
      o.chunked ? random.any<int32_t>({1, 2, 3, 16, 17, 63, 64, 65, 127, 128, 129, 251, 4096})
                : o.max_model_len + random.any<int32_t>({0, 1, 37, 1000});
  o.max_seqs = random.any<int32_t>({1, 2, 5, 5, 16, 100});
  o.workspace_rows = kKeyTile * random.any<int32_t>({1, 1, 2, 3, 100});
  o.max_decode_splits = random.any<int32_t>({0, 0, 1, 2, 3, 7, 40});
  c.pages = static_cast<int32_t>(mla::pages_of(o.max_model_len)) +
            random.any<int32_t>({0, 1, 2, 3, 4, 5, 1000});
  c.lag = random.one_in(2);
  o.prefix_caching = random.one_in(3);
  const bool shares = o.prefix_caching || random.one_in(4);
  int32_t arrival = 0;
  const int32_t count = random.in(1, 12);
  for (int32_t i = 0; i < count; ++i) {
    Request r;
    // Short prompts that grow far are what exhausts a pool.
    int32_t length = random.in(1, random.one_in(3) ? o.max_model_len - 1 : 2);
    if (random.one_in(4)) {  // near a multiple of what things are cut at
      const int32_t unit = random.any<int32_t>({kPageTokens, kKeyTile, o.max_batched_tokens});
      length = std::clamp(unit * random.in(1, 4) + random.in(-1, 1), 1, o.max_model_len - 1);
    }
    for (int32_t t = 0; t < length; ++t) r.prompt.push_back(random.in(0, 996));
    if (shares) {
      r.reuse = random.any<mla::PrefixReuse>({mla::PrefixReuse::none, mla::PrefixReuse::give,
                                              mla::PrefixReuse::take, mla::PrefixReuse::take,
                                              mla::PrefixReuse::take});
      // Few tokens, and few places where prompts part.
      const int32_t part = random.any<int32_t>({0, 64, 128, 130, 250, 1000});
      for (int32_t t = 0; t < length; ++t)
        r.prompt[static_cast<size_t>(t)] = t < part ? 7 : random.in(0, 996);
    }
    r.max_new = random.any<int32_t>({1, 2, 70, 200, 400});
    arrival += random.one_in(4) ? random.in(0, 20) : 0;
    r.arrival = arrival;
    if (random.one_in(15)) r.cancelled = arrival + random.in(0, 60);
    c.requests.push_back(r);
  }
  return c;
}

std::string describe(const Case& c) {
  const SchedulerOptions& o = c.options;
  return fmt::format(
      "{} B {} seqs {} len {} W {} splits {} pages {} lag {} prefixes {} requests {}",
      o.chunked ? "on" : "off", o.max_batched_tokens, o.max_seqs, o.max_model_len, o.workspace_rows,
      o.max_decode_splits, c.pages, c.lag, o.prefix_caching, c.requests.size());
}

// Runs the case and compares every request with what it gives alone.
mla::SchedulerStats run(const Case& c, int64_t* unknown = nullptr, int64_t* found = nullptr) {
  INFO(describe(c));
  try {
    Simulation simulation(c);
    const auto results = simulation.run();
    for (size_t i = 0; i < results.size(); ++i) {
      const Request& r = c.requests[i];
      std::vector<int32_t> expected = alone(r, c.options);
      if (r.cancelled >= 0) expected.resize(std::min(expected.size(), results[i].size()));
      expect(results[i] == expected, "the tokens are those of the request alone");
    }
    if (unknown) *unknown += simulation.unknown();
    if (found) *found += simulation.found();
    return simulation.stats();
  } catch (const std::exception& e) {
    FAIL("broken: " << e.what());
  }
  return {};
}

}  // namespace

TEST_CASE("Every random workload keeps the properties and gives the tokens of each request alone") {
  int64_t preemptions = 0, split = 0, mixed = 0, recomputed = 0, unknown = 0, found = 0;
  for (uint32_t seed = 1; seed <= 3000; ++seed) {
    INFO("seed " << seed);
    Random random(seed);
    const mla::SchedulerStats stats = run(random_case(random), &unknown, &found);
    preemptions += stats.preemptions;
    split += stats.prompts_split;
    mixed += stats.mixed_steps;
    recomputed += stats.recomputed_tokens;
  }
  // The workloads reach what they are made for.
  CHECK(preemptions > 500);
  CHECK(split > 1000);
  CHECK(mixed > 1000);
  CHECK(recomputed > 10000);
  CHECK(unknown > 10000);
  CHECK(found > 10000);
}

TEST_CASE("One workload gives the same tokens for every mode and budget and pool and workspace") {
  Random random(7);
  Case c;
  c.options.max_model_len = 400;
  c.options.max_seqs = 6;
  for (const int32_t length : {251, 252, 250, 1, 128, 129, 127, 64, 65, 200, 16, 17}) {
    Request r;
    for (int32_t t = 0; t < length; ++t) r.prompt.push_back(random.in(0, 996));
    r.max_new = 140;
    c.requests.push_back(r);
  }
  int64_t preemptions = 0;
  for (const bool chunked : {false, true}) {
    for (const int32_t budget : {1, 2, 16, 17, 64, 251, 400, 401, 4096}) {
      if (!chunked && budget < c.options.max_model_len) continue;
      for (const int32_t pages : {7, 8, 11, 100}) {
        for (const int32_t workspace : {128, 256, 4096}) {
          c.options.chunked = chunked;
          c.options.max_batched_tokens = budget;
          c.options.workspace_rows = workspace;
          c.pages = pages;
          for (const bool lag : {false, true}) {
            c.lag = lag;
            preemptions += run(c).preemptions;
          }
        }
      }
    }
  }
  CHECK(preemptions > 100);
}

TEST_CASE("Prompts around a multiple of the budget are cut into as many chunks as they need") {
  for (const int32_t budget : {1, 2, 16, 64, 100, 128, 251}) {
    for (int32_t k = 1; k <= 3; ++k) {
      for (int32_t delta = -1; delta <= 1; ++delta) {
        Case c;
        c.options = {true, budget, 4, 1000, 128, 0};
        c.pages = 20;
        Request r;
        r.prompt.assign(static_cast<size_t>(std::max(1, k * budget + delta)), 5);
        r.max_new = 1;
        c.requests.push_back(r);
        const auto length = static_cast<int32_t>(r.prompt.size());
        CHECK(run(c).chunks == (length + budget - 1) / budget);
      }
    }
  }
}

}  // namespace mla::test::scheduler_properties_test
