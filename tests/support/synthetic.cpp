#include "tests/support/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "lib/model/config.h"
#include "lib/model/tensor_table.h"

namespace mla::test {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

uint64_t fnv1a64(const std::string& text) {
  uint64_t h = 0xCBF29CE484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return h;
}

uint64_t splitmix64(uint64_t z) {
  z += kGolden;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// A power of two: the gain fan_in·scale²/3 of a linear layer is in (1/2, 2].
float scale_of(const std::string& name, int64_t fan_in) {
  if (name.ends_with("embed_tokens.weight")) return 1.0f;
  double scale = 1.0;
  while (static_cast<double>(fan_in) > 6.0 / (scale * scale)) scale /= 2;
  if (name.ends_with("mlp.gate.weight") || name.ends_with("lm_head.weight")) scale *= 2;
  return static_cast<float>(scale);
}

float element(uint64_t start, uint64_t index, bool norm, float scale) {
  const int64_t top = static_cast<int64_t>(splitmix64(start + index) >> 40);
  const float u = static_cast<float>(top - (1 << 23)) / 8388608.0f;
  return norm ? 1.0f + u / 4.0f : u * scale;
}

int64_t elements_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return n;
}

void write_shard(const std::string& path, const std::vector<TensorEntry>& table, size_t begin,
                 size_t end, uint64_t seed) {
  OrderedJson header;
  header["__metadata__"] = {{"format", "pt"}};
  int64_t offset = 0;
  for (size_t i = begin; i < end; ++i) {
    const int64_t bytes = 2 * elements_of(table[i].shape);
    header[table[i].name] = {
        {"dtype", "BF16"}, {"shape", table[i].shape}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  std::ofstream out(path, std::ios::binary);
  out << length << text;
  for (size_t i = begin; i < end; ++i) {
    const std::vector<bf16> values = synthetic_tensor(table[i].name, table[i].shape, seed);
    out.write(reinterpret_cast<const char*>(values.data()),
              static_cast<std::streamsize>(values.size() * sizeof(bf16)));
  }
  if (!out.flush()) fail("{}: cannot be written", path);
}

}  // namespace

float synthetic_weight(const std::string& name, uint64_t index, const std::vector<int64_t>& shape,
                       uint64_t seed) {
  const bool norm = shape.size() == 1;
  const float scale = norm ? 1.0f : scale_of(name, shape[1]);
  return to_f32(to_bf16(element(fnv1a64(name) + seed * kGolden, index, norm, scale)));
}

std::vector<bf16> synthetic_tensor(const std::string& name, const std::vector<int64_t>& shape,
                                   uint64_t seed) {
  const uint64_t start = fnv1a64(name) + seed * kGolden;
  const bool norm = shape.size() == 1;
  const float scale = norm ? 1.0f : scale_of(name, shape[1]);
  std::vector<bf16> values(static_cast<size_t>(elements_of(shape)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = to_bf16(element(start, i, norm, scale));
  return values;
}

std::vector<std::string> write_synthetic_checkpoint(const std::string& config_dir,
                                                    const std::string& out_dir, int shards,
                                                    uint64_t seed) {
  const std::vector<TensorEntry> table = tensor_table(load_config(config_dir));
  if (shards < 1 || static_cast<size_t>(shards) > table.size()) {
    fail("shards: expected 1 to {}, found {}", table.size(), shards);
  }
  fs::create_directories(out_dir);
  for (const char* file : {"config.json", "generation_config.json"}) {
    const fs::path from = fs::path(config_dir) / file;
    if (!fs::exists(from)) continue;
    fs::copy_file(from, fs::path(out_dir) / file, fs::copy_options::overwrite_existing);
  }
  std::vector<std::string> files;
  OrderedJson index;
  int64_t total = 0;
  for (int shard = 0; shard < shards; ++shard) {
    const size_t n = static_cast<size_t>(shards), s = static_cast<size_t>(shard);
    const size_t begin = table.size() * s / n, end = table.size() * (s + 1) / n;
    files.push_back(shards == 1 ? std::string("model.safetensors")
                                : fmt::format("model-{:05}-of-{:06}.safetensors", s + 1, n));
    write_shard(out_dir + "/" + files.back(), table, begin, end, seed);
    for (size_t i = begin; i < end; ++i) {
      total += 2 * elements_of(table[i].shape);
      index["weight_map"][table[i].name] = files.back();
    }
  }
  if (shards > 1) {
    index["metadata"]["total_size"] = total;
    std::ofstream out(out_dir + "/model.safetensors.index.json");
    out << index.dump(2) << "\n";
    if (!out.flush()) fail("{}: the index cannot be written", out_dir);
  }
  return files;
}

std::vector<std::string> write_synthetic_checkpoint(const std::string& config_dir,
                                                    const std::string& out_dir, int shards) {
  const std::string path = config_dir + "/expected.json";
  const int64_t seed = get_int(parse_json(read_file(path), path), "seed", path);
  return write_synthetic_checkpoint(config_dir, out_dir, shards, static_cast<uint64_t>(seed));
}

std::vector<std::string> expected_names(const std::string& root) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (fs::exists(entry.path() / "expected.json")) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Expected load_expected(const std::string& root, const std::string& name) {
  Expected expected;
  expected.name = name;
  expected.dir = root + "/" + name;
  const std::string path = expected.dir + "/expected.json";
  const Json record = parse_json(read_file(path), path);
  expected.seed = static_cast<uint64_t>(get_int(record, "seed", path));
  expected.vocab_size = static_cast<int32_t>(get_int(record, "vocab_size", path));
  for (const Json& item : record.at("prompts")) {
    ExpectedPrompt prompt;
    prompt.ids = item.at("ids").get<std::vector<int32_t>>();
    prompt.positions = item.at("positions").get<std::vector<int32_t>>();
    prompt.first_row = get_int(item, "first_row", path);
    for (const Json& gap : item.at("router_gap")) {
      prompt.router_gap.push_back(gap.is_null() ? std::numeric_limits<float>::infinity()
                                                : gap.get<float>());
    }
    expected.prompts.push_back(std::move(prompt));
  }
  const std::string data = read_file(expected.dir + "/expected.bin");
  const size_t count =
      static_cast<size_t>(get_int(record, "rows", path)) * static_cast<size_t>(expected.vocab_size);
  if (data.size() != count * sizeof(float)) {
    fail("{}/expected.bin: expected {} bytes, found {}", expected.dir, count * sizeof(float),
         data.size());
  }
  expected.logits.resize(count);
  std::copy(data.begin(), data.end(), reinterpret_cast<char*>(expected.logits.data()));
  return expected;
}

}  // namespace mla::test
