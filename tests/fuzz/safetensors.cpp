// A safetensors file. The input is its JSON header behind two bytes, the size of the data; or,
// where it begins with "F", the whole file behind that.
#include "weights_loader/safetensors.h"

#include "tests/fuzz/fuzz.h"

namespace mla {
namespace {

unsigned bits_of(const std::string& dtype) {
  for (const char* name : {"F64", "I64", "U64", "C64"})
    if (dtype == name) return 64;
  for (const char* name : {"F32", "I32", "U32"})
    if (dtype == name) return 32;
  for (const char* name : {"F16", "BF16", "I16", "U16"})
    if (dtype == name) return 16;
  if (dtype.starts_with("F6_")) return 6;
  return dtype == "F4" ? 4 : 8;
}

// Every tensor lies inside the data, is as large as its shape says, and all of the data is covered.
void check(const std::map<std::string, TensorInfo>& tensors, uint64_t data_bytes) {
  uint64_t covered = 0;
  for (const auto& [name, info] : tensors) {
    FUZZ_CHECK(name != "__metadata__");
    FUZZ_CHECK(info.begin <= info.end);
    FUZZ_CHECK(info.end <= data_bytes);
    covered += info.end - info.begin;
    uint64_t bits = bits_of(info.dtype);
    for (const int64_t extent : info.shape) {
      FUZZ_CHECK(extent >= 0);
      FUZZ_CHECK(!__builtin_mul_overflow(bits, static_cast<uint64_t>(extent), &bits));
    }
    FUZZ_CHECK(bits == 8 * (info.end - info.begin));
  }
  FUZZ_CHECK(covered == data_bytes);
}

void read_whole(std::string_view bytes) {
  static fuzz::MemoryFile file;
  file.set(bytes);
  fuzz::parses([&] {
    const auto opened = SafetensorsFile::open(file.path());
    FUZZ_CHECK(opened->file_bytes() == bytes.size());
    FUZZ_CHECK(opened->header() == bytes.substr(8, opened->header().size()));
    const std::string_view data = bytes.substr(8 + opened->header().size());
    check(opened->tensors(), data.size());
    for (const auto& [name, info] : opened->tensors()) {
      const auto* at = reinterpret_cast<const char*>(opened->data(info));
      const uint64_t size = info.end - info.begin;
      FUZZ_CHECK(std::string_view(at, size) == data.substr(info.begin, size));
    }
  });
}

}  // namespace
}  // namespace mla

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla;
  const std::string_view text = fuzz::as_text(data, size);
  if (size < 2) return 0;
  if (text[0] == 'F') {
    read_whole(text.substr(1));
    return 0;
  }
  const std::string_view header = text.substr(2);
  const uint64_t data_bytes = data[0] | data[1] << 8;
  std::map<std::string, TensorInfo> tensors;
  const bool good =
      fuzz::parses([&] { tensors = SafetensorsFile::parse_header(header, data_bytes, "header"); });
  if (good) check(tensors, data_bytes);
  // The same as a file.
  std::string whole(8, '\0');
  for (size_t i = 0; i < 8; ++i) whole[i] = static_cast<char>(header.size() >> 8 * i);
  whole += header;
  whole.append(data_bytes, 'x');
  read_whole(whole);
  return 0;
}
