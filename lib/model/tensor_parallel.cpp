#include "lib/model/tensor_parallel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "lib/base/error.h"

namespace mla {
namespace {

template <class X>
bool same_bits(const std::vector<X>& a, const std::vector<X>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0);
}

// The ranks compute the same from the same sums: where they do not, nothing can be trusted.
template <class Output>
void check_agree(const std::vector<Output>& outputs, const char* what,
                 bool (*same)(const Output&, const Output&)) {
  for (size_t rank = 1; rank < outputs.size(); ++rank)
    if (!same(outputs[0], outputs[rank]))
      fail("ranks disagree: {} of rank {} are not the bits of rank 0", what, rank);
}

bool same_step(const StepOutput& a, const StepOutput& b) {
  return same_bits(a.tokens, b.tokens) && same_bits(a.logprobs, b.logprobs) &&
         same_bits(a.top_ids, b.top_ids) && same_bits(a.top_logprobs, b.top_logprobs);
}

bool same_rows(const ModelRunner::RowLogprobs& a, const ModelRunner::RowLogprobs& b) {
  return same_bits(a.logprobs, b.logprobs) && same_bits(a.top_ids, b.top_ids) &&
         same_bits(a.top_logprobs, b.top_logprobs);
}

}  // namespace

// What the threads use, and keep where one of them is left behind.
struct TensorParallelModel::Shared {
  // Of one rank, for its thread alone, but for `comm`. It goes from the bottom up: the backend's
  // graphs have recorded the communicator.
  struct Own {
    std::shared_ptr<Comm> comm;
    std::unique_ptr<Backend> backend;
    ModelWeights weights;
    std::unique_ptr<Model> model;
  };

  Shared(const ModelConfig& whole, Options o)
      : options(std::move(o)),
        config(rank_config(whole, options.size)),
        ranks(static_cast<size_t>(options.size)),
        loaded(static_cast<size_t>(options.size)),
        layers(static_cast<size_t>(options.size)) {}

  Own& at(int32_t rank) { return ranks[static_cast<size_t>(rank)]; }

  std::vector<std::shared_ptr<Comm>> comms() {
    const std::lock_guard lock(mutex);
    std::vector<std::shared_ptr<Comm>> all;
    for (const Own& rank : ranks)
      if (rank.comm) all.push_back(rank.comm);
    return all;
  }
  uint64_t signs() {
    uint64_t sum = total_loaded();
    for (const auto& comm : comms()) sum += comm->calls();
    for (const auto& computed : layers) sum += computed;
    return sum;
  }
  uint64_t total_loaded() const {
    uint64_t sum = 0;
    for (const auto& bytes : loaded) sum += bytes;
    return sum;
  }

  void clean_up(int32_t index) {
    Own& rank = at(index);
    rank.model.reset();
    rank.backend.reset();
    std::shared_ptr<Comm> comm;
    {
      const std::lock_guard lock(mutex);
      comm = std::move(rank.comm);
    }
  }

  const Options options;
  const ModelConfig config;  // of a rank
  std::mutex mutex;          // of Own::comm
  std::vector<Own> ranks;
  std::vector<std::atomic<uint64_t>> loaded;  // bytes, by rank
  std::vector<std::atomic<uint64_t>> layers;  // computed, by rank
  std::atomic<bool> stopped{false};
};

TensorParallelModel::TensorParallelModel(const ModelConfig& config, Options options)
    : shared_(std::make_shared<Shared>(config, std::move(options))) {
  const std::shared_ptr<Shared>& s = shared_;
  threads_ = std::make_unique<RankThreads>(
      s->options.size, RankThreads::Options{.timeout_seconds = s->options.timeout_seconds,
                                            .join_seconds = s->options.join_seconds,
                                            .signs = [s] { return s->signs(); },
                                            .stop =
                                                [s](const std::string& why) {
                                                  s->stopped = true;
                                                  for (const auto& comm : s->comms())
                                                    comm->abort(why);
                                                },
                                            .clean_up = [s](int32_t rank) { s->clean_up(rank); },
                                            .abandoned = s->options.abandoned});
  threads_->run([s](int32_t rank) { s->at(rank).backend = s->options.make_backend(rank); });
  threads_->run([s](int32_t rank) {
    std::shared_ptr<Comm> comm = s->options.make_comm(rank, *s->at(rank).backend);
    const std::lock_guard lock(s->mutex);
    s->at(rank).comm = std::move(comm);
  });
}

TensorParallelModel::~TensorParallelModel() = default;

void TensorParallelModel::load(const Load& weights, const StepLimits& limits,
                               const LoadProgress& progress) {
  const auto tick = [&] {
    if (progress) progress(shared_->total_loaded());
  };
  threads_->run(
      [s = shared_, weights, limits](int32_t index) {
        Shared::Own& rank = s->at(index);
        const auto loaded = [&](uint64_t bytes) {
          if (s->stopped) fail("loading was stopped");
          s->loaded[static_cast<size_t>(index)] = bytes;
        };
        rank.weights = weights({.index = index, .size = s->options.size}, *rank.backend, loaded);
        rank.model = std::make_unique<Model>(s->config, rank.weights, *rank.backend, limits,
                                             rank.comm.get());
        rank.model->count_layers(s->layers[static_cast<size_t>(index)]);
        rank.backend->synchronize();
      },
      tick);
  tick();
}

void TensorParallelModel::launch(const StepPlan& plan, const std::vector<RowSampling>& sampling) {
  if (in_flight_ == kMaxInFlight) fail("{} steps are on their way already", kMaxInFlight);
  struct Step {
    StepPlan plan;
    std::vector<RowSampling> sampling;
    std::vector<std::vector<LogitEdit>> edits;  // that `sampling` looks at
  };
  const auto step = std::make_shared<Step>(Step{plan, sampling, {}});
  step->edits.reserve(sampling.size());
  for (RowSampling& row : step->sampling)
    row.edits = step->edits.emplace_back(row.edits.begin(), row.edits.end());
  threads_->post(
      [s = shared_, step](int32_t rank) { s->at(rank).model->launch(step->plan, step->sampling); });
  ++in_flight_;
}

StepOutput TensorParallelModel::collect() {
  if (in_flight_ == 0) fail("no step is on its way");
  const auto outputs = std::make_shared<std::vector<StepOutput>>(shared_->ranks.size());
  threads_->run([s = shared_, outputs](int32_t rank) {
    (*outputs)[static_cast<size_t>(rank)] = s->at(rank).model->collect();
  });
  --in_flight_;
  check_agree(*outputs, "tokens or logprobs", same_step);
  return std::move(outputs->front());
}

ModelRunner::RowLogprobs TensorParallelModel::row_logprobs(std::span<const int32_t> rows,
                                                           std::span<const int32_t> tokens,
                                                           int32_t top) {
  const auto outputs = std::make_shared<std::vector<RowLogprobs>>(shared_->ranks.size());
  const std::vector<int32_t> of_rows(rows.begin(), rows.end());
  const std::vector<int32_t> of_tokens(tokens.begin(), tokens.end());
  threads_->run([s = shared_, outputs, of_rows, of_tokens, top](int32_t rank) {
    (*outputs)[static_cast<size_t>(rank)] =
        s->at(rank).model->row_logprobs(of_rows, of_tokens, top);
  });
  check_agree(*outputs, "logprobs of prompts", same_rows);
  return std::move(outputs->front());
}

void TensorParallelModel::set_clock() {
  threads_->run([s = shared_](int32_t rank) { s->at(rank).model->set_clock(); });
}

void TensorParallelModel::warm_up() {
  threads_->run([s = shared_](int32_t rank) { s->at(rank).model->warm_up(); });
}

std::string TensorParallelModel::communication() {
  const auto comms = shared_->comms();
  return comms.empty() ? "" : comms.front()->description();
}

uint64_t TensorParallelModel::memory_in_use() {
  const auto bytes = std::make_shared<std::vector<uint64_t>>(shared_->ranks.size());
  threads_->run([s = shared_, bytes](int32_t rank) {
    (*bytes)[static_cast<size_t>(rank)] = s->at(rank).backend->memory_in_use();
  });
  return *std::max_element(bytes->begin(), bytes->end());
}

}  // namespace mla
