// mla-run inspect: is this checkpoint what its config says?
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "apps/mla_run/checkpoint_setup.h"
#include "apps/mla_run/commands.h"
#include "apps/mla_run/options.h"
#include "lib/base/error.h"
#include "lib/model/rope.h"
#include "lib/model/tensor_table.h"

namespace mla {
namespace {

void print_model(const ModelConfig& c) {
  fmt::print(
      "model: {} layers ({} dense, then experts), hidden {}, {} heads of {}+{} (q, k) and {} (v), "
      "latent {}, q_lora {}\n",
      c.num_layers, std::min(c.first_k_dense_replace, c.num_layers), c.hidden_size, c.num_heads,
      c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank,
      c.q_lora_rank ? std::to_string(c.q_lora_rank) : "none");
  if (c.first_k_dense_replace < c.num_layers)
    fmt::print(
        "experts: {} routed of width {}, {} a token, {} shared; routing {}\n", c.num_experts,
        c.moe_intermediate_size, c.num_experts_per_tok, c.num_shared_experts,
        c.group_limited ? fmt::format("{} of {} groups", c.topk_group, c.num_groups) : "greedy");
  fmt::print("vocabulary {}, positions {}, softmax scale {:.8f}{}\n", c.vocab_size,
             c.max_position_embeddings, softmax_scale(c), c.yarn ? ", YaRN" : "");
}

void print_names(const char* what, const std::vector<std::string>& names) {
  constexpr size_t kShown = 5;
  fmt::print("{}: {}\n", what, names.size());
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i) fmt::print("  {}\n", names[i]);
  if (names.size() > kShown) fmt::print("  and {} more\n", names.size() - kShown);
}

void print_total_size(const IndexReport& report) {
  if (report.total_size == 0) {
    fmt::print("the index has no total_size\n");
    return;
  }
  fmt::print(
      "total_size of the index: {} bytes, {}\n", report.total_size,
      report.size_agrees() ? "as expected" : fmt::format("expected {}", report.expected_bytes));
}

int inspect_index(const std::string& dir, const ModelConfig& config) {
  const std::vector<TensorEntry> table = tensor_table(config);
  const DType stored = config.stored_dtype();
  const IndexReport report =
      check_index(read_index(dir + "/model.safetensors.index.json"), tensor_specs(config), stored);
  fmt::print("expected {} tensors, {} parameters, {} bytes in {}\n", table.size(),
             total_parameters(table), report.expected_bytes, name_of(stored));
  print_names("missing from the index", report.missing);
  print_names("in the index, not expected", report.unexpected);
  print_total_size(report);
  // Extra tensors are a warning of a run; what is missing or of another size is not served.
  return report.missing.empty() && report.size_agrees() ? kExitOk : kExitFatal;
}

int inspect_files(const std::string& dir, const ModelConfig& config) {
  Checkpoint checkpoint = Checkpoint::open(dir);
  checkpoint.check(tensor_specs(config));
  print_warnings(checkpoint.warnings());
  fmt::print(
      "{} tensors in {} files, {} bytes, fingerprint {}: each expected tensor is there with its "
      "shape\n",
      checkpoint.num_tensors(), checkpoint.shard_paths().size(), checkpoint.total_bytes(),
      checkpoint.fingerprint());
  const TextFiles text = load_text_files(dir);
  if (!text.tokenizer) {
    fmt::print("no tokenizer.json: prompts are token ids\n");
  } else {
    fmt::print("tokenizer: {} ids, BOS {}, chat template {}\n", text.tokenizer->vocab_size(),
               text.tokenizer->add_bos() ? "added" : "not added",
               text.chat_template->usable() ? "DeepSeek-V2's" : "not usable");
  }
  return kExitOk;
}

}  // namespace

Command add_inspect(CLI::App& app) {
  struct Flags {
    std::string model;
    bool index_only = false;
  };
  auto flags = std::make_shared<Flags>();
  app.add_option("MODEL", flags->model, "Hugging Face directory of the checkpoint")->required();
  app.add_flag("--index-only", flags->index_only, "Check config.json and the index; open no shard");
  return [flags] {
    const ModelConfig config = load_config(flags->model);
    print_warnings(config.warnings);
    print_model(config);
    return flags->index_only ? inspect_index(flags->model, config)
                             : inspect_files(flags->model, config);
  };
}

}  // namespace mla
