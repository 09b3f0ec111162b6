#include "lib/batch/resume.h"

#include <fstream>
#include <random>
#include <sstream>

#include "lib/base/error.h"
#include "lib/batch/hash.h"
#include "lib/batch/request.h"
#include "tests/support/catch.h"

namespace mla::resume_test {
namespace {

using test::TempDir;

void put(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

using test::has;

TEST_CASE("A scan counts the records that the reader finds in whatever bytes") {
  TempDir dir;
  std::mt19937 random(7);
  const char* parts[] = {"\n",   " ",    "\t",   "\r\n",         "{}",
                         "\xef", "\xbb", "\xbf", "\xef\xbb\xbf", "x"};
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (unsigned i = random() % 9; i > 0; --i) text += parts[random() % std::size(parts)];
    put(dir / "f", text);
    const InputScan scan = scan_input(dir / "f");
    std::istringstream in(text);
    ReaderOptions options;
    options.vocab_size = 4;
    RequestReader reader(in, "f", options);
    while (reader.next()) continue;
    INFO("round " << round << ": " << OrderedJson::binary({text.begin(), text.end()}).dump());
    REQUIRE(scan.records == reader.records());
    REQUIRE(scan.sha256 == reader.input_hash());
    REQUIRE(scan.bytes == static_cast<int64_t>(text.size()));
  }
}

TEST_CASE("A shard is I/N and has every N-th record") {
  const auto shard = parse_shard("2/5");
  REQUIRE(shard);
  CHECK(shard->name() == "2/5");
  CHECK(shard->has(7));
  CHECK_FALSE(shard->has(8));
  for (int64_t n = 0; n < 20; ++n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += shard->has(i);
    CHECK(shard->size(n) == count);
  }
  for (const char* text : {"", "/", "1", "1/", "/2", "5/5", "-1/2", "+0/2", "0/0", "0/2 ", "0/2/3",
                           "0/99999999999999999999"})
    CHECK_FALSE(parse_shard(text));
}

const std::string kOk = R"({"id":"a","index":0,"status":"ok"})";
const std::string kBad = R"({"id":"b","index":1,"status":"error"})";

TEST_CASE("What an earlier run left is told apart by its lines") {
  TempDir dir;
  CHECK(read_earlier_output(dir.path()).empty());
  CHECK(read_earlier_output(dir / "none").empty());

  put(dir / "outputs.jsonl.partial", kOk + "\n" + kBad + "\n" + R"({"id":"c","index":2,"sta)");
  EarlierOutput earlier = read_earlier_output(dir.path());
  CHECK(earlier.kept() == 1);
  CHECK(earlier.partial[0].index == 0);
  CHECK(earlier.partial_bytes == static_cast<int64_t>(kOk.size() + kBad.size() + 2));
  CHECK(earlier.partial_size > earlier.partial_bytes);
  CHECK_FALSE(earlier.complete);

  // A whole record without its newline is torn too: it is cut off, not written behind.
  put(dir / "outputs.jsonl.partial", kOk + "\n" + R"({"id":"c","index":2,"status":"ok"})");
  earlier = read_earlier_output(dir.path());
  CHECK(earlier.kept() == 1);
  CHECK(earlier.partial_bytes == static_cast<int64_t>(kOk.size() + 1));

  // A torn line that a newline followed, or zeros that a lost machine left.
  put(dir / "outputs.jsonl.partial", kOk + "\n" + R"({"id":"c")" + "\n");
  CHECK(read_earlier_output(dir.path()).kept() == 1);
  put(dir / "outputs.jsonl.partial", kOk + "\n" + std::string(100, '\0'));
  CHECK(read_earlier_output(dir.path()).kept() == 1);
  put(dir / "outputs.jsonl.partial", "{\n" + kOk + "\n");
  CHECK_THROWS_AS(read_earlier_output(dir.path()), Error);

  put(dir / "outputs.jsonl.partial", kOk + "\n");
  put(dir / "outputs.jsonl", kOk + "\n" + kBad + "\n");
  earlier = read_earlier_output(dir.path());
  CHECK(earlier.has_outputs);
  CHECK_FALSE(earlier.complete);
  CHECK(earlier.kept() == 1);
  CHECK(earlier.outputs.empty());
  put(dir / "outputs.jsonl", kOk + "\n");
  CHECK(read_earlier_output(dir.path()).complete);
  put(dir / "outputs.jsonl", "");
  CHECK(read_earlier_output(dir.path()).complete);
  put(dir / "outputs.jsonl", kOk);
  CHECK_THROWS_AS(read_earlier_output(dir.path()), Error);
}

TEST_CASE("A writer goes on behind what was finished and drops the rest") {
  TempDir dir;
  const std::string second = R"({"id":"b","index":1,"status":"ok"})";
  put(dir / "outputs.jsonl.partial", kOk + "\n" + kBad + "\ntorn");
  const EarlierOutput earlier = read_earlier_output(dir.path());
  {
    OutputWriter writer({.dir = dir.path(), .input_path = "", .earlier = &earlier});
    writer.write_line(1, second + "\n");
    writer.finish();
  }
  CHECK(read_file(dir / "outputs.jsonl") == kOk + "\n" + second + "\n");

  put(dir / "outputs.jsonl.partial", "");
  const EarlierOutput then = read_earlier_output(dir.path());
  put(dir / "outputs.jsonl.partial", kOk + "\n");
  CHECK_THROWS_AS(OutputWriter({.dir = dir.path(), .input_path = "", .earlier = &then}), Error);
}

TEST_CASE("Runs differ in what decides their records and in nothing else") {
  RunRecord run;
  run.version = "1";
  run.model = {{"path", "m"}, {"fingerprint", "f"}, {"files", {{"config.json", "c"}}}};
  run.input_sha256 = "aa";
  run.options = {
      {"threads", 1}, {"shard", "0/2"}, {"dtype", "float32"}, {"sampling", {{"seed", 1}}}};
  const Json first = Json(to_json(run));
  const auto changed = [&](const char* pointer, const Json& value, bool shard = true) {
    Json other = first;
    other[Json::json_pointer(pointer)] = value;
    return difference(first, other, shard);
  };
  CHECK(changed("/options/threads", 5).empty());
  CHECK(changed("/model/path", "elsewhere").empty());
  CHECK(changed("/state", "finished").empty());
  CHECK(changed("/model/fingerprint", "g") ==
        "checkpoint fingerprint: expected \"f\", found \"g\"");
  CHECK(changed("/model/files/config.json", "d") ==
        "checkpoint's config.json: expected \"c\", found \"d\"");
  CHECK(changed("/model/files/tokenizer.json", "t") ==
        "checkpoint's tokenizer.json: expected null, found \"t\"");
  CHECK(changed("/input/sha256", "bb") == "SHA-256 of the input: expected \"aa\", found \"bb\"");
  CHECK(changed("/version", "2") == "version: expected \"1\", found \"2\"");
  CHECK(changed("/options/sampling/seed", 2) == "option sampling.seed: expected 1, found 2");
  CHECK(changed("/options/new", 2) == "option new: expected null, found 2");
  CHECK(changed("/options/shard", "1/2") == "option shard: expected \"0/2\", found \"1/2\"");
  CHECK(changed("/options/shard", "1/2", false).empty());
  CHECK(has(difference(first, Json::object(), true), "; option dtype: expected \"float32\""));
}

}  // namespace
}  // namespace mla::resume_test
