// A safetensors file, mapped into memory and checked.
// Format: 8 bytes little-endian header length n, n bytes of JSON {name: {dtype, shape,
// data_offsets: [begin, end)}, "__metadata__": {string: string}}, then the data.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/dtype.h"

namespace mla {

struct TensorInfo {
  std::string dtype;  // as the file says: "BF16", "F32", "F16", "I64" …
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // offsets into the file's data section
  uint64_t end = 0;
};

// "[2, 3]", for messages.
std::string shape_text(const std::vector<int64_t>& shape);

class SafetensorsFile {
 public:
  // Maps and checks the file. Throws Error that names file, tensor, what was expected and found:
  // a file too short for its header or its data ("truncated: expected N bytes, found M"), a header
  // over 100 MB (100,000,000 bytes) or not JSON, a git-LFS pointer in place of the file, a
  // duplicate name, an unknown dtype, a shape that overflows, offsets that overlap, leave a hole,
  // run past the end, disagree with shape and dtype, and bytes that no tensor covers.
  static std::shared_ptr<const SafetensorsFile> open(const std::string& path);

  // The header checks alone, on bytes; for `inspect` and fuzzing. `data_bytes`: size of the data
  // section.
  static std::map<std::string, TensorInfo> parse_header(std::string_view json, uint64_t data_bytes,
                                                        std::string_view what);

  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const;
  const std::map<std::string, TensorInfo>& tensors() const;
  const std::byte* data(const TensorInfo& tensor) const;  // valid while the file lives
  std::string_view header() const;                        // the JSON text
  uint64_t file_bytes() const;

 private:
  SafetensorsFile() = default;
  std::string path_;
  std::map<std::string, TensorInfo> tensors_;
  const std::byte* map_ = nullptr;
  size_t map_bytes_ = 0;
  size_t data_begin_ = 0;
};

}  // namespace mla
