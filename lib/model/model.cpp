#include "lib/model/model.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "lib/model/graph_sizes.h"
#include "lib/model/rope.h"

namespace mla {
namespace {

// Of q_a_layernorm and kv_a_layernorm: DeepSeek's modelling code gives them its default, not the
// config's rms_norm_eps.
constexpr float kLatentNormEps = 1e-6f;

template <class X>
void copy(Backend& backend, X* to, const std::vector<X>& from) {
  if (!from.empty()) backend.upload(to, from.data(), from.size() * sizeof(X));
}

}  // namespace

Model::Model(const ModelConfig& config, const ModelWeights& weights, Backend& backend,
             const StepLimits& limits, Comm* comm)
    : c_(config),
      w_(weights),
      backend_(backend),
      limits_(limits),
      comm_(comm),
      softmax_scale_(softmax_scale(config)) {
  if (limits.ranks != (comm ? comm->size() : 1))
    fail("a model for {} ranks, {} communicate", limits.ranks, comm ? comm->size() : 1);
  static std::atomic<uint64_t> models{0};
  replay_keys_ = models++ << 32;
  const std::vector<float> table = rope_table(config, limits.max_model_len);
  rope_table_ = static_cast<float*>(backend.allocate(table.size() * sizeof(float), "RoPE table"));
  backend.upload(rope_table_, table.data(), table.size() * sizeof(float));
  slots_ = int64_t{limits.num_pages} * kPageTokens;
  cache_ = static_cast<std::byte*>(backend.allocate(
      static_cast<size_t>(slots_) * cache_bytes_per_token(config, backend.dtype()), "KV cache"));

  const ModelShape shape = model_shape(config, limits);
  void* scratch = nullptr;
  const auto carve = [&](Arena& arena) {
    plan_ = PlanBuffers::carve(arena, c_, limits_);
    work_ = WorkspaceBuffers::carve(arena, c_, limits_, backend_.dtype());
    a_ = ActivationBuffers::carve(arena, c_, limits_, backend_.dtype());
    scratch = arena.take(static_cast<int64_t>(backend_.scratch_bytes(shape)), 1);
  };
  Arena count;
  carve(count);
  Arena arena(backend.allocate(count.used(), "workspace and activations"), count.used());
  carve(arena);
  backend.use_scratch(scratch, shape);
  for (std::byte*& host : host_)
    host = static_cast<std::byte*>(
        backend.allocate_host(SampledOutput::bytes(limits_.max_seqs, kMaxTop)));
  if (limits_.graphs) graph_sizes_ = mla::graph_sizes(std::min(limits_.max_seqs, limits_.max_rows));
}

void* Model::row_at(void* base, int64_t first, int64_t width) const {
  return static_cast<std::byte*>(base) +
         first * width * static_cast<int64_t>(size_of(backend_.dtype()));
}

void Model::upload(const StepPlan& plan) {
  const auto checked = [&](auto* to, const auto& from, int64_t room, const char* what) {
    if (static_cast<int64_t>(from.size()) > room)
      fail("step plan: {} {}, expected at most {}", from.size(), what, room);
    copy(backend_, to, from);
  };
  checked(plan_.token_ids, plan.token_ids, limits_.max_rows, "rows");
  checked(plan_.positions, plan.positions, limits_.max_rows, "rows");
  checked(plan_.slots, plan.slots, limits_.max_rows, "rows");
  checked(plan_.page_table, plan.page_table, plan_.page_table_size, "page table entries");
  checked(plan_.prefill, plan.prefill, limits_.max_seqs, "prompts");
  checked(plan_.key_spans, plan.key_spans, plan_.max_key_spans, "key spans");
  checked(plan_.tiles, plan.tiles, plan_.max_tiles, "tiles");
  checked(plan_.decode, plan.decode, plan_.max_decode, "decode rows");
  checked(plan_.decode_splits, plan.decode_splits, plan_.max_splits, "decode splits");
  checked(plan_.decode_groups, plan.decode_groups, plan_.max_splits, "decode groups");
  const int32_t num_splits[2] = {static_cast<int32_t>(plan.decode_splits.size()),
                                 static_cast<int32_t>(plan.decode_groups.size())};
  backend_.upload(plan_.num_splits, num_splits, sizeof num_splits);
}

void Model::forward(const StepPlan& plan) {
  upload(plan);
  compute(plan);
}

void Model::stamp(int64_t which) {
  if (limits_.stamps) backend_.stamp(SampledOutput::at(a_.output, 0, 0).stamps + which);
}

void Model::set_clock() {
  using namespace std::chrono;
  const auto now = [] {
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
  };
  uint64_t* const at = SampledOutput::at(a_.output, 0, 0).stamps;
  backend_.synchronize();
  for (int i = 0; i < 4; ++i) {  // the quickest answer is the nearest one
    backend_.stamp(at);
    uint64_t device;
    backend_.download(&device, at, sizeof device);
    const int64_t ahead = now() - static_cast<int64_t>(device);
    clock_ahead_ = i == 0 ? ahead : std::min(clock_ahead_, ahead);
  }
}

void Model::compute(const StepPlan& plan) {
  stamp(0);
  const int64_t T = plan.rows();
  backend_.embed({.ids = plan_.token_ids,
                  .sampled = a_.sampled,
                  .table = w_.embedding,
                  .out = a_.residual,
                  .T = T});
  pending_delta_ = false;
  fused_ = comm_ && comm_->fuses(T, c_.hidden_size);
  turn_ = 0;
  for (int32_t i = 0; i < c_.num_layers; ++i) {
    const LayerWeights& w = w_.layers[static_cast<size_t>(i)];
    // hidden → delta (attention, dense) or residual (mixture); of several ranks → partial
    const auto normed = [&](const float* weight) {
      if (comm_ && pending_delta_) return reduce_add_norm(weight, T);
      add_norm(weight, pending_delta_, nullptr, a_.hidden, T);
    };
    normed(w.input_norm);
    attention(plan, w, i);
    pending_delta_ = true;
    normed(w.post_attention_norm);
    feed_forward(w, i, T);
    pending_delta_ = comm_ || !c_.is_moe(i);
    if (layers_) ++*layers_;
  }
  all_reduce(T);
}

void* Model::partial() const { return fused_ ? comm_->fused_partial(turn_) : a_.partial; }

void Model::reduce_add_norm(const float* weight, int64_t rows) {
  if (!fused_) {
    all_reduce(rows);
    return add_norm(weight, true, nullptr, a_.hidden, rows);
  }
  comm_->fused_add_norm(turn_++, {.residual = a_.residual,
                                  .delta = nullptr,
                                  .weight = weight,
                                  .rows = nullptr,
                                  .out = a_.hidden,
                                  .T = rows,
                                  .H = c_.hidden_size,
                                  .eps = c_.rms_norm_eps});
}

void Model::add_norm(const float* weight, bool delta, const int32_t* rows, void* out, int64_t T) {
  backend_.add_norm({.residual = a_.residual,
                     .delta = delta && !comm_ ? a_.delta : nullptr,
                     .delta_rounded = delta && comm_ ? a_.partial : nullptr,
                     .weight = weight,
                     .rows = rows,
                     .out = out,
                     .T = T,
                     .H = c_.hidden_size,
                     .eps = c_.rms_norm_eps});
}

void Model::all_reduce(int64_t rows) {
  if (!comm_) return;
  if (fused_) return comm_->fused_reduce(turn_++, a_.partial, rows, c_.hidden_size);
  comm_->all_reduce(a_.partial, rows * c_.hidden_size, a_.reduce_scratch);
}

void Model::attention(const StepPlan& plan, const LayerWeights& w, int32_t layer) {
  const int64_t T = plan.rows();
  const int32_t N = c_.num_heads, P = c_.qk_nope_head_dim, R = c_.qk_rope_head_dim;
  const int32_t L = c_.kv_lora_rank, V = c_.v_head_dim;
  const int64_t A = c_.q_lora_rank ? c_.q_lora_rank : c_.q_dim(), width = A + c_.kv_a_dim();
  void* cache =
      cache_ + layer * slots_ * c_.kv_a_dim() * static_cast<int64_t>(size_of(backend_.dtype()));

  backend_.linear({.x = a_.hidden, .w = w.qkv_a, .out = a_.qkv_a, .out_f32 = false, .T = T});
  void* q = a_.qkv_a;
  int64_t q_stride = width;
  if (c_.q_lora_rank) {
    backend_.norm({.x = a_.qkv_a,
                   .x_stride = width,
                   .weight = w.q_a_norm,
                   .out = a_.q_a,
                   .T = T,
                   .dim = c_.q_lora_rank,
                   .eps = kLatentNormEps});
    backend_.linear({.x = a_.q_a, .w = w.q_b, .out = a_.q, .out_f32 = false, .T = T});
    q = a_.q;
    q_stride = c_.q_dim();
  }
  // Every row of the step is in the cache before anything attends: keys come from there alone.
  backend_.rope_cache({.q = q,
                       .q_stride = q_stride,
                       .kv_a = row_at(a_.qkv_a, 1, A),
                       .kv_stride = width,
                       .norm_weight = w.kv_a_norm,
                       .rope_table = rope_table_,
                       .positions = plan_.positions,
                       .slots = plan_.slots,
                       .cache = cache,
                       .T = T,
                       .N = N,
                       .P = P,
                       .R = R,
                       .L = L,
                       .eps = kLatentNormEps});
  prefill_passes(plan, w, cache, q, q_stride);
  if (!plan.decode.empty())
    backend_.mla_decode({.q = row_at(q, plan.prefill_rows, q_stride),
                         .q_stride = q_stride,
                         .cache = cache,
                         .page_table = plan_.page_table,
                         .rows = plan_.decode,
                         .D = static_cast<int32_t>(plan.decode.size()),
                         .splits = plan_.decode_splits,
                         .groups = plan_.decode_groups,
                         .num_splits = plan_.num_splits,
                         .kv_b = w.kv_b,
                         .q_lat = a_.q_lat,
                         .o_lat = a_.o_lat,
                         .out = row_at(a_.attention, plan.prefill_rows, int64_t{N} * V),
                         .N = N,
                         .P = P,
                         .R = R,
                         .L = L,
                         .V = V,
                         .scale = softmax_scale_});
  backend_.linear({.x = a_.attention,
                   .w = w.o,
                   .out = comm_ ? partial() : a_.delta,
                   .out_f32 = !comm_,
                   .T = T});
}

void Model::prefill_passes(const StepPlan& plan, const LayerWeights& w, void* cache, const void* q,
                           int64_t q_stride) {
  for (const Pass& pass : plan.passes) {
    const KeySpan* spans = plan_.key_spans + pass.span_begin;
    const int32_t num_spans = pass.span_end - pass.span_begin;
    backend_.kv_up({.cache = cache,
                    .page_table = plan_.page_table,
                    .prefill = plan_.prefill,
                    .spans = spans,
                    .num_spans = num_spans,
                    .tiles = plan_.tiles + pass.key_tile_begin,
                    .num_tiles = pass.key_tile_end - pass.key_tile_begin,
                    .kv_b = w.kv_b,
                    .workspace = work_.kv,
                    .L = c_.kv_lora_rank,
                    .R = c_.qk_rope_head_dim});
    backend_.mla_prefill({.q = q,
                          .q_stride = q_stride,
                          .workspace = work_.kv,
                          .cache = cache,
                          .page_table = plan_.page_table,
                          .prefill = plan_.prefill,
                          .spans = spans,
                          .num_spans = num_spans,
                          .tiles = plan_.tiles + pass.query_tile_begin,
                          .num_tiles = pass.query_tile_end - pass.query_tile_begin,
                          .state_max = work_.state_max,
                          .state_sum = work_.state_sum,
                          .state_out = work_.state_out,
                          .out = a_.attention,
                          .N = c_.num_heads,
                          .P = c_.qk_nope_head_dim,
                          .R = c_.qk_rope_head_dim,
                          .L = c_.kv_lora_rank,
                          .V = c_.v_head_dim,
                          .scale = softmax_scale_});
  }
}

void Model::feed_forward(const LayerWeights& w, int32_t layer, int64_t T) {
  for (int64_t first = 0; first < T; first += kMlpSlice) {
    const int64_t rows = std::min<int64_t>(kMlpSlice, T - first);
    if (c_.is_moe(layer)) {
      mixture(w, first, rows);
    } else {
      dense(w, first, rows);
    }
  }
}

void Model::dense(const LayerWeights& w, int64_t first, int64_t rows) {
  const int64_t H = c_.hidden_size;
  backend_.gated_linear(
      {.x = row_at(a_.hidden, first, H), .w = w.gate_up, .out = a_.inner, .T = rows});
  void* delta = a_.delta + first * H;
  backend_.linear({.x = a_.inner,
                   .w = w.down,
                   .out = comm_ ? row_at(partial(), first, H) : delta,
                   .out_f32 = !comm_,
                   .T = rows});
}

void Model::mixture(const LayerWeights& w, int64_t first, int64_t rows) {
  const int64_t H = c_.hidden_size;
  const int32_t E = c_.num_experts, K = c_.num_experts_per_tok, S = c_.num_shared_experts;
  const void* hidden = row_at(a_.hidden, first, H);
  backend_.router({.x = hidden,
                   .gate = w.router,
                   .positions = plan_.positions + first,
                   .logits = a_.router_logits,
                   .ids = a_.expert_ids,
                   .weights = a_.expert_weights,
                   .T = rows,
                   .E = E,
                   .K = K,
                   .groups = c_.group_limited ? c_.num_groups : 1,
                   .kept_groups = c_.topk_group,
                   .scaling_factor = c_.routed_scaling_factor});
  backend_.experts({.x = hidden,
                    .ids = a_.expert_ids,
                    .gate_up = w.experts_gate_up,
                    .down = w.experts_down,
                    .inner = a_.inner,
                    .out = a_.expert_out,
                    .T = rows,
                    .E = E,
                    .K = K,
                    .S = S});
  backend_.combine({.expert_out = a_.expert_out,
                    .weights = a_.expert_weights,
                    .residual = row_at(a_.residual, first, H),
                    .sum = comm_ ? row_at(partial(), first, H) : nullptr,
                    .T = rows,
                    .H = H,
                    .K = K,
                    .S = S});
}

const float* Model::logits(std::span<const int32_t> rows) {
  const int64_t S = static_cast<int64_t>(rows.size());
  if (S > limits_.max_seqs) fail("logits of {} rows, expected at most {}", S, limits_.max_seqs);
  backend_.upload(plan_.sample_rows, rows.data(), rows.size_bytes());
  sampled_logits(S);
  return a_.logits;
}

void Model::sampled_logits(int64_t S) {
  add_norm(w_.final_norm, pending_delta_, plan_.sample_rows, a_.sampled_hidden, S);
  backend_.linear({.x = a_.sampled_hidden,
                   .w = w_.lm_head,
                   .out = comm_ ? a_.rank_logits : a_.logits,
                   .out_f32 = true,
                   .T = S});
  if (comm_) gather_logits(S);
}

void Model::gather_logits(int64_t S) {
  const int64_t width = w_.lm_head.rows;
  for (int64_t first = 0; first < S; first += kGatherRows) {
    const int64_t rows = std::min<int64_t>(kGatherRows, S - first);
    comm_->all_gather(a_.rank_logits + first * width, a_.all_logits, rows * width);
    backend_.join_columns({.parts = a_.all_logits,
                           .out = a_.logits + first * c_.vocab_size,
                           .rows = rows,
                           .width = width,
                           .cols = c_.vocab_size});
  }
}

void Model::sample(int64_t begin, int64_t end, int64_t rows, int64_t top) {
  const SampledOutput out = SampledOutput::at(a_.output, rows, top);
  backend_.sample({.logits = a_.logits + begin * c_.vocab_size,
                   .specs = plan_.specs + begin,
                   .edits = plan_.edits,
                   .tokens = out.tokens + begin,
                   .sampled = a_.sampled,
                   .logprobs = out.logprobs + begin,
                   .top_ids = out.top_ids + begin * top,
                   .top_logprobs = out.top_logprobs + begin * top,
                   .S = static_cast<int32_t>(end - begin),
                   .vocab = c_.vocab_size,
                   .max_top = static_cast<int32_t>(top)});
}

std::vector<Model::EditGroup> Model::upload(const StepPlan& plan,
                                            const std::vector<RowSampling>& sampling, int64_t S) {
  if (S > limits_.max_seqs)
    fail("step plan: {} sampled rows, expected at most {}", S, limits_.max_seqs);
  std::vector<int32_t> rows;
  std::vector<SampleSpec> specs;
  std::vector<EditGroup> groups(1);
  for (size_t i = 0; i < plan.samples.size(); ++i) {
    rows.push_back(plan.samples[i].row);
    specs.push_back(sampling[i].spec);
    SampleSpec& spec = specs.back();
    if (spec.num_top > kMaxTop)
      fail("{} top logprobs of a row, expected at most {}", spec.num_top, kMaxTop);
    spec.token_slot = plan.samples[i].token_slot;
    const auto& edits = sampling[i].edits;
    const auto room = static_cast<size_t>(plan_.max_edits);
    if (edits.size() > room)
      fail("{} logit edits of a row, expected at most {}", edits.size(), room);
    if (groups.back().edits.size() + edits.size() > room) {
      groups.back().end = static_cast<int64_t>(i);
      groups.emplace_back();
    }
    std::vector<LogitEdit>& list = groups.back().edits;
    spec.edit_begin = static_cast<int32_t>(list.size());
    list.insert(list.end(), edits.begin(), edits.end());
    spec.edit_end = static_cast<int32_t>(list.size());
  }
  groups.back().end = S;
  for (auto row = static_cast<int32_t>(rows.size()); row < S; ++row) {
    rows.push_back(row);
    specs.emplace_back();
  }
  copy(backend_, plan_.sample_rows, rows);
  copy(backend_, plan_.specs, specs);
  copy(backend_, plan_.edits, groups.front().edits);
  return groups;
}

void Model::replay(StepPlan plan, const std::vector<RowSampling>& sampling, int32_t size) {
  pad_decode_rows(plan, size);
  upload(plan);
  upload(plan, sampling, size);
  backend_.replay(replay_keys_ + static_cast<uint64_t>(size), [&] {
    compute(plan);
    sampled_logits(size);
    stamp(1);
    sample(0, size, size, kMaxTop);
    stamp(2);
  });
}

void Model::launch(const StepPlan& plan, const std::vector<RowSampling>& sampling) {
  if (sampling.size() != plan.samples.size())
    fail("{} sampled rows, {} ways to sample them", plan.samples.size(), sampling.size());
  if (in_flight_.size() == kMaxInFlight) fail("{} steps are on their way already", kMaxInFlight);
  // Every row of a step that is replayed samples: one that is computed anew may not.
  int64_t edits = 0;
  for (const RowSampling& row : sampling) edits += static_cast<int64_t>(row.edits.size());
  const bool plain = plan.prefill_rows == 0 && plan.samples.size() == plan.decode.size() &&
                     edits <= plan_.max_edits;
  const int32_t size = plain ? graph_size(graph_sizes_, plan.rows()) : 0;
  const auto wants_top = [](const RowSampling& row) { return row.spec.num_top; };
  const int32_t most =
      sampling.empty() ? 0 : std::ranges::max(sampling, {}, wants_top).spec.num_top;
  Launched step{.samples = sampling.size(), .has_top = most > 0};
  if (size > 0) {
    step.rows = size;
    step.top = kMaxTop;
    replay(plan, sampling, size);
  } else {
    step.rows = static_cast<int64_t>(sampling.size());
    step.top = most;
    upload(plan);
    const std::vector<EditGroup> groups = upload(plan, sampling, step.rows);
    compute(plan);
    if (step.rows > 0) sampled_logits(step.rows);
    stamp(1);
    int64_t begin = 0;
    for (const EditGroup& group : groups) {
      if (begin > 0) copy(backend_, plan_.edits, group.edits);
      if (group.end > begin) sample(begin, group.end, step.rows, step.top);
      begin = group.end;
    }
    stamp(2);
  }
  step.host = host_[launches_++ % kMaxInFlight];
  const size_t bytes = SampledOutput::bytes(step.rows, most ? step.top : 0);
  step.ticket = backend_.download_later(step.host, a_.output, bytes);
  in_flight_.push_back(step);
}

StepOutput Model::collect() {
  if (in_flight_.empty()) fail("no step is on its way");
  const Launched step = in_flight_.front();
  in_flight_.pop_front();
  backend_.wait(step.ticket);
  const size_t S = step.samples, top = static_cast<size_t>(step.top);
  const SampledOutput from = SampledOutput::at(step.host, step.rows, step.top);
  StepOutput out;
  if (limits_.stamps) {
    const auto at = [&](int which) {
      return static_cast<int64_t>(from.stamps[which]) + clock_ahead_;
    };
    out.stamps = {.begin = at(0), .logits = at(1), .tokens = at(2)};
  }
  out.tokens.assign(from.tokens, from.tokens + S);
  out.logprobs.assign(from.logprobs, from.logprobs + S);
  out.top_ids.resize(S * kMaxTop);
  out.top_logprobs.resize(S * kMaxTop);
  for (size_t i = 0; step.has_top && i < S; ++i) {
    std::copy_n(from.top_ids + i * top, top, out.top_ids.begin() + i * kMaxTop);
    std::copy_n(from.top_logprobs + i * top, top, out.top_logprobs.begin() + i * kMaxTop);
  }
  return out;
}

StepOutput Model::step(const StepPlan& plan, const std::vector<RowSampling>& sampling) {
  launch(plan, sampling);
  return collect();
}

void Model::warm_up() {
  // The largest first: the others then find all that a backend allocates on demand.
  for (size_t i = graph_sizes_.size(); i-- > 0;) replay({}, {}, graph_sizes_[i]);
  backend_.synchronize();
}

}  // namespace mla
