// The logits of one request that are changed before sampling: logit_bias, penalties, and the tokens
// that may not end it before min_tokens.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "kernels/ops.h"
#include "lib/batch/request.h"

namespace mla {

class LogitEdits {
 public:
  // `end_ids`: banned until end_bans(); distinct.
  LogitEdits(const SamplingParams& sampling, std::span<const int32_t> prompt,
             std::span<const int32_t> end_ids);

  // The token was generated.
  void add(int32_t token);
  void end_bans();

  // With penalties: the edits of a token's row are known only when all tokens before it are.
  bool follow_tokens() const { return follow_tokens_; }
  std::span<const LogitEdit> list() const { return list_; }

 private:
  LogitEdit& of(int32_t token);

  bool follow_tokens_;
  std::vector<LogitEdit> list_;
  std::unordered_map<int32_t, size_t> places_;     // in list_, by token
  std::vector<std::pair<int32_t, float>> banned_;  // end ids, and their biases without the ban
};

}  // namespace mla
