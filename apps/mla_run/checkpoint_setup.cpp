#include "apps/mla_run/checkpoint_setup.h"

#include <fmt/format.h>

#include <cstdio>

#include "apps/mla_run/options.h"
#include "lib/batch/hash.h"
#include "lib/model/tensor_table.h"

namespace mla {

std::vector<TensorSpec> tensor_specs(const ModelConfig& config) {
  std::vector<TensorSpec> specs;
  for (const TensorEntry& entry : tensor_table(config)) specs.push_back({entry.name, entry.shape});
  return specs;
}

DType widest_dtype(const Checkpoint& checkpoint, const ModelConfig& config) {
  for (const TensorEntry& entry : tensor_table(config))
    if (checkpoint.tensor(entry.name).dtype != DType::bf16) return DType::f32;
  return DType::bf16;
}

TensorSource tensor_source(const Checkpoint& checkpoint) {
  return [&checkpoint](const std::string& name) {
    const TensorView view = checkpoint.tensor(name);
    const int64_t cols = view.shape.back(), rows = view.shape.size() > 1 ? view.shape.front() : 1;
    return HostTensor{
        .data = view.data, .dtype = view.dtype, .rows = rows, .cols = cols, .row_stride = cols};
  };
}

TextFiles load_text_files(const std::string& model_dir) {
  TextFiles files;
  if (!has_entry(model_dir + "/tokenizer.json")) return files;
  files.tokenizer.emplace(Tokenizer::load(model_dir));
  files.chat_template.emplace(ChatTemplate::load(model_dir, files.tokenizer->chat_template(),
                                                 files.tokenizer->bos_text(),
                                                 files.tokenizer->eos_text()));
  return files;
}

OrderedJson hash_text_files(const std::string& model_dir) {
  OrderedJson hashes = OrderedJson::object();
  for (const char* name : {"config.json", "generation_config.json", "tokenizer.json",
                           "tokenizer_config.json", "chat_template.jinja"}) {
    const std::string path = model_dir + "/" + name;
    if (!has_entry(path)) continue;
    Sha256 hash;
    hash.update(read_file(path));
    hashes[name] = hash.hex().substr(0, 16);
  }
  return hashes;
}

void print_warnings(const std::vector<std::string>& warnings) {
  for (const std::string& warning : warnings) say("warning: {}\n", warning);
}

}  // namespace mla
