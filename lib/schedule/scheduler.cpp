#include "lib/schedule/scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "lib/base/error.h"

namespace mla {
namespace {

bool older(const Sequence* a, const Sequence* b) { return a->id < b->id; }

void check(const SchedulerOptions& o) {
  if (o.max_batched_tokens < 1) {
    usage_fail("max_num_batched_tokens: expected at least 1, found {}", o.max_batched_tokens);
  }
  if (o.max_seqs < 1) usage_fail("max_num_seqs: expected at least 1, found {}", o.max_seqs);
  if (o.max_model_len < 2) {
    usage_fail("max_model_len: expected at least 2, found {}", o.max_model_len);
  }
  if (o.workspace_rows < kKeyTile || o.workspace_rows % kKeyTile != 0) {
    usage_fail("workspace tokens: expected a positive multiple of {}, found {}", kKeyTile,
               o.workspace_rows);
  }
  if (o.max_decode_splits < 0) {
    usage_fail("max_decode_splits: expected at least 0, found {}", o.max_decode_splits);
  }
  if (!o.chunked && o.max_batched_tokens < o.max_model_len) {
    usage_fail(
        "without chunked prefill a whole prompt runs in one step: expected max_num_batched_tokens "
        "({}) to be at least max_model_len ({}), with max_num_seqs {}",
        o.max_batched_tokens, o.max_model_len, o.max_seqs);
  }
}

SchedulerOptions checked(const SchedulerOptions& options) {
  check(options);
  return options;
}

// Writes the rows of a step behind those that are there.
class RowWriter {
 public:
  explicit RowWriter(StepPlan& plan) : plan_(plan) {}

  int32_t table(const Sequence& s) {
    const auto begin = static_cast<int32_t>(plan_.page_table.size());
    plan_.page_table.insert(plan_.page_table.end(), s.pages.begin(), s.pages.end());
    return begin;
  }

  void prompt(const Sequence& s, int32_t begin, int32_t end, int32_t table_begin) {
    plan_.prefill.push_back({plan_.rows(), end - begin, begin, table_begin});
    plan_.prefill_ids.push_back(s.id);
    for (int32_t p = begin; p < end; ++p) row(s, p);
  }

  void generated(const Sequence& s, int32_t begin, int32_t end, int32_t table_begin) {
    for (int32_t p = begin; p < end; ++p) {
      add_decode_row(plan_, p + 1, table_begin);
      row(s, p);
    }
  }

 private:
  void row(const Sequence& s, int32_t position) {
    const int64_t page = s.pages[static_cast<size_t>(position / kPageTokens)];
    plan_.token_ids.push_back(position < s.size() ? s.tokens[static_cast<size_t>(position)]
                                                  : -1 - s.token_slot);
    plan_.positions.push_back(position);
    plan_.slots.push_back(page * kPageTokens + position % kPageTokens);
    // Only the newest token of a sequence is followed by one that is not known yet.
    if (position + 1 == s.length())
      plan_.samples.push_back({plan_.rows() - 1, s.id, s.length(), s.token_slot});
  }

  StepPlan& plan_;
};

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, int32_t num_pages)
    : options_(checked(options)),
      max_running_(std::min(options.max_seqs, options.max_batched_tokens)),
      pool_(num_pages, options.prefix_caching) {
  for (int32_t slot = max_running_ - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

void Scheduler::add(int64_t id, std::vector<int32_t> tokens, int32_t max_new_tokens,
                    PrefixReuse reuse) {
  const auto prompt = static_cast<int64_t>(tokens.size());
  if (sequences_.contains(id)) fail("sequence {}: the id is in use already", id);
  if (prompt == 0) fail("the prompt is empty");
  if (max_new_tokens < 0) {
    fail("max_new_tokens: expected at least 0, found {}", max_new_tokens);
  }
  if (prompt >= options_.max_model_len) {
    fail("the prompt has {} tokens, expected fewer than max_model_len ({})", prompt,
         options_.max_model_len);
  }
  const auto max_tokens = static_cast<int32_t>(
      std::min<int64_t>(prompt + std::max(max_new_tokens, 1), options_.max_model_len));
  if (pages_of(max_tokens) > pool_.num_pages()) {
    fail("{} prompt tokens and {} new ones need {} pages of {} tokens, the pool has {}", prompt,
         max_tokens - prompt, pages_of(max_tokens), kPageTokens, pool_.num_pages());
  }
  Sequence& s = sequences_[id];
  s.id = id;
  s.tokens = std::move(tokens);
  s.prompt_len = static_cast<int32_t>(prompt);
  s.max_tokens = max_tokens;
  s.reuse = reuse;
  waiting_.insert(id);
}

StepPlan Scheduler::next() {
  Draft draft;
  draft.budget = options_.max_batched_tokens;
  draft.key_pages = pool_.num_pages();
  draft.splits = options_.max_decode_splits > 0 ? options_.max_decode_splits
                                                : std::numeric_limits<int64_t>::max();
  if (options_.chunked) draft_decodes(draft);
  draft_fills(draft);
  const bool decode_step = !options_.chunked && draft.work.empty();
  if (decode_step) draft_decodes(draft);

  StepPlan plan = write_plan(draft);
  for (const Work& w : draft.work) advance(w);
  for (const SampleRow& sample : plan.samples) ++sequences_.at(sample.sequence).in_flight;
  if (!plan.empty()) count(plan, decode_step);
  return plan;
}

bool Scheduler::Draft::allows_decode_row(int32_t key_len) const {
  return decode_splits(key_len) <= splits || !has_decode_rows;
}

bool Scheduler::Draft::allows_prompt(int32_t key_len) const {
  return pages_of(key_len) <= key_pages || !has_prompts;
}

// A preempted sequence is younger than the one that needs its pages and so has no row yet. It
// leaves running_ at the back.
void Scheduler::draft_decodes(Draft& draft) {
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& s = *running_[i];
    // The splits are asked first: nobody is preempted for a row that does not run.
    if (s.decodes() && draft.allows_decode_row(s.length()) && make_room(s)) take(s, draft);
  }
}

void Scheduler::draft_fills(Draft& draft) {
  for (Sequence* s : running_) {
    if (s->fills()) take(*s, draft);
  }
  admit(draft);
}

void Scheduler::admit(Draft& draft) {
  while (!waiting_.empty()) {
    Sequence& s = sequences_.at(*waiting_.begin());
    std::vector<int32_t> found;
    if (s.reuse == PrefixReuse::take)
      found = pool_.find_prefix({s.tokens.data(), static_cast<size_t>(s.prompt_len) - 1});
    if (!may_admit(s, found, draft)) return;
    pool_.share(found, s.pages);
    pool_.grow(s.pages, s.size());
    s.computed = static_cast<int32_t>(found.size()) * kPageTokens;
    if (s.high_water == 0) {
      s.cached_tokens = s.computed;
      stats_.cached_tokens += s.computed;
    }
    waiting_.erase(waiting_.begin());
    s.state = SequenceState::running;
    s.token_slot = free_slots_.back();
    free_slots_.pop_back();
    running_.insert(std::upper_bound(running_.begin(), running_.end(), &s, older), &s);
    take(s, draft);
  }
}

bool Scheduler::may_admit(const Sequence& s, const std::vector<int32_t>& found,
                          const Draft& draft) const {
  if (num_running() >= max_running_) return false;
  // Preempted before its token was known: it is computed anew when all its tokens are.
  if (s.in_flight > 0) return false;
  // With nothing running the whole pool is free, and add() has seen that the sequence fits it.
  const int32_t spare = running_.empty() ? 0 : 1;
  const auto shared = static_cast<int32_t>(found.size());
  const int64_t pages = pages_of(s.size()) - shared + pool_.free_among(found);
  if (pages + spare > pool_.free_pages()) return false;
  const int32_t rows = s.size() - shared * kPageTokens;
  const int32_t first = options_.chunked ? std::min(rows, draft.budget) : rows;
  return draft.budget >= (options_.chunked ? 1 : rows) &&
         draft.allows_prompt(std::min(shared * kPageTokens + first, s.prompt_len));
}

// As many pending tokens as the budget holds; of the generated ones, as many as the splits allow.
// They may share the step with the prompt: a step writes all its cache rows before it reads any.
void Scheduler::take(Sequence& s, Draft& draft) {
  const int32_t begin = s.computed;
  const int32_t limit = begin + std::min(s.pending(), draft.budget);
  int32_t end = std::clamp(s.prompt_len, begin, limit);
  if (begin < end) {
    if (!draft.allows_prompt(end)) return;
    draft.key_pages -= pages_of(end);
    draft.has_prompts = true;
    if (s.reuse != PrefixReuse::none)
      pool_.publish(s.pages, s.tokens, begin / kPageTokens, end / kPageTokens);
  }
  for (; end < limit; ++end) {
    if (!draft.allows_decode_row(end + 1)) break;
    draft.splits -= decode_splits(end + 1);
    draft.has_decode_rows = true;
  }
  if (end == begin) return;
  draft.budget -= end - begin;
  draft.work.push_back({&s, begin, end});
}

// Pages for the next token of a running sequence; false where it had to be preempted itself.
bool Scheduler::make_room(Sequence& s) {
  while (!pool_.grow(s.pages, s.computed + 1)) {
    Sequence* latest = running_.back();
    preempt(*latest);
    if (latest == &s) return false;
  }
  return true;
}

void Scheduler::preempt(Sequence& s) {
  running_.pop_back();
  leave(s);
  s.computed = 0;
  s.state = SequenceState::waiting;
  ++s.preemptions;
  ++stats_.preemptions;
  waiting_.insert(s.id);
}

// Gives back what a running sequence holds. Steps that are planned by now run before those that may
// get it.
void Scheduler::leave(Sequence& s) {
  pool_.release(s.pages);
  free_slots_.push_back(s.token_slot);
  s.token_slot = -1;
}

StepPlan Scheduler::write_plan(const Draft& draft) const {
  StepPlan plan;
  RowWriter writer(plan);
  std::vector<int32_t> tables;
  for (const Work& w : draft.work) {
    tables.push_back(writer.table(*w.sequence));
    const int32_t end = std::min(w.end, w.sequence->prompt_len);
    if (w.begin < end) writer.prompt(*w.sequence, w.begin, end, tables.back());
  }
  plan.prefill_rows = plan.rows();
  for (size_t i = 0; i < draft.work.size(); ++i) {
    const Work& w = draft.work[i];
    const int32_t begin = std::max(w.begin, w.sequence->prompt_len);
    if (begin < w.end) writer.generated(*w.sequence, begin, w.end, tables[i]);
  }
  cut_passes(plan, options_.workspace_rows);
  return plan;
}

void Scheduler::advance(const Work& w) {
  Sequence& s = *w.sequence;
  stats_.recomputed_tokens += std::max(0, std::min(w.end, s.high_water) - w.begin);
  if (w.begin < s.prompt_len) ++s.prefill_chunks;
  if (s.high_water < s.prompt_len && w.end > s.high_water) {
    ++s.first_pass_chunks;
    if (w.end >= s.prompt_len && s.first_pass_chunks > 1) ++stats_.prompts_split;
  }
  s.computed = w.end;
  s.high_water = std::max(s.high_water, w.end);
}

void Scheduler::count(const StepPlan& plan, bool decode_step) {
  const bool mixed = options_.chunked && plan.prefill_rows > 0 && !plan.decode.empty();
  const bool decodes = options_.chunked ? plan.prefill_rows == 0 : decode_step;
  ++stats_.steps;
  ++(mixed ? stats_.mixed_steps : decodes ? stats_.decode_steps : stats_.prefill_steps);
  stats_.passes += static_cast<int64_t>(plan.passes.size());
  stats_.chunks += static_cast<int64_t>(plan.prefill.size());
  stats_.prefill_tokens += plan.prefill_rows;
  stats_.decode_tokens += plan.rows() - plan.prefill_rows;
  stats_.max_running = std::max(stats_.max_running, num_running());
  stats_.peak_pages = std::max(stats_.peak_pages, pool_.num_pages() - pool_.free_pages());
}

void Scheduler::commit(const StepPlan& plan, const std::vector<int32_t>& tokens) {
  if (tokens.size() != plan.samples.size()) {
    fail("commit: expected {} tokens, one a sampled row, found {}", plan.samples.size(),
         tokens.size());
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto found = sequences_.find(plan.samples[i].sequence);
    if (found == sequences_.end()) continue;
    Sequence& s = found->second;
    if (s.size() != plan.samples[i].position) continue;
    s.tokens.push_back(tokens[i]);
    --s.in_flight;
  }
}

void Scheduler::finish(int64_t id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) fail("finish: there is no sequence {}", id);
  Sequence& s = found->second;
  if (s.state == SequenceState::running) {
    running_.erase(std::lower_bound(running_.begin(), running_.end(), &s, older));
    leave(s);
  } else {
    waiting_.erase(id);
  }
  sequences_.erase(found);
}

bool Scheduler::has_work() const { return !sequences_.empty(); }

const Sequence& Scheduler::sequence(int64_t id) const {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) fail("there is no sequence {}", id);
  return found->second;
}

int32_t Scheduler::num_waiting() const { return static_cast<int32_t>(waiting_.size()); }
int32_t Scheduler::num_running() const { return static_cast<int32_t>(running_.size()); }
int32_t Scheduler::free_pages() const { return pool_.free_pages(); }
const SchedulerStats& Scheduler::stats() const { return stats_; }
const SchedulerOptions& Scheduler::options() const { return options_; }

}  // namespace mla
