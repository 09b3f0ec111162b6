#include "weights_loader/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>

#include "lib/base/error.h"
#include "lib/base/json.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";

std::optional<DType> dtype_from(std::string_view name) {
  if (name == "BF16") return DType::bf16;
  if (name == "F32") return DType::f32;
  if (name == "F16") return DType::f16;
  return std::nullopt;
}

// "'a', 'b', 'c' and 7 more".
std::string list_names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i)
    text += fmt::format("{}'{}'", i ? ", " : "", names[i]);
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

void check_shard_name(const std::string& file, const std::string& tensor, const std::string& path) {
  const fs::path shard(file);
  bool leaves = file.empty() || shard.is_absolute() || file.find('\0') != file.npos;
  for (const fs::path& part : shard) leaves = leaves || part == "..";
  if (leaves)
    fail("{}: tensor '{}': expected the name of a file inside the directory, found \"{}\"", path,
         tensor, file);
}

// FNV-1a, 64 bits.
struct Hash {
  uint64_t value = 0xcbf29ce484222325u;
  void add(std::string_view bytes) {
    for (const char c : bytes) value = (value ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  }
  void add(uint64_t number) { add(fmt::format("|{}|", number)); }
};

}  // namespace

int64_t TensorView::elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

void TensorView::read_f32(int64_t begin, int64_t count, float* out) const {
  const int64_t all = elements();
  if (begin < 0 || count < 0 || begin > all || count > all - begin)
    fail("tensor '{}': expected elements within [0, {}), found {} from {}", name, all, count,
         begin);
  if (count == 0) return;
  // The data may begin at any byte of the file, so no element is read through a typed pointer.
  const std::byte* from = data + static_cast<size_t>(begin) * size_of(dtype);
  if (dtype == DType::f32) {
    std::memcpy(out, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof(bits));
    out[i] = dtype == DType::bf16 ? to_f32(bf16{bits}) : f16_to_f32(bits);
  }
}

CheckpointIndex read_index(const std::string& path) {
  const std::string text = read_file(path);
  if (text.starts_with("version https://git-lfs"))
    fail("{}: expected the file itself, found a git-LFS pointer to it: run `git lfs pull`", path);
  const Json document = parse_json(text, path);
  if (!document.is_object()) fail("{}: expected an object, found {}", path, describe(document));
  const auto map = document.find("weight_map");
  if (map == document.end()) fail("{}: expected a field 'weight_map', found none", path);
  if (!map->is_object() || map->empty())
    fail("{}: field 'weight_map': expected an object with tensors, found {}", path,
         map->is_object() ? "an empty one" : describe(*map));

  CheckpointIndex index;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string())
      fail("{}: tensor '{}': expected the name of a file, found {}", path, tensor, describe(file));
    check_shard_name(file.get_ref<const std::string&>(), tensor, path);
    index.shard_of.emplace(tensor, file.get<std::string>());
  }
  if (const auto metadata = document.find("metadata");
      metadata != document.end() && !metadata->is_null()) {
    const std::string what = path + ": metadata";
    const int64_t size = find_int(*metadata, "total_size", what).value_or(0);
    if (size < 0) fail("{}: field 'total_size': expected 0 or more, found {}", what, size);
    index.total_size = static_cast<uint64_t>(size);
  }
  return index;
}

IndexReport check_index(const CheckpointIndex& index, const std::vector<TensorSpec>& expected,
                        DType stored) {
  IndexReport report;
  report.total_size = index.total_size;
  std::set<std::string> names;
  for (const TensorSpec& spec : expected) {
    names.insert(spec.name);
    if (!index.shard_of.contains(spec.name)) report.missing.push_back(spec.name);
    uint64_t bytes = size_of(stored);
    for (const int64_t extent : spec.shape) bytes *= static_cast<uint64_t>(extent);
    report.expected_bytes += bytes;
  }
  std::sort(report.missing.begin(), report.missing.end());
  for (const auto& [name, shard] : index.shard_of)
    if (!names.contains(name)) report.unexpected.push_back(name);
  return report;
}

Checkpoint Checkpoint::open(const std::string& dir) {
  if (!fs::is_directory(dir)) fail("{}: expected a directory with a checkpoint, found none", dir);
  const std::string index_path = (fs::path(dir) / kIndexName).string();
  const std::string single_path = (fs::path(dir) / kSingleName).string();

  Checkpoint checkpoint;
  checkpoint.dir_ = dir;
  CheckpointIndex index;
  const bool indexed = has_entry(index_path);
  std::vector<std::string> files;
  if (indexed) {
    index = read_index(index_path);
    std::set<std::string> names;
    for (const auto& [tensor, file] : index.shard_of) names.insert(file);
    files.assign(names.begin(), names.end());
  } else if (has_entry(single_path)) {
    files = {kSingleName};
  } else {
    fail("{}: expected {} or {}, found neither", dir, kIndexName, kSingleName);
  }

  // All missing files are named at once: a download that stopped usually lacks several.
  std::vector<std::string> missing;
  for (const std::string& file : files) {
    checkpoint.shard_paths_.push_back((fs::path(dir) / file).string());
    std::error_code error;  // a name that no file system takes is missing too
    if (!fs::exists(checkpoint.shard_paths_.back(), error)) missing.push_back(file);
  }
  if (!missing.empty())
    fail("{}: expected {} shards in the directory, {} missing: {}", index_path, files.size(),
         missing.size(), list_names(missing));

  for (size_t shard = 0; shard < files.size(); ++shard) {
    const auto& file =
        checkpoint.shards_.emplace_back(SafetensorsFile::open(checkpoint.shard_paths_[shard]));
    std::vector<std::string> unnamed;
    for (const auto& [name, info] : file->tensors()) {
      const auto [at, added] = checkpoint.entries_.emplace(name, Entry{shard, info});
      if (!added)
        fail("{}: tensor '{}': expected in one shard, found in \"{}\" too", file->path(), name,
             files[at->second.shard]);
      if (indexed && !index.shard_of.contains(name)) unnamed.push_back(name);
    }
    if (!unnamed.empty())
      checkpoint.warnings_.push_back(fmt::format("{}: {} tensors that the index does not name: {}",
                                                 file->path(), unnamed.size(),
                                                 list_names(unnamed)));
  }

  for (const auto& [name, file] : index.shard_of) {
    const auto at = checkpoint.entries_.find(name);
    if (at != checkpoint.entries_.end() && files[at->second.shard] == file) continue;
    fail("{}: tensor '{}': expected in \"{}\", found {}", index_path, name, file,
         at == checkpoint.entries_.end() ? "in no shard"
                                         : fmt::format("in \"{}\"", files[at->second.shard]));
  }
  if (index.total_size != 0 && index.total_size != checkpoint.total_bytes())
    checkpoint.warnings_.push_back(
        fmt::format("{}: metadata.total_size: expected {} bytes, the sum of the tensors, found {}",
                    index_path, checkpoint.total_bytes(), index.total_size));
  return checkpoint;
}

void Checkpoint::check(const std::vector<TensorSpec>& expected) {
  std::string first;
  size_t wrong = 0;
  const auto note = [&](auto&& message) {
    if (wrong++ == 0) first = message();
  };
  std::set<std::string> names;
  for (const TensorSpec& spec : expected) {
    names.insert(spec.name);
    const auto at = entries_.find(spec.name);
    if (at == entries_.end()) {
      note([&] {
        return fmt::format("{}: tensor '{}': expected {}, found no such tensor", dir_, spec.name,
                           shape_text(spec.shape));
      });
      continue;
    }
    const Entry& entry = at->second;
    if (entry.info.shape != spec.shape) {
      note([&] {
        return fmt::format("{}: tensor '{}': expected shape {}, found {}", path_of(entry),
                           spec.name, shape_text(spec.shape), shape_text(entry.info.shape));
      });
    } else if (!dtype_from(entry.info.dtype)) {
      note([&] {
        return fmt::format("{}: tensor '{}': expected BF16, F32 or F16, found {}", path_of(entry),
                           spec.name, entry.info.dtype);
      });
    }
  }
  if (wrong > 1) fail("{} (the first of {} wrong tensors)", first, wrong);
  if (wrong == 1) fail("{}", first);

  std::vector<std::string> extra;
  for (const auto& [name, entry] : entries_)
    if (!names.contains(name)) extra.push_back(name);
  if (!extra.empty())
    warnings_.push_back(fmt::format("{}: {} tensors that the model does not use: {}", dir_,
                                    extra.size(), list_names(extra)));
}

TensorView Checkpoint::tensor(const std::string& name) const {
  const auto at = entries_.find(name);
  if (at == entries_.end())
    fail("{}: tensor '{}': expected in the checkpoint, found no such tensor", dir_, name);
  const Entry& entry = at->second;
  const std::optional<DType> dtype = dtype_from(entry.info.dtype);
  if (!dtype)
    fail("{}: tensor '{}': expected BF16, F32 or F16, found {}", path_of(entry), name,
         entry.info.dtype);
  const auto& file = shards_[entry.shard];
  return {.name = name,
          .dtype = *dtype,
          .shape = entry.info.shape,
          .data = file->data(entry.info),
          .file = file};
}

uint64_t Checkpoint::total_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [name, entry] : entries_) bytes += entry.info.end - entry.info.begin;
  return bytes;
}

const std::vector<std::string>& Checkpoint::warnings() const { return warnings_; }

const std::vector<std::string>& Checkpoint::shard_paths() const { return shard_paths_; }

size_t Checkpoint::num_tensors() const { return entries_.size(); }

std::string Checkpoint::fingerprint() const {
  Hash hash;
  for (const auto& file : shards_) {
    // The path inside the directory: a copy elsewhere has the same fingerprint.
    hash.add(fs::path(file->path()).lexically_relative(dir_).string());
    hash.add(file->file_bytes());
    hash.add(file->header());
  }
  constexpr uint64_t kSample = 4096;
  for (const auto& [name, entry] : entries_) {
    const uint64_t size = entry.info.end - entry.info.begin, sample = std::min(size, kSample);
    const auto* data = reinterpret_cast<const char*>(shards_[entry.shard]->data(entry.info));
    hash.add(std::string_view(data + (size - sample) / 2, sample));
  }
  return fmt::format("{:016x}", hash.value);
}

}  // namespace mla
