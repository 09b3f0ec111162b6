// model.safetensors.index.json, beside two shards: "1.safetensors" with a and b, "d/2.safetensors"
// with c. Index first, then the checkpoint that it is of.
#include "weights_loader/checkpoint.h"

#include <filesystem>
#include <fstream>

#include "tests/fuzz/fuzz.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

// Lives to the end of the process, then is removed.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "mla-fuzz-XXXXXX").string();
    FUZZ_CHECK(mkdtemp(pattern.data()));
    path_ = pattern;
    fs::create_directory(path_ + "/d");
    write("1.safetensors", shard(R"({"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
                                 R"("b":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]}})"));
    write("d/2.safetensors", shard(R"({"c":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}})"));
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

  void write(const std::string& name, std::string_view bytes) const {
    std::ofstream out(path_ + "/" + name, std::ios::binary);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    FUZZ_CHECK(out.good());
  }
  const std::string& path() const { return path_; }

 private:
  static std::string shard(const std::string& header) {
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    return bytes + header + "12345678";
  }

  std::string path_;
};

void check_open(const Folder& folder, const CheckpointIndex& index) {
  fuzz::parses([&] {
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    FUZZ_CHECK(checkpoint.num_tensors() >= index.shard_of.size());
    FUZZ_CHECK(checkpoint.fingerprint().size() == 16);
    for (const auto& [name, shard] : index.shard_of) {
      const TensorView view = checkpoint.tensor(name);
      FUZZ_CHECK(view.file->path() == folder.path() + "/" + shard);
      std::vector<float> values(static_cast<size_t>(view.elements()));
      view.read_f32(0, view.elements(), values.data());
    }
  });
}

}  // namespace
}  // namespace mla

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla;
  static const Folder folder;
  const std::string name = "model.safetensors.index.json";
  folder.write(name, fuzz::as_text(data, size));
  CheckpointIndex index;
  if (!fuzz::parses([&] { index = read_index(folder.path() + "/" + name); })) return 0;
  FUZZ_CHECK(!index.shard_of.empty());
  for (const auto& [tensor, shard] : index.shard_of) {
    const fs::path inside = fs::path(shard).lexically_normal();
    FUZZ_CHECK(!inside.empty() && inside.is_relative() && *inside.begin() != "..");
  }
  const std::vector<TensorSpec> expected = {{"a", {2}}, {"b", {1, 1}}, {"c", {4}}};
  const IndexReport report = check_index(index, expected);
  FUZZ_CHECK(report.expected_bytes == 14);
  FUZZ_CHECK(index.shard_of.size() + report.missing.size() ==
             expected.size() + report.unexpected.size());
  check_open(folder, index);
  return 0;
}
