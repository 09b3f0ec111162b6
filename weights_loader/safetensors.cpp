#include "weights_loader/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lib/base/error.h"
#include "lib/base/json.h"

namespace mla {
namespace {

// The limit of the reference implementation of the format.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr uint64_t kLengthBytes = 8;

// Bits of an element; 0 for a dtype that the format does not know.
unsigned bits_of(std::string_view dtype) {
  struct Known {
    std::string_view name;
    unsigned bits;
  };
  static constexpr Known kKnown[] = {
      {"BF16", 16},   {"F32", 32},    {"F16", 16},    {"F64", 64},    {"I64", 64},
      {"I32", 32},    {"I16", 16},    {"I8", 8},      {"U64", 64},    {"U32", 32},
      {"U16", 16},    {"U8", 8},      {"BOOL", 8},    {"F8_E4M3", 8}, {"F8_E5M2", 8},
      {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},      {"C64", 64},
  };
  for (const Known& known : kKnown)
    if (known.name == dtype) return known.bits;
  return 0;
}

std::vector<int64_t> integers(const Json& list, std::string_view field, std::string_view what,
                              const std::string& name) {
  if (!list.is_array())
    fail("{}: tensor '{}': {}: expected a list of integers, found {}", what, name, field,
         describe(list));
  std::vector<int64_t> values;
  for (const Json& value : list) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
      fail("{}: tensor '{}': {}: expected integers from 0 to 2^63 - 1, found {}", what, name, field,
           describe(value));
    values.push_back(value.get<int64_t>());
  }
  return values;
}

TensorInfo parse_tensor(const Json& entry, std::string_view what, const std::string& name) {
  if (!entry.is_object())
    fail("{}: tensor '{}': expected an object, found {}", what, name, describe(entry));
  for (const char* field : {"dtype", "shape", "data_offsets"})
    if (!entry.contains(field))
      fail("{}: tensor '{}': expected a field '{}', found none", what, name, field);
  if (entry.size() != 3)
    fail("{}: tensor '{}': expected the fields dtype, shape and data_offsets, found {} fields",
         what, name, entry.size());

  TensorInfo info;
  const Json& dtype = entry["dtype"];
  if (!dtype.is_string())
    fail("{}: tensor '{}': dtype: expected a string, found {}", what, name, describe(dtype));
  info.dtype = dtype.get<std::string>();
  const unsigned bits = bits_of(info.dtype);
  if (bits == 0)
    fail("{}: tensor '{}': dtype: expected one of the format's, such as \"BF16\", found \"{}\"",
         what, name, info.dtype);
  info.shape = integers(entry["shape"], "shape", what, name);
  const std::vector<int64_t> offsets = integers(entry["data_offsets"], "data_offsets", what, name);
  if (offsets.size() != 2 || offsets[0] > offsets[1])
    fail("{}: tensor '{}': data_offsets: expected [begin, end] with begin <= end, found {}", what,
         name, shape_text(offsets));
  info.begin = static_cast<uint64_t>(offsets[0]);
  info.end = static_cast<uint64_t>(offsets[1]);

  uint64_t total_bits = bits;
  for (const int64_t extent : info.shape)
    if (__builtin_mul_overflow(total_bits, static_cast<uint64_t>(extent), &total_bits))
      fail("{}: tensor '{}': shape: expected a size below 2^64 bits, found {}", what, name,
           shape_text(info.shape));
  if (total_bits % 8 != 0)
    fail("{}: tensor '{}': expected whole bytes, found {} {}", what, name, info.dtype,
         shape_text(info.shape));
  if (total_bits / 8 != info.end - info.begin)
    fail("{}: tensor '{}': expected {} bytes for {} {}, found {} (data_offsets [{}, {}])", what,
         name, total_bits / 8, info.dtype, shape_text(info.shape), info.end - info.begin,
         info.begin, info.end);
  return info;
}

struct Header {
  std::map<std::string, TensorInfo> tensors;
  uint64_t data_bytes = 0;  // that the tensors cover
  std::string last;         // the tensor at the end of the data
};

// Checks all that does not depend on the size of the file.
Header parse_tensors(std::string_view json, std::string_view what) {
  if (json.empty() || json.front() != '{')
    fail("{}: expected a safetensors header (a JSON object), found {}", what,
         json.empty() ? "nothing" : "something else");
  const Json document = parse_json(json, what);
  Header header;
  for (const auto& [name, entry] : document.items()) {
    if (name != "__metadata__") {
      header.tensors.emplace(name, parse_tensor(entry, what, name));
      continue;
    }
    if (!entry.is_object())
      fail("{}: __metadata__: expected an object, found {}", what, describe(entry));
    for (const auto& [key, value] : entry.items())
      if (!value.is_string())
        fail("{}: __metadata__: '{}': expected a string, found {}", what, key, describe(value));
  }

  using Item = std::pair<const std::string, TensorInfo>;
  std::vector<const Item*> order;
  for (const Item& item : header.tensors) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](const Item* a, const Item* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  for (const Item* item : order) {
    const TensorInfo& info = item->second;
    if (info.begin < header.data_bytes)
      fail("{}: tensor '{}': expected data from byte {}, found {}: it overlaps tensor '{}'", what,
           item->first, header.data_bytes, info.begin, header.last);
    if (info.begin > header.data_bytes)
      fail("{}: tensor '{}': expected data from byte {}, found {}: a hole that no tensor covers",
           what, item->first, header.data_bytes, info.begin);
    header.data_bytes = info.end;
    header.last = item->first;
  }
  return header;
}

// `offset`: bytes of the file before its data section.
void check_size(const Header& header, uint64_t offset, uint64_t found, std::string_view what) {
  const uint64_t expected = offset + header.data_bytes;
  if (found < expected)
    fail("{}: truncated: expected {} bytes, found {} (tensor '{}' runs past the end)", what,
         expected, found, header.last);
  if (found > expected)
    fail("{}: expected {} bytes, found {}: no tensor covers the last {}", what, expected, found,
         found - expected);
}

void refuse_lfs_pointer(std::string_view text, const std::string& path) {
  if (!text.starts_with("version https://git-lfs")) return;
  std::string size = "the file itself";
  if (const size_t at = text.find("\nsize "); at != text.npos) {
    const std::string_view rest = text.substr(at + 6);
    size = fmt::format("the file itself ({} bytes)", rest.substr(0, rest.find('\n')));
  }
  fail("{}: expected {}, found a git-LFS pointer to it: run `git lfs pull`", path, size);
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::map<std::string, TensorInfo> SafetensorsFile::parse_header(std::string_view json,
                                                                uint64_t data_bytes,
                                                                std::string_view what) {
  Header header = parse_tensors(json, what);
  check_size(header, 0, data_bytes, what);
  return std::move(header.tensors);
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) fail("{}: cannot be opened: {}", path, std::strerror(errno));
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) fail("{}: {}", path, std::strerror(errno));
  if (!S_ISREG(info.st_mode)) fail("{}: expected a regular file", path);
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes < kLengthBytes)
    fail("{}: truncated: expected at least {} bytes, found {}", path, kLengthBytes, bytes);

  void* map = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (map == MAP_FAILED)
    fail("{}: cannot be mapped ({} bytes): {}", path, bytes, std::strerror(errno));
  std::shared_ptr<SafetensorsFile> result(new SafetensorsFile);  // unmaps when a check throws
  result->path_ = path;
  result->map_ = static_cast<const std::byte*>(map);
  result->map_bytes_ = bytes;

  const std::string_view text(static_cast<const char*>(map), bytes);
  refuse_lfs_pointer(text.substr(0, 512), path);
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | static_cast<uint8_t>(text[i]);
  if (length > kMaxHeaderBytes)
    fail("{}: header length: expected at most {} bytes, found {}: not a safetensors file?", path,
         kMaxHeaderBytes, length);
  if (length > bytes - kLengthBytes)
    fail("{}: truncated: expected at least {} bytes for the header, found {}", path,
         kLengthBytes + length, bytes);
  result->data_begin_ = kLengthBytes + length;
  Header header = parse_tensors(result->header(), path);
  check_size(header, result->data_begin_, bytes, path);
  result->tensors_ = std::move(header.tensors);
  return result;
}

SafetensorsFile::~SafetensorsFile() {
  if (map_) ::munmap(const_cast<std::byte*>(map_), map_bytes_);
}

const std::string& SafetensorsFile::path() const { return path_; }

const std::map<std::string, TensorInfo>& SafetensorsFile::tensors() const { return tensors_; }

const std::byte* SafetensorsFile::data(const TensorInfo& tensor) const {
  return map_ + data_begin_ + tensor.begin;
}

std::string_view SafetensorsFile::header() const {
  return {reinterpret_cast<const char*>(map_) + kLengthBytes, data_begin_ - kLengthBytes};
}

uint64_t SafetensorsFile::file_bytes() const { return map_bytes_; }

}  // namespace mla
