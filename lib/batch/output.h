// outputs.jsonl: appended in order of completion, put into input order at the end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/json.h"

namespace mla {

struct OutputOptions {
  std::string dir;         // made where it is not there, parents included
  std::string input_path;  // refused as output; "" or "-": no such file
  bool overwrite = false;  // outputs of an earlier run are removed at the start
};

// Not thread-safe. All errors are Error with the path and the system's reason. A writer that goes
// away before finish() leaves outputs.jsonl.partial with whole lines.
class OutputWriter {
 public:
  // Refuses, without overwrite, a folder with outputs.jsonl or outputs.jsonl.partial; and always an
  // input file that is one of the files to be written, and a folder another run is writing to.
  explicit OutputWriter(const OutputOptions& options);
  // Records go to `fd` (standard output, not closed here), in order of completion: a stream has no
  // end to sort at, and `index` says the input order. finish() then only checks.
  static OutputWriter to_descriptor(int fd, std::string name);

  OutputWriter(OutputWriter&& other) noexcept;
  OutputWriter& operator=(OutputWriter&&) = delete;
  ~OutputWriter();

  // One write(2) a record, its newline included. `index` is the record's place in the input and
  // must be new.
  void write(int64_t index, const OrderedJson& record);

  // Writes outputs.jsonl in order of index, synced, renamed into place; removes the partial.
  void finish();

  int64_t records() const { return static_cast<int64_t>(places_.size()); }

 private:
  struct Place {
    int64_t index;
    int64_t offset;  // of the line in the partial
    int64_t bytes;   // with the newline
  };
  OutputWriter() = default;
  void copy_sorted(int out, const std::string& out_path);

  std::string dir_;
  std::string path_;  // of the descriptor's file
  int fd_ = -1;
  bool owned_ = false;
  int64_t end_ = 0;
  std::vector<Place> places_;
};

inline constexpr const char* kOutputsName = "outputs.jsonl";
inline constexpr const char* kPartialName = "outputs.jsonl.partial";
inline constexpr const char* kRunRecordName = "run.json";

// Writes PATH.tmp, syncs it and renames it to PATH, so that a reader sees the old or the new text.
void write_file_atomically(const std::string& path, std::string_view text);

// One line, UTF-8 as it is, no NaN: the form of every record and report that is written.
std::string dump_line(const OrderedJson& value);

}  // namespace mla
