#include "lib/batch/resume.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <vector>

#include "lib/base/error.h"
#include "lib/batch/hash.h"
#include "lib/batch/openai.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

// Options that change how fast a run is and no bit of its records.
const std::set<std::string> kFreeOptions = {"/max_num_batched_tokens",
                                            "/max_num_seqs",
                                            "/mla_workspace_tokens",
                                            "/kv_tokens",
                                            "/enforce_eager",
                                            "/enable_prefix_caching",
                                            "/gpu_memory_utilization",
                                            "/data_parallel_size",
                                            "/threads"};

std::ifstream open_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("{}: cannot be opened: {}", path, std::strerror(errno));
  return in;
}

// Counts lines with something other than white space, as RequestReader does.
class LineCounter {
 public:
  void add(std::string_view bytes) {
    for (const char c : bytes) {
      if (c == '\n') {
        end_line();
      } else if (c != ' ' && c != '\t' && c != '\r' && !is_bom(c)) {
        blank_ = false;
      }
      ++column_;
      if (c == '\n') column_ = 0;
    }
  }
  int64_t finish() {
    end_line();
    return records_;
  }

 private:
  // The byte is the next one of a byte order mark at the start of the file.
  bool is_bom(char c) {
    constexpr std::string_view kBom = "\xef\xbb\xbf";
    const bool next = first_line_ && column_ == bom_ && bom_ < kBom.size() && kBom[bom_] == c;
    if (next) ++bom_;
    return next;
  }
  void end_line() {
    // Two of the mark's three bytes are no mark.
    records_ += !blank_ || (first_line_ && bom_ > 0 && bom_ < 3);
    blank_ = true;
    first_line_ = false;
  }
  bool blank_ = true, first_line_ = true;
  size_t column_ = 0, bom_ = 0;
  int64_t records_ = 0;
};

using Fields = std::map<std::string, Json>;

Fields flat_options(const Json& run) {
  Fields options;
  const auto it = run.find("options");
  if (it == run.end() || !it->is_object()) return options;
  const Json flat = it->flatten();
  for (const auto& [name, value] : flat.items())
    if (!kFreeOptions.count(name)) options[name] = value;
  return options;
}

// Hashes of the files beside the weights.
Fields files_of(const Json& run) {
  const Json files = run.value(Json::json_pointer("/model/files"), Json());
  return files.is_object() ? files.get<Fields>() : Fields();
}

std::string option_name(std::string pointer) {
  pointer.erase(0, 1);
  std::replace(pointer.begin(), pointer.end(), '/', '.');
  return pointer;
}

}  // namespace

InputScan scan_input(const std::string& path) {
  std::ifstream in = open_file(path);
  Sha256 hash;
  LineCounter lines;
  std::vector<char> buffer(size_t{1} << 16);
  while (in) {
    in.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    const std::string_view bytes(buffer.data(), static_cast<size_t>(in.gcount()));
    hash.update(bytes);
    lines.add(bytes);
  }
  if (!in.eof() || in.bad()) fail("{}: cannot be read: {}", path, std::strerror(errno));
  return {.sha256 = hash.hex(), .bytes = hash.bytes(), .records = lines.finish()};
}

InputScan scan_text(std::string_view text) {
  Sha256 hash;
  LineCounter lines;
  hash.update(text);
  lines.add(text);
  return {.sha256 = hash.hex(), .bytes = hash.bytes(), .records = lines.finish()};
}

std::string Shard::name() const { return fmt::format("{}/{}", index, count); }

std::optional<Shard> parse_shard(std::string_view text) {
  Shard shard;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, shard.index);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != '/') return std::nullopt;
  const auto second = std::from_chars(first.ptr + 1, end, shard.count);
  if (second.ec != std::errc() || second.ptr != end) return std::nullopt;
  if (shard.index < 0 || shard.index >= shard.count) return std::nullopt;
  return shard;
}

RecordKey record_key(const Json& record, std::string_view what) {
  if (!record.is_object()) fail("{}: expected a record, found {}", what, describe(record));
  const int64_t index = record_index(record, what);
  if (index < 0) fail("{}: field 'index': expected at least 0, found {}", what, index);
  return {.index = index, .ok = record_ok(record, what)};
}

int64_t for_each_record(
    const std::string& path,
    const std::function<void(const RecordKey&, const RecordPlace&, std::string_view)>& visit) {
  std::ifstream in = open_file(path);
  int64_t offset = 0, number = 0;
  std::string line;
  while (std::getline(in, line)) {
    if (in.eof()) break;  // no newline: torn
    ++number;
    line += '\n';
    const auto bytes = static_cast<int64_t>(line.size());
    RecordKey key{};
    try {
      const std::string what = fmt::format("{}: line {}", path, number);
      key = record_key(parse_json(line, what), what);
    } catch (const Error&) {
      if (in.peek() == std::char_traits<char>::eof()) break;  // the last one: torn too
      throw;
    }
    visit(key, {.index = key.index, .offset = offset, .bytes = bytes}, line);
    offset += bytes;
  }
  if (in.bad()) fail("{}: cannot be read: {}", path, std::strerror(errno));
  return offset;
}

EarlierOutput read_earlier_output(const std::string& dir) {
  EarlierOutput earlier;
  std::map<int64_t, RecordPlace> partial, outputs;
  const auto collect = [](const std::string& path, std::map<int64_t, RecordPlace>& finished) {
    bool all = true;
    const auto add = [&](const RecordKey& key, const RecordPlace& place, std::string_view) {
      all &= key.ok;
      if (key.ok) finished.insert({key.index, place});
    };
    const int64_t bytes = for_each_record(path, add);
    return std::pair(bytes, all);
  };
  const std::string partial_path = dir + "/" + kPartialName,
                    outputs_path = dir + "/" + kOutputsName;
  if (fs::exists(partial_path)) {
    earlier.partial_bytes = collect(partial_path, partial).first;
    earlier.partial_size = static_cast<int64_t>(fs::file_size(partial_path));
  }
  if (fs::exists(outputs_path)) {
    const auto [bytes, all] = collect(outputs_path, outputs);
    if (bytes != static_cast<int64_t>(fs::file_size(outputs_path)))
      fail("{}: expected whole records, found a torn last line", outputs_path);
    earlier.has_outputs = true;
    earlier.complete = all;
  }
  for (const auto& [index, place] : partial) earlier.partial.push_back(place);
  for (const auto& [index, place] : outputs)
    if (!partial.count(index)) earlier.outputs.push_back(place);
  return earlier;
}

std::string difference(const Json& expected, const Json& found, bool shard) {
  std::string text;
  const auto differ = [&](const std::string& what, const Json& a, const Json& b) {
    if (a == b) return;
    text += fmt::format("{}{}: expected {}, found {}", text.empty() ? "" : "; ", what, a.dump(),
                        b.dump());
  };
  const std::pair<const char*, const char*> fields[] = {
      {"/model/fingerprint", "checkpoint fingerprint"},
      {"/input/sha256", "SHA-256 of the input"},
      {"/version", "version"}};
  for (const auto& [pointer, name] : fields) {
    const Json::json_pointer at(pointer);
    differ(name, expected.value(at, Json()), found.value(at, Json()));
  }
  const auto each = [&](const Fields& a, const Fields& b, const auto& title) {
    std::set<std::string> names;
    for (const Fields* of : {&a, &b})
      for (const auto& [name, value] : *of) names.insert(name);
    for (const std::string& name : names)
      differ(title(name), a.contains(name) ? a.at(name) : Json(),
             b.contains(name) ? b.at(name) : Json());
  };
  each(files_of(expected), files_of(found),
       [](const std::string& name) { return "checkpoint's " + name; });
  Fields a = flat_options(expected), b = flat_options(found);
  if (!shard) a.erase("/shard"), b.erase("/shard");
  each(a, b, [](const std::string& name) { return "option " + option_name(name); });
  return text;
}

void check_same_run(const std::string& dir, const RunRecord& now) {
  const std::string path = dir + "/" + kRunRecordName;
  if (!fs::exists(path))
    usage_fail("{}: --resume needs it to tell what run the records beside it are of; found none",
               path);
  const Json earlier = read_run_record(path);
  const std::string text = difference(Json(to_json(now)), earlier, true);
  if (!text.empty())
    usage_fail("{}: --resume: the records there are of another run; {}", path, text);
}

}  // namespace mla
