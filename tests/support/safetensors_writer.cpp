#include "tests/support/safetensors_writer.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lib/base/dtype.h"

namespace mla::test {
namespace {

using OrderedJson = nlohmann::ordered_json;

template <class T>
std::string raw_bytes(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace

std::string bf16_bytes(const std::vector<float>& values) {
  std::vector<bf16> rounded;
  for (const float value : values) rounded.push_back(to_bf16(value));
  return raw_bytes(rounded);
}

std::string f32_bytes(const std::vector<float>& values) { return raw_bytes(values); }

std::string f16_bytes(const std::vector<uint16_t>& bits) { return raw_bytes(bits); }

std::string safetensors_bytes(const std::vector<TensorData>& tensors, size_t padding) {
  OrderedJson header = OrderedJson::object();
  header["__metadata__"] = {{"format", "pt"}};
  std::string data;
  for (const TensorData& tensor : tensors) {
    const size_t begin = data.size();
    data += tensor.bytes;
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return safetensors_bytes(header.dump() + std::string(padding, ' '), data);
}

std::string safetensors_bytes(std::string_view header, std::string_view data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i)
    bytes += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i) & 0xff);
  bytes += header;
  bytes += data;
  return bytes;
}

void write_file(const std::string& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) throw std::runtime_error("cannot write " + path);
}

std::string read_whole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_checkpoint(const std::string& dir, const std::vector<ShardData>& shards) {
  std::vector<std::pair<std::string, std::string>> weight_map;
  int64_t total = 0;
  for (const ShardData& shard : shards) {
    write_file(dir + "/" + shard.file, safetensors_bytes(shard.tensors));
    for (const TensorData& tensor : shard.tensors) {
      weight_map.emplace_back(tensor.name, shard.file);
      total += static_cast<int64_t>(tensor.bytes.size());
    }
  }
  write_file(dir + "/model.safetensors.index.json", index_json(weight_map, total));
}

std::string index_json(const std::vector<std::pair<std::string, std::string>>& weight_map,
                       int64_t total_size) {
  // By hand, so that a test can name a tensor twice.
  std::string map;
  for (const auto& [tensor, file] : weight_map)
    map += (map.empty() ? "" : ",") + OrderedJson(tensor).dump() + ":" + OrderedJson(file).dump();
  std::string metadata;
  if (total_size >= 0)
    metadata = "\"metadata\":{\"total_size\":" + std::to_string(total_size) + "},";
  return "{" + metadata + "\"weight_map\":{" + map + "}}";
}

}  // namespace mla::test
