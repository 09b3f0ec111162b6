// The records of a finished run, one by one or by place.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/json.h"

namespace mla {

// What comparing needs of one choice of a record.
struct OutputChoice {
  std::optional<std::string> text;
  std::vector<int32_t> token_ids;
  std::string logprob_hash;
  std::vector<float> logprobs;                 // [token_ids.size()] or empty
  std::vector<std::optional<double>> margins;  // [logprobs.size()], best minus second of `top`
  int64_t prefill_chunks = 0;
};

// The same of one record of outputs.jsonl.
struct OutputRecord {
  Json id;
  std::string key;  // of the join: the id as JSON text, or "line N" where the id is not unique
  bool ok = false;
  std::string error_code;
  std::vector<OutputChoice> choices;  // by index; at least one where ok, else none
  std::optional<std::string> answer;
  int64_t prompt_tokens = 0;
  // [prompt_tokens - 1], of all but the first token, by prompt_logprobs or an echo; else empty.
  std::vector<float> prompt_logprobs;
};

class RunReader {
 public:
  // A run's folder, or its outputs.jsonl. Throws Error: nothing there, a run that is not finished.
  explicit RunReader(const std::string& path);

  const std::string& path() const { return path_; }
  const Json& run() const { return run_; }  // run.json, or null where there is none

  // In order; throws Error, with path and line, on a line that is not a whole record.
  std::optional<OutputRecord> next();

  struct Place {
    int64_t offset = 0;  // bytes
    int64_t line = 0;    // from 1
  };
  Place place() const { return place_; }  // of the record that next() read last
  OutputRecord at(Place place);           // does not move next()

 private:
  std::string path_;
  Json run_;
  std::ifstream in_;
  Place place_;
  Place following_{.offset = 0, .line = 1};
};

}  // namespace mla
