// Opening a model directory: what run, eval, bench, plan and inspect share.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "kernels/ops.h"
#include "lib/base/json.h"
#include "lib/model/config.h"
#include "lib/model/weights.h"
#include "lib/text/chat_template.h"
#include "lib/text/tokenizer.h"
#include "weights_loader/checkpoint.h"

namespace mla {

// tensor_table(config) as the loader wants it.
std::vector<TensorSpec> tensor_specs(const ModelConfig& config);

// The widest dtype of the checkpoint's tensors: what the backend will store in a float32 run.
DType widest_dtype(const Checkpoint& checkpoint, const ModelConfig& config);

// Reads tensors by name from the checkpoint, which must outlive it.
TensorSource tensor_source(const Checkpoint& checkpoint);

struct TextFiles {
  std::optional<Tokenizer> tokenizer;  // absent without tokenizer.json
  std::optional<ChatTemplate> chat_template;
};
TextFiles load_text_files(const std::string& model_dir);

// Name to the first 16 hex digits of the SHA-256 of each file beside the weights that answers
// depend on: config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
// chat_template.jinja; those that are there.
OrderedJson hash_text_files(const std::string& model_dir);

// "warning: …" lines on stderr.
void print_warnings(const std::vector<std::string>& warnings);

}  // namespace mla
