#include "weights_loader/safetensors.h"

#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/safetensors_writer.h"

namespace mla::safetensors_test {
namespace {

using test::error_text;
using test::safetensors_bytes;
using test::TempDir;
using test::write_file;

// The message of opening a file with these bytes, without its path.
std::string open_error(const std::string& bytes) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  write_file(path, bytes);
  const std::string message = error_text([&] { SafetensorsFile::open(path); });
  if (!message.starts_with(path + ": ")) return "no path: " + message;
  return message.substr(path.size() + 2);
}

std::string header_error(const std::string& header, uint64_t data_bytes) {
  return error_text([&] { SafetensorsFile::parse_header(header, data_bytes, "H"); });
}

// A header of one tensor "w".
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return "{\"w\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets +
         "}}";
}

TEST_CASE("A good file gives names and shapes and data") {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  write_file(path, safetensors_bytes({{"b", "F32", {2}, test::f32_bytes({1.5f, -2.0f})},
                                      {"a", "BF16", {1, 3}, test::bf16_bytes({1, 2, 3})},
                                      {"scalar", "I64", {}, std::string(8, '\1')}},
                                     7));
  const auto file = SafetensorsFile::open(path);
  CHECK(file->path() == path);
  CHECK(file->file_bytes() == test::read_whole(path).size());
  CHECK(file->header().front() == '{');
  REQUIRE(file->tensors().size() == 3);
  const TensorInfo& a = file->tensors().at("a");
  CHECK(a.dtype == "BF16");
  CHECK(a.shape == std::vector<int64_t>{1, 3});
  CHECK(a.begin == 8);
  CHECK(a.end == 14);
  CHECK(file->tensors().at("scalar").shape.empty());
  float b[2];
  std::memcpy(b, file->data(file->tensors().at("b")), sizeof(b));
  CHECK(b[0] == 1.5f);
  CHECK(b[1] == -2.0f);
}

TEST_CASE("Tensors without elements may stand anywhere between others") {
  const std::string header =
      R"({"a":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},
          "z":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
          "b":{"dtype":"F32","shape":[3,0],"data_offsets":[4,4]}})";
  CHECK(SafetensorsFile::parse_header(header, 4, "H").size() == 3);
  CHECK(SafetensorsFile::parse_header("{}", 0, "H").empty());
}

TEST_CASE("A truncated file is told from a bad one by its sizes") {
  const std::string good = safetensors_bytes({{"w", "F32", {2}, test::f32_bytes({1, 2})}});
  const std::string all = std::to_string(good.size());
  CHECK(open_error("") == "truncated: expected at least 8 bytes, found 0");
  CHECK(open_error(good.substr(0, 5)) == "truncated: expected at least 8 bytes, found 5");
  CHECK(open_error(good.substr(0, 20)) == "truncated: expected at least " +
                                              std::to_string(good.size() - 8) +
                                              " bytes for the header, found 20");
  CHECK(open_error(good.substr(0, good.size() - 3)) ==
        "truncated: expected " + all + " bytes, found " + std::to_string(good.size() - 3) +
            " (tensor 'w' runs past the end)");
  CHECK(open_error(good + "xy") == "expected " + all + " bytes, found " +
                                       std::to_string(good.size() + 2) +
                                       ": no tensor covers the last 2");
}

TEST_CASE("A header length over the limit is refused before it is used") {
  CHECK(open_error(std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10)) ==
        "header length: expected at most 100000000 bytes, found 100000001: not a safetensors "
        "file?");
  CHECK(open_error(std::string("\0\xe1\xf5\x05\0\0\0\0{}", 10)) ==
        "truncated: expected at least 100000008 bytes for the header, found 10");
  CHECK(open_error(std::string(8, '\xff')) ==
        "header length: expected at most 100000000 bytes, found 18446744073709551615: not a "
        "safetensors file?");
}

TEST_CASE("A git-LFS pointer in place of a file is recognised") {
  CHECK(
      open_error("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 8594887408\n") ==
      "expected the file itself (8594887408 bytes), found a git-LFS pointer to it: run `git lfs "
      "pull`");
}

TEST_CASE("A file that cannot be opened is named") {
  const TempDir dir;
  CHECK(error_text([&] { SafetensorsFile::open(dir / "no"); }) ==
        dir / "no" + ": cannot be opened: No such file or directory");
  CHECK(error_text([&] { SafetensorsFile::open(dir.path()); }) ==
        dir.path() + ": expected a regular file");
}

TEST_CASE("A header that is not a JSON object is refused") {
  CHECK(open_error(safetensors_bytes("", "")) ==
        "expected a safetensors header (a JSON object), found nothing");
  CHECK(open_error(safetensors_bytes("[1]", "")) ==
        "expected a safetensors header (a JSON object), found something else");
  CHECK(open_error(safetensors_bytes("{\"w\":", "")).starts_with("not valid JSON: "));
  CHECK(open_error(safetensors_bytes("{\"\xff\":1}", "")).starts_with("not valid JSON: "));
}

TEST_CASE("A name that appears twice in a header is refused") {
  const std::string tensor = R"("w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  CHECK(open_error(safetensors_bytes("{" + tensor + "," + tensor + "}", "x")) ==
        "duplicate key 'w'");
}

TEST_CASE("An entry that lacks a field or has another one is refused") {
  CHECK(header_error(R"({"w":3})", 0) == "H: tensor 'w': expected an object, found the number 3");
  CHECK(header_error(R"({"w":{"shape":[1],"data_offsets":[0,1]}})", 1) ==
        "H: tensor 'w': expected a field 'dtype', found none");
  CHECK(header_error(R"({"w":{"dtype":"U8","data_offsets":[0,1]}})", 1) ==
        "H: tensor 'w': expected a field 'shape', found none");
  CHECK(header_error(R"({"w":{"dtype":"U8","shape":[1]}})", 1) ==
        "H: tensor 'w': expected a field 'data_offsets', found none");
  CHECK(header_error(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", 1) ==
        "H: tensor 'w': expected the fields dtype, shape and data_offsets, found 4 fields");
  CHECK(header_error(R"({"__metadata__":[]})", 0) ==
        "H: __metadata__: expected an object, found a list");
  CHECK(header_error(R"({"__metadata__":{"a":1}})", 0) ==
        "H: __metadata__: 'a': expected a string, found the number 1");
}

TEST_CASE("An unknown dtype is refused by name") {
  CHECK(header_error(one("BF17", "[1]", "[0,2]"), 2) ==
        "H: tensor 'w': dtype: expected one of the format's, such as \"BF16\", found \"BF17\"");
  CHECK(header_error(R"({"w":{"dtype":1,"shape":[1],"data_offsets":[0,1]}})", 1) ==
        "H: tensor 'w': dtype: expected a string, found the number 1");
}

TEST_CASE("Shapes and offsets that are not sizes are refused") {
  CHECK(header_error(one("U8", "[-1]", "[0,1]"), 1) ==
        "H: tensor 'w': shape: expected integers from 0 to 2^63 - 1, found the number -1");
  CHECK(header_error(one("U8", "[1.0]", "[0,1]"), 1) ==
        "H: tensor 'w': shape: expected integers from 0 to 2^63 - 1, found the number 1.0");
  CHECK(header_error(one("U8", "[9223372036854775808]", "[0,1]"), 1) ==
        "H: tensor 'w': shape: expected integers from 0 to 2^63 - 1, found the number "
        "9223372036854775808");
  CHECK(header_error(one("U8", "7", "[0,1]"), 1) ==
        "H: tensor 'w': shape: expected a list of integers, found the number 7");
  CHECK(header_error(one("U8", "[1]", "[1,0]"), 1) ==
        "H: tensor 'w': data_offsets: expected [begin, end] with begin <= end, found [1, 0]");
  CHECK(header_error(one("U8", "[1]", "[0]"), 1) ==
        "H: tensor 'w': data_offsets: expected [begin, end] with begin <= end, found [0]");
}

TEST_CASE("A shape whose size overflows is refused") {
  // 2^32 · 2^32 · 2 bytes would be 0 in 64 bits and fit any file.
  CHECK(header_error(one("BF16", "[4294967296,4294967296]", "[0,0]"), 0) ==
        "H: tensor 'w': shape: expected a size below 2^64 bits, found [4294967296, 4294967296]");
  CHECK(header_error(one("U8", "[9223372036854775807]", "[0,1]"), 1) ==
        "H: tensor 'w': shape: expected a size below 2^64 bits, found [9223372036854775807]");
}

TEST_CASE("Offsets that disagree with shape and dtype are refused") {
  CHECK(header_error(one("F32", "[2,3]", "[0,12]"), 12) ==
        "H: tensor 'w': expected 24 bytes for F32 [2, 3], found 12 (data_offsets [0, 12])");
  CHECK(header_error(one("F4", "[3]", "[0,1]"), 1) ==
        "H: tensor 'w': expected whole bytes, found F4 [3]");
}

TEST_CASE("Tensors that overlap or leave a hole are refused") {
  const auto two = [](const std::string& a, const std::string& b) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
  };
  CHECK(header_error(two("[0,4]", "[2,6]"), 6) ==
        "H: tensor 'b': expected data from byte 4, found 2: it overlaps tensor 'a'");
  CHECK(header_error(two("[0,4]", "[0,4]"), 4) ==
        "H: tensor 'b': expected data from byte 4, found 0: it overlaps tensor 'a'");
  CHECK(header_error(two("[0,4]", "[6,10]"), 10) ==
        "H: tensor 'b': expected data from byte 4, found 6: a hole that no tensor covers");
  CHECK(header_error(two("[2,6]", "[6,10]"), 10) ==
        "H: tensor 'a': expected data from byte 0, found 2: a hole that no tensor covers");
  CHECK(header_error(two("[0,4]", "[4,8]"), 7) ==
        "H: truncated: expected 8 bytes, found 7 (tensor 'b' runs past the end)");
  CHECK(header_error(two("[0,4]", "[4,8]"), 8) == "(no error)");
}

}  // namespace
}  // namespace mla::safetensors_test
