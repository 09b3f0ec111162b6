// Writes safetensors files and checkpoints, good and broken, for tests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mla::test {

struct TensorData {
  std::string name;
  std::string dtype;  // "BF16", "F32" …, written as it stands
  std::vector<int64_t> shape;
  std::string bytes;  // little-endian
};

// Little-endian bytes of values: rounded to bfloat16, or as they are.
std::string bf16_bytes(const std::vector<float>& values);
std::string f32_bytes(const std::vector<float>& values);
std::string f16_bytes(const std::vector<uint16_t>& bits);

// A whole file: tensors in their order, without gaps. `padding` spaces follow the header.
std::string safetensors_bytes(const std::vector<TensorData>& tensors, size_t padding = 0);
// A whole file from a header and data that need not fit together.
std::string safetensors_bytes(std::string_view header, std::string_view data);

void write_file(const std::string& path, std::string_view bytes);
std::string read_whole(const std::string& path);

struct ShardData {
  std::string file;
  std::vector<TensorData> tensors;
};

// The shards and model.safetensors.index.json in an existing directory.
void write_checkpoint(const std::string& dir, const std::vector<ShardData>& shards);

// An index from (tensor, file) pairs as they stand; no metadata where total_size is negative.
std::string index_json(const std::vector<std::pair<std::string, std::string>>& weight_map,
                       int64_t total_size);

}  // namespace mla::test
