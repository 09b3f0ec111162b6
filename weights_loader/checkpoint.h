// All tensors of a Hugging Face directory: model.safetensors.index.json and its shards, or one
// model.safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lib/base/dtype.h"
#include "weights_loader/safetensors.h"

namespace mla {

// What a model expects of one tensor.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
};

// A tensor of the checkpoint: mapped, not copied. The file lives as long as the view.
struct TensorView {
  std::string name;
  DType dtype = DType::bf16;  // bf16, f32 or f16
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  std::shared_ptr<const SafetensorsFile> file;

  int64_t elements() const;
  // Elements [begin, begin + count) as float, whatever the dtype; exact.
  void read_f32(int64_t begin, int64_t count, float* out) const;
};

struct CheckpointIndex {
  std::map<std::string, std::string> shard_of;  // tensor name → file name
  uint64_t total_size = 0;                      // metadata.total_size, 0 where absent
};

// Reads an index. Throws Error: not JSON, no weight_map, a shard path that is absolute or leaves
// the directory, a duplicate tensor name.
CheckpointIndex read_index(const std::string& path);

// How an index agrees with what a model expects, without opening a shard.
struct IndexReport {
  std::vector<std::string> missing;     // expected, not in the index; sorted
  std::vector<std::string> unexpected;  // in the index, not expected; sorted
  uint64_t expected_bytes = 0;          // of all expected tensors, stored in `stored`
  uint64_t total_size = 0;              // metadata.total_size, 0 where absent

  bool size_agrees() const { return total_size == 0 || total_size == expected_bytes; }
};

IndexReport check_index(const CheckpointIndex& index, const std::vector<TensorSpec>& expected,
                        DType stored = DType::bf16);

class Checkpoint {
 public:
  // Opens every shard and checks them against the index. Throws Error that names what is wrong: no
  // checkpoint in the directory, a missing shard, a tensor that the index puts in a shard that does
  // not have it, a tensor that two shards have, and every error of SafetensorsFile::open.
  // A tensor in a shard that the index does not name is a warning, and so is a metadata.total_size
  // that differs from the bytes found.
  static Checkpoint open(const std::string& dir);

  // Checks the expected tensors: each there, with its shape and a dtype of BF16, F32 or F16. Throws
  // Error that names file and tensor, expected and found; when several are wrong, the message lists
  // the first of them and their number. Tensors beyond `expected` are warnings.
  void check(const std::vector<TensorSpec>& expected);

  // Throws Error where it is not there or has another dtype than BF16, F32 and F16.
  TensorView tensor(const std::string& name) const;

  uint64_t total_bytes() const;  // of all tensors' data
  const std::vector<std::string>& warnings() const;
  const std::vector<std::string>& shard_paths() const;
  size_t num_tensors() const;
  // A fingerprint that changes when a file's name, size or header changes, or the 4 KiB in the
  // middle of a tensor's data (which tells fine-tuned weights apart and reads 22 MB of V2-Lite's):
  // 16 hex digits.
  std::string fingerprint() const;

 private:
  struct Entry {
    size_t shard;
    TensorInfo info;
  };
  const std::string& path_of(const Entry& entry) const { return shard_paths_[entry.shard]; }

  std::string dir_;
  std::map<std::string, Entry> entries_;
  std::vector<std::shared_ptr<const SafetensorsFile>> shards_;
  std::vector<std::string> shard_paths_, warnings_;
};

}  // namespace mla
