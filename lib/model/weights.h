// The weights of a DeepSeek-V2 model as the backend holds them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "lib/model/config.h"
#include "lib/model/shard.h"

namespace mla {

// Symbols as in kernels/ops.h, of a rank's share where there are several; A = q_dim, or q_lora_rank
// where there is one.
struct LayerWeights {
  const float* input_norm = nullptr;           // [H]
  Matrix qkv_a;                                // [A + L+R, H]: q_proj or q_a_proj, then kv_a_proj
  const float* q_a_norm = nullptr;             // [q_lora_rank] or null
  Matrix q_b;                                  // [q_dim, q_lora_rank]
  const float* kv_a_norm = nullptr;            // [L]
  Matrix kv_b;                                 // [N(P+V), L]
  Matrix o;                                    // [H, N·V]
  const float* post_attention_norm = nullptr;  // [H]
  // A dense layer:
  Matrix gate_up;  // [2·intermediate, H]
  Matrix down;     // [H, intermediate]
  // A mixture of experts; the shared MLP of width S·I is cut into S experts of width I.
  Matrix router;           // [E, H]
  Matrix experts_gate_up;  // E + S of [2·I, H]
  Matrix experts_down;     // E + S of [H, I]
};

struct ModelWeights {
  Matrix embedding;  // [vocab, H]
  std::vector<LayerWeights> layers;
  const float* final_norm = nullptr;  // [H]
  Matrix lm_head;                     // [vocab, H], of a rank [rank_extent(vocab, size), H]
};

// A tensor of the checkpoint by its name, [rows, cols] ([1, n] for a vector). Throws Error.
using TensorSource = std::function<HostTensor(const std::string& name)>;
// Called with the bytes of source tensors placed so far.
using LoadProgress = std::function<void(uint64_t bytes)>;

// Places every tensor of tensor_table(config) on the backend, of each only the rank's part, which
// is all that is read. `config` is the whole model's, here and below.
ModelWeights load_weights(const ModelConfig& config, Rank rank, Backend& backend,
                          const TensorSource& source, const LoadProgress& progress);

// Random weights instead of a checkpoint's: matrices normally distributed with deviation 0.02 (a
// function of the seed, the tensor and the place in it, so that ranks have parts of the same ones),
// norms 1. For measurements of speed. Progress is in elements.
ModelWeights dummy_weights(const ModelConfig& config, Rank rank, Backend& backend, uint64_t seed,
                           const LoadProgress& progress);

// Bytes that a rank's weights take on the backend, the same for all; `stored` is the dtype of the
// checkpoint. Throws Error past 2^62, and what the backend throws for sizes that it does not take.
size_t weight_bytes(const ModelConfig& config, Rank rank, const Backend& backend, DType stored);

// Bytes that load_weights reads.
uint64_t source_bytes(const ModelConfig& config, Rank rank, const TensorSource& source);

}  // namespace mla
