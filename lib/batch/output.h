// outputs.jsonl: appended in order of completion, put into input order at the end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/json.h"

namespace mla {

// A line of a file of records.
struct RecordPlace {
  int64_t index;   // of the record, its place in the input
  int64_t offset;  // of the line in the file
  int64_t bytes;   // with the newline
};

// What an earlier run left in its folder; read_earlier_output (resume.h) makes it.
struct EarlierOutput {
  std::vector<RecordPlace> partial;  // finished records of outputs.jsonl.partial
  int64_t partial_bytes = 0;         // its whole lines; what follows is a torn one
  int64_t partial_size = 0;          // of the file
  std::vector<RecordPlace> outputs;  // finished records of outputs.jsonl not in `partial`
  bool has_outputs = false;          // outputs.jsonl is there
  bool complete = false;             // outputs.jsonl is there and all its records are finished

  bool empty() const { return !has_outputs && partial_bytes == 0; }
  int64_t kept() const { return static_cast<int64_t>(partial.size() + outputs.size()); }
};

struct OutputOptions {
  std::string dir;         // made where it is not there, parents included
  std::string input_path;  // refused as output; "" or "-": no such file
  bool overwrite = false;  // outputs of an earlier run are removed at the start
  // Not null: go on after what the earlier run finished. outputs.jsonl, where it is there, stays
  // until finish() replaces it.
  const EarlierOutput* earlier = nullptr;
};

// Not thread-safe. All errors are Error with the path and the system's reason. A writer that goes
// away before finish() leaves outputs.jsonl.partial with whole lines.
class OutputWriter {
 public:
  // Refuses, without overwrite or earlier, a folder with outputs.jsonl or outputs.jsonl.partial;
  // and always an input file that is one of the files to be written, and a folder another run is
  // writing to.
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
  // The same for a record that is text already, its newline included.
  void write_line(int64_t index, std::string_view line);

  // Writes outputs.jsonl in order of index, synced, renamed into place; removes the partial.
  void finish();

  // Removes what was written, which is of no use.
  void discard();

  int64_t records() const { return static_cast<int64_t>(places_.size()); }

 private:
  OutputWriter() = default;
  void go_on(const EarlierOutput& earlier);
  void copy_sorted(int out, const std::string& out_path);

  std::string dir_;
  std::string path_;  // of the descriptor's file
  int fd_ = -1;
  bool owned_ = false;
  int64_t end_ = 0;
  std::vector<RecordPlace> places_;
};

inline constexpr const char* kOutputsName = "outputs.jsonl";
inline constexpr const char* kPartialName = "outputs.jsonl.partial";
inline constexpr const char* kRunRecordName = "run.json";

// Whether both names are of one file, which need not be there.
bool same_file(const std::string& a, const std::string& b);

// Writes PATH.tmp, syncs it and renames it to PATH, so that a reader sees the old or the new text.
// Of a link, to what it names; into a device, a pipe or a standard stream it is written as it is.
void write_file_atomically(const std::string& path, std::string_view text);

// One line, UTF-8 as it is, no NaN: the form of every record and report that is written.
std::string dump_line(const OrderedJson& value);

}  // namespace mla
