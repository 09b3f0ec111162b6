// Going on with a run that ended early, and telling whether two runs would give the same records.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "lib/base/json.h"
#include "lib/batch/output.h"
#include "lib/batch/run_record.h"

namespace mla {

// A file of requests, before it is read record by record.
struct InputScan {
  std::string sha256;
  int64_t bytes = 0;
  int64_t records = 0;  // lines that are not blank
};
InputScan scan_input(const std::string& path);
InputScan scan_text(std::string_view text);

// The I of N of --shard: it has the records whose index is I modulo N.
struct Shard {
  int64_t index = 0, count = 1;
  bool has(int64_t record) const { return record % count == index; }
  std::string name() const;  // "I/N"
  // How many of `records` it has.
  int64_t size(int64_t records) const { return (records - index + count - 1) / count; }
};
// Nothing unless the text is I/N with 0 <= I < N.
std::optional<Shard> parse_shard(std::string_view text);

// What a record of outputs.jsonl is: its place in the input, and whether it is finished ("ok") or a
// failure that a resumed run tries again. Throws Error that begins with `what`.
struct RecordKey {
  int64_t index;
  bool ok;
};
RecordKey record_key(const Json& record, std::string_view what);

// Every line of a file of records, in its order, its newline included. A torn last line, one
// without newline or cut inside, ends the file; a broken line before it is an Error. Returns the
// bytes of the whole lines.
int64_t for_each_record(
    const std::string& path,
    const std::function<void(const RecordKey&, const RecordPlace&, std::string_view line)>& visit);

// outputs.jsonl and outputs.jsonl.partial of a folder, neither, or both (a run that was ended just
// after the rename, or whose failed records were run again). Changes nothing.
EarlierOutput read_earlier_output(const std::string& dir);

// Where two run.json differ in what decides the records: checkpoint, input, program version,
// options other than those that change no bit; "" where they do not. `shard`: whether --shard
// counts.
std::string difference(const Json& expected, const Json& found, bool shard);

// Throws UsageError that names the difference between DIR/run.json and what this run would write.
void check_same_run(const std::string& dir, const RunRecord& now);

}  // namespace mla
