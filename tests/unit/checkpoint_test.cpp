#include "weights_loader/checkpoint.h"

#include <cmath>
#include <filesystem>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/safetensors_writer.h"

namespace mla::checkpoint_test {
namespace {

using test::error_text;
using test::index_json;
using test::safetensors_bytes;
using test::TempDir;
using test::TensorData;
using test::write_file;

constexpr const char* kIndex = "model.safetensors.index.json";

TensorData tensor(const std::string& name, const std::vector<float>& values) {
  return {name, "BF16", {static_cast<int64_t>(values.size())}, test::bf16_bytes(values)};
}

// Two shards: a and b in "1", c in "2".
void write_good(const TempDir& dir) {
  test::write_checkpoint(dir.path(), {{"1.safetensors", {tensor("a", {1, 2}), tensor("b", {3})}},
                                      {"2.safetensors", {tensor("c", {4, 5, 6})}}});
}

std::string open_error(const TempDir& dir) {
  return error_text([&] { Checkpoint::open(dir.path()); });
}

std::string index_error(const std::string& text) {
  const TempDir dir;
  const std::string path = dir / kIndex;
  write_file(path, text);
  const std::string message = error_text([&] { read_index(path); });
  return message.starts_with(path + ": ") ? message.substr(path.size() + 2) : message;
}

TEST_CASE("A sharded checkpoint gives every tensor") {
  const TempDir dir;
  write_good(dir);
  const Checkpoint checkpoint = Checkpoint::open(dir.path());
  CHECK(checkpoint.num_tensors() == 3);
  CHECK(checkpoint.total_bytes() == 12);
  CHECK(checkpoint.shard_paths() ==
        std::vector<std::string>{dir / "1.safetensors", dir / "2.safetensors"});
  CHECK(checkpoint.warnings().empty());
  const TensorView c = checkpoint.tensor("c");
  CHECK(c.elements() == 3);
  float values[2];
  c.read_f32(1, 2, values);
  CHECK(values[0] == 5.0f);
  CHECK(values[1] == 6.0f);
  CHECK(error_text([&] { checkpoint.tensor("d"); }) ==
        dir.path() + ": tensor 'd': expected in the checkpoint, found no such tensor");
}

TEST_CASE("A view keeps its file alive after the checkpoint is gone") {
  const TempDir dir;
  write_good(dir);
  const TensorView b = Checkpoint::open(dir.path()).tensor("b");
  std::filesystem::remove(dir / "1.safetensors");
  float value = 0;
  b.read_f32(0, 1, &value);
  CHECK(value == 3.0f);
}

TEST_CASE("One model.safetensors without an index is a checkpoint") {
  const TempDir dir;
  write_file(dir / "model.safetensors", safetensors_bytes({tensor("a", {1})}));
  CHECK(Checkpoint::open(dir.path()).num_tensors() == 1);
  write_file(dir / "model.safetensors", "version https://git-lfs.github.com/spec/v1\nsize 7\n");
  CHECK(open_error(dir) == dir / "model.safetensors" +
                               ": expected the file itself (7 bytes), found a git-LFS pointer to "
                               "it: run `git lfs pull`");
}

TEST_CASE("A directory without a checkpoint is said to have none") {
  const TempDir dir;
  CHECK(open_error(dir) == dir.path() + ": expected model.safetensors.index.json or " +
                               "model.safetensors, found neither");
  CHECK(error_text([&] { Checkpoint::open(dir / "no"); }) ==
        dir / "no" + ": expected a directory with a checkpoint, found none");
}

TEST_CASE("Values of every dtype are read exactly from any byte of the file") {
  const float inf = std::numeric_limits<float>::infinity();
  // An odd header length and a first tensor of one byte put the others on odd addresses.
  for (size_t padding = 0; padding < 4; ++padding) {
    const TempDir dir;
    write_file(dir / "model.safetensors",
               safetensors_bytes(
                   {{"u8", "U8", {1}, "x"},
                    {"f32", "F32", {2}, test::f32_bytes({1e-40f, -3.25f})},
                    {"bf16", "BF16", {2}, test::bf16_bytes({0.15625f, -inf})},
                    // smallest subnormal, largest subnormal, 1 + 2^-10, -65504, infinity, NaN, -0
                    {"f16",
                     "F16",
                     {7},
                     test::f16_bytes({0x0001, 0x03ff, 0x3c01, 0xfbff, 0x7c00, 0x7e00, 0x8000})},
                    {"empty", "F32", {0, 4}, ""}},
                   padding));
    const Checkpoint checkpoint = Checkpoint::open(dir.path());
    float v[7];
    checkpoint.tensor("f32").read_f32(0, 2, v);
    CHECK(v[0] == 1e-40f);
    CHECK(v[1] == -3.25f);
    checkpoint.tensor("bf16").read_f32(0, 2, v);
    CHECK(v[0] == 0.15625f);
    CHECK(v[1] == -inf);
    checkpoint.tensor("f16").read_f32(0, 7, v);
    CHECK(v[0] == std::ldexp(1.0f, -24));
    CHECK(v[1] == std::ldexp(1023.0f, -24));
    CHECK(v[2] == 1.0f + std::ldexp(1.0f, -10));
    CHECK(v[3] == -65504.0f);
    CHECK(v[4] == inf);
    CHECK(std::isnan(v[5]));
    CHECK(v[6] == 0.0f);
    CHECK(std::signbit(v[6]));
    CHECK(checkpoint.tensor("empty").elements() == 0);
    checkpoint.tensor("empty").read_f32(0, 0, v);
    CHECK(error_text([&] { checkpoint.tensor("u8"); }) ==
          dir / "model.safetensors" + ": tensor 'u8': expected BF16, F32 or F16, found U8");
    CHECK(error_text([&] { checkpoint.tensor("f32").read_f32(1, 2, v); }) ==
          "tensor 'f32': expected elements within [0, 2), found 2 from 1");
  }
}

TEST_CASE("An index that is not one is refused") {
  CHECK(index_error("{").starts_with("not valid JSON: "));
  CHECK(index_error("[]") == "expected an object, found a list");
  CHECK(index_error("{}") == "expected a field 'weight_map', found none");
  CHECK(index_error(R"({"weight_map":[]})") ==
        "field 'weight_map': expected an object with tensors, found a list");
  CHECK(index_error(R"({"weight_map":{}})") ==
        "field 'weight_map': expected an object with tensors, found an empty one");
  CHECK(index_error(R"({"weight_map":{"a":1}})") ==
        "tensor 'a': expected the name of a file, found the number 1");
  CHECK(index_error(R"({"metadata":{"total_size":"x"},"weight_map":{"a":"f"}})") ==
        "metadata: field 'total_size': expected an integer, found the string \"x\"");
  CHECK(index_error(R"({"metadata":{"total_size":-1},"weight_map":{"a":"f"}})") ==
        "metadata: field 'total_size': expected 0 or more, found -1");
  CHECK(index_error("version https://git-lfs.github.com/spec/v1\n") ==
        "expected the file itself, found a git-LFS pointer to it: run `git lfs pull`");
}

TEST_CASE("A tensor that an index names twice is refused") {
  CHECK(index_error(index_json({{"a", "1"}, {"a", "2"}}, 4)) == "duplicate key 'a'");
}

TEST_CASE("A shard path that leaves the directory is refused") {
  for (const std::string path : {"../x", "/etc/x", "a/../../x", "..", ""})
    CHECK(index_error(index_json({{"w", path}}, -1)) ==
          "tensor 'w': expected the name of a file inside the directory, found \"" + path + "\"");
  CHECK(index_error(index_json({{"w", "..x"}, {"v", "sub/x"}}, -1)) == "(no error)");
}

TEST_CASE("Missing shards are named together") {
  const TempDir dir;
  write_file(dir / kIndex,
             index_json({{"a", "1"}, {"b", "2"}, {"c", "3"}, {"d", "4"}, {"e", "5"}}, -1));
  write_file(dir / "1", safetensors_bytes({tensor("a", {1})}));
  CHECK(open_error(dir) == dir / kIndex +
                               ": expected 5 shards in the directory, 4 missing: '2', '3', '4' "
                               "and 1 more");
}

TEST_CASE("A truncated shard and a pointer in place of a shard are named") {
  const TempDir dir;
  write_good(dir);
  const std::string path = dir / "2.safetensors";
  const std::string good = test::read_whole(path);
  write_file(path, good.substr(0, good.size() - 1));
  CHECK(open_error(dir) == path + ": truncated: expected " + std::to_string(good.size()) +
                               " bytes, found " + std::to_string(good.size() - 1) +
                               " (tensor 'c' runs past the end)");
  write_file(path, "version https://git-lfs.github.com/spec/v1\nsize 9\n");
  CHECK(
      open_error(dir).starts_with(path + ": expected the file itself (9 bytes), found a git-LFS"));
}

TEST_CASE("A tensor that the index puts in a shard that lacks it is named") {
  const TempDir dir;
  write_good(dir);
  write_file(
      dir / kIndex,
      index_json({{"a", "1.safetensors"}, {"c", "2.safetensors"}, {"d", "2.safetensors"}}, -1));
  CHECK(open_error(dir) ==
        dir / kIndex + ": tensor 'd': expected in \"2.safetensors\", found in no shard");
  write_file(
      dir / kIndex,
      index_json({{"a", "1.safetensors"}, {"b", "2.safetensors"}, {"c", "2.safetensors"}}, -1));
  CHECK(open_error(dir) ==
        dir / kIndex + ": tensor 'b': expected in \"2.safetensors\", found in \"1.safetensors\"");
}

TEST_CASE("A tensor that two shards have is refused") {
  const TempDir dir;
  write_good(dir);
  write_file(dir / "2.safetensors", safetensors_bytes({tensor("b", {3}), tensor("c", {4, 5, 6})}));
  CHECK(open_error(dir) == dir / "2.safetensors" +
                               ": tensor 'b': expected in one shard, found in \"1.safetensors\" "
                               "too");
}

TEST_CASE("A tensor that the index does not name and a wrong total size are warnings") {
  const TempDir dir;
  write_good(dir);
  write_file(dir / kIndex, index_json({{"a", "1.safetensors"}, {"c", "2.safetensors"}}, 10));
  const Checkpoint checkpoint = Checkpoint::open(dir.path());
  REQUIRE(checkpoint.warnings().size() == 2);
  CHECK(checkpoint.warnings()[0] ==
        dir / "1.safetensors" + ": 1 tensors that the index does not name: 'b'");
  CHECK(checkpoint.warnings()[1] ==
        dir / kIndex +
            ": metadata.total_size: expected 12 bytes, the sum of the tensors, found 10");
}

TEST_CASE("A shard name that no file system takes is a missing shard") {
  const TempDir dir;
  write_good(dir);
  const std::string name(300, 'x');
  write_file(dir / kIndex, index_json({{"a", name}}, -1));
  CHECK(open_error(dir) ==
        dir / kIndex + ": expected 1 shards in the directory, 1 missing: '" + name + "'");
}

TEST_CASE("The check names what is missing or has another shape or dtype") {
  const TempDir dir;
  const std::string path = dir / "model.safetensors";
  write_file(path, safetensors_bytes({tensor("a", {1, 2}), {"n", "I32", {1}, "1234"}}));
  Checkpoint checkpoint = Checkpoint::open(dir.path());
  const auto error = [&](const std::vector<TensorSpec>& expected) {
    return error_text([&] { checkpoint.check(expected); });
  };
  CHECK(error({{"a", {2}}, {"m", {3, 4}}}) ==
        dir.path() + ": tensor 'm': expected [3, 4], found no such tensor");
  CHECK(error({{"a", {2, 1}}}) == path + ": tensor 'a': expected shape [2, 1], found [2]");
  CHECK(error({{"n", {1}}}) == path + ": tensor 'n': expected BF16, F32 or F16, found I32");
  CHECK(error({{"a", {3}}, {"m", {1}}, {"n", {1}}}) ==
        path + ": tensor 'a': expected shape [3], found [2] (the first of 3 wrong tensors)");
  CHECK(checkpoint.warnings().empty());
  CHECK(error({{"a", {2}}}) == "(no error)");
  REQUIRE(checkpoint.warnings().size() == 1);
  CHECK(checkpoint.warnings()[0] == dir.path() + ": 1 tensors that the model does not use: 'n'");
}

TEST_CASE("The comparison of an index with a model goes both ways") {
  CheckpointIndex index;
  index.shard_of = {{"a", "1"}, {"b", "1"}, {"extra", "2"}};
  index.total_size = 20;
  const IndexReport report = check_index(index, {{"z", {2}}, {"b", {2, 2}}, {"a", {3}}});
  CHECK(report.missing == std::vector<std::string>{"z"});
  CHECK(report.unexpected == std::vector<std::string>{"extra"});
  CHECK(report.expected_bytes == 18);
  CHECK(report.total_size == 20);
  CHECK_FALSE(report.size_agrees());
  const IndexReport same = check_index(index, {{"a", {1}}, {"b", {2}}, {"extra", {2}}}, DType::f32);
  CHECK(same.missing.empty());
  CHECK(same.unexpected.empty());
  CHECK(same.size_agrees());
}

TEST_CASE("The fingerprint changes with any tensor's data") {
  const auto fingerprint = [](size_t changed) {
    const TempDir dir;
    // Larger than what is read of a tensor, and of one element.
    std::vector<std::string> data = {std::string(2 * 5001, 'a'), std::string(2, 'b')};
    if (changed < data.size()) data[changed][data[changed].size() / 2] ^= 1;
    std::string header = R"({"x":{"dtype":"BF16","shape":[5001],"data_offsets":[0,10002]},)"
                         R"("y":{"dtype":"BF16","shape":[1],"data_offsets":[10002,10004]}})";
    const uint64_t size = header.size();
    write_file(dir / "model.safetensors",
               std::string(reinterpret_cast<const char*>(&size), 8) + header + data[0] + data[1]);
    return Checkpoint::open(dir.path()).fingerprint();
  };
  const std::string base = fingerprint(2);
  CHECK(fingerprint(2) == base);
  CHECK(fingerprint(0) != base);
  CHECK(fingerprint(1) != base);
}

TEST_CASE("The fingerprint changes with a name or a size or a header and not with the place") {
  const auto fingerprint = [](const std::string& file, const std::string& name, size_t padding) {
    const TempDir dir;
    write_file(dir / kIndex, index_json({{name, file}}, -1));
    write_file(dir / file, safetensors_bytes({tensor(name, {1})}, padding));
    return Checkpoint::open(dir.path()).fingerprint();
  };
  const std::string base = fingerprint("1", "a", 0);
  CHECK(base.size() == 16);
  CHECK(fingerprint("1", "a", 0) == base);
  CHECK(fingerprint("2", "a", 0) != base);
  CHECK(fingerprint("1", "b", 0) != base);
  CHECK(fingerprint("1", "a", 1) != base);
}

}  // namespace
}  // namespace mla::checkpoint_test
