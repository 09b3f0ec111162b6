#include "lib/eval/run_reader.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string_view>

#include "lib/base/error.h"
#include "lib/batch/openai.h"
#include "lib/batch/output.h"
#include "lib/batch/request.h"
#include "lib/batch/run_record.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

// The record's line without its newline; false at the end of the file.
bool read_line(std::ifstream& in, std::string& line, const std::string& path, int64_t number) {
  if (!std::getline(in, line)) {
    if (in.bad()) fail("{}: cannot be read at line {}", path, number);
    return false;
  }
  if (in.eof()) fail("{}:{}: a torn line: expected a newline at its end", path, number);
  return true;
}

std::vector<int32_t> read_token_ids(const Json& object, const std::string& what) {
  const auto it = object.find("token_ids");
  if (it == object.end() || !it->is_array()) fail("{}: field 'token_ids': expected a list", what);
  std::vector<int32_t> ids;
  ids.reserve(it->size());
  for (const Json& id : *it) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > uint64_t{INT32_MAX})
      fail("{}: field 'token_ids': expected token ids, found {}", what, describe(id));
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

std::optional<double> margin_of(const Json& entry, const std::string& what) {
  const auto top = entry.find("top");
  if (top == entry.end() || !top->is_array() || top->size() < 2) return std::nullopt;
  double best[2];
  for (int i = 0; i < 2; ++i) {
    const Json& pair = (*top)[i];
    if (!pair.is_array() || pair.size() != 2 || !pair[1].is_number())
      fail("{}: field 'top': expected [id, logprob], found {}", what, describe(pair));
    best[i] = pair[1].get<double>();
  }
  return best[0] - best[1];
}

void read_logprobs(const Json& object, const std::string& what, OutputChoice& choice) {
  const auto it = object.find("logprobs");
  if (it == object.end() || it->is_null()) return;
  if (!it->is_array() || it->size() != choice.token_ids.size()) {
    fail("{}: field 'logprobs': expected a list of {} entries, found {}", what,
         choice.token_ids.size(), it->is_array() ? fmt::format("{}", it->size()) : describe(*it));
  }
  for (const Json& entry : *it) {
    choice.logprobs.push_back(static_cast<float>(get_number(entry, "logprob", what)));
    choice.margins.push_back(margin_of(entry, what));
  }
}

const Json& object_at(const Json& object, const char* key, const std::string& what) {
  const auto it = object.find(key);
  if (it == object.end()) fail("{}: field '{}': expected an object, found nothing", what, key);
  if (!it->is_object())
    fail("{}: field '{}': expected an object, found {}", what, key, describe(*it));
  return *it;
}

const Json& list_at(const Json& object, const char* key, size_t size, const std::string& what) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_array() || it->size() != size)
    fail("{}: field '{}': expected a list of {} entries", what, key, size);
  return *it;
}

std::optional<double> margin_of(std::vector<double> best) {
  if (best.size() < 2) return std::nullopt;
  std::sort(best.begin(), best.end(), std::greater<>());
  return best[0] - best[1];
}

void read_chat_logprobs(const Json& logprobs, const std::string& what, OutputChoice& choice) {
  for (const Json& entry : list_at(logprobs, "content", choice.token_ids.size(), what)) {
    choice.logprobs.push_back(static_cast<float>(get_number(entry, "logprob", what)));
    std::vector<double> best;
    for (const Json& top : entry.value("top_logprobs", Json::array()))
      best.push_back(get_number(top, "logprob", what));
    choice.margins.push_back(margin_of(std::move(best)));
  }
}

// The first entry is null. `object` is a record of the simple form, or the body of an answer.
void read_prompt_logprobs(const Json& object, const std::string& what, OutputRecord& record) {
  const auto it = object.find("prompt_logprobs");
  if (it == object.end() || it->is_null()) return;
  const auto size = static_cast<size_t>(record.prompt_tokens);
  const Json& list = list_at(object, "prompt_logprobs", size, what);
  for (size_t i = 1; i < size; ++i)
    record.prompt_logprobs.push_back(static_cast<float>(get_number(list[i], "logprob", what)));
}

// With an echo the lists begin with the prompt's tokens, whose logprobs go to `prompt`.
void read_completion_logprobs(const Json& logprobs, int64_t prompt_tokens, const std::string& what,
                              OutputChoice& choice, std::vector<float>& prompt) {
  const size_t generated = choice.token_ids.size();
  const auto all = logprobs.find("token_logprobs");
  const bool echo = all != logprobs.end() && all->size() > generated;
  const size_t begin = echo ? static_cast<size_t>(prompt_tokens) : 0, size = begin + generated;
  const Json& chosen = list_at(logprobs, "token_logprobs", size, what);
  const Json& top = list_at(logprobs, "top_logprobs", size, what);
  prompt.clear();
  for (size_t i = 1; i < begin; ++i) {
    if (!chosen[i].is_number()) fail("{}: field 'logprobs': entry {}: expected a number", what, i);
    prompt.push_back(static_cast<float>(chosen[i].get<double>()));
  }
  for (size_t i = begin; i < size; ++i) {
    if (!chosen[i].is_number() || !top[i].is_object())
      fail("{}: field 'logprobs': entry {}: expected a number and an object", what, i);
    const double logprob = chosen[i].get<double>();
    choice.logprobs.push_back(static_cast<float>(logprob));
    std::vector<double> best;
    for (const auto& [token, value] : top[i].items()) {
      if (!value.is_number()) fail("{}: field 'top_logprobs': expected numbers", what);
      best.push_back(value.get<double>());
    }
    // Of two the lower may be the chosen token, which has a place whatever its rank.
    const bool unsure = best.size() == 2 && logprob < std::max(best[0], best[1]);
    choice.margins.push_back(unsure ? std::nullopt : margin_of(std::move(best)));
  }
}

int64_t prefill_chunks(const Json& object, const std::string& what) {
  const auto timing = object.find("timing");
  if (timing == object.end()) return 0;
  return find_int(*timing, "prefill_chunks", what).value_or(0);
}

// A choice of the simple form: of the list, or the record itself.
OutputChoice read_choice(const Json& object, const std::string& what) {
  OutputChoice choice;
  choice.text = find_string(object, "text", what);
  choice.token_ids = read_token_ids(object, what);
  choice.logprob_hash = get_string(object, "logprob_hash", what);
  choice.prefill_chunks = prefill_chunks(object, what);
  read_logprobs(object, what, choice);
  return choice;
}

OutputChoice read_openai_choice(const Json& object, bool chat, const std::string& what,
                                OutputRecord& record) {
  OutputChoice choice;
  choice.text = chat ? find_string(object_at(object, "message", what), "content", what)
                     : find_string(object, "text", what);
  choice.token_ids = read_token_ids(object, what);
  choice.logprob_hash = get_string(object, "logprob_hash", what);
  choice.prefill_chunks = prefill_chunks(object, what);
  const auto logprobs = object.find("logprobs");
  if (logprobs == object.end() || logprobs->is_null()) return choice;
  chat ? read_chat_logprobs(*logprobs, what, choice)
       : read_completion_logprobs(*logprobs, record.prompt_tokens, what, choice,
                                  record.prompt_logprobs);
  return choice;
}

// Each of the list `choices` by read(choice, what), which names its place.
template <class Read>
void read_choices(const Json& object, const std::string& what, OutputRecord& record,
                  const Read& read) {
  const auto choices = object.find("choices");
  if (choices == object.end() || !choices->is_array() || choices->empty())
    fail("{}: field 'choices': expected a list of at least one choice", what);
  for (const Json& choice : *choices) {
    const auto index = static_cast<int64_t>(record.choices.size());
    const std::string where = fmt::format("{}: choice {}", what, index);
    if (const int64_t found = get_int(choice, "index", where); found != index)
      fail("{}: field 'index': expected {}, found {}", where, index, found);
    record.choices.push_back(read(choice, where));
  }
}

void read_openai(const Json& object, const std::string& what, OutputRecord& record) {
  const Json& body = openai_body(object, what);
  record.answer = find_string(body, "answer", what);
  if (!record.ok) {
    record.error_code = get_string(object_at(body, "error", what), "code", what);
    return;
  }
  const bool chat = get_string(body, "object", what) == "chat.completion";
  record.prompt_tokens = get_int(object_at(body, "usage", what), "prompt_tokens", what);
  read_choices(body, what, record, [&](const Json& choice, const std::string& where) {
    return read_openai_choice(choice, chat, where, record);
  });
  if (record.prompt_logprobs.empty()) read_prompt_logprobs(body, what, record);
  // That of a single choice.
  if (body.contains("timing")) record.choices[0].prefill_chunks = prefill_chunks(body, what);
}

void read_simple(const Json& object, const std::string& what, OutputRecord& record) {
  record.answer = find_string(object, "answer", what);
  if (!record.ok) {
    record.error_code = get_string(object_at(object, "error", what), "code", what);
    return;
  }
  if (object.contains("choices")) {
    read_choices(object, what, record, read_choice);
  } else {
    record.choices.push_back(read_choice(object, what));
  }
  record.prompt_tokens = get_int(object, "prompt_tokens", what);
  read_prompt_logprobs(object, what, record);
}

OutputRecord parse_record(const std::string& line, const std::string& what, int64_t number) {
  const Json object = parse_json(line, what);
  const bool openai = is_openai_record(object);
  OutputRecord record;
  record.ok = record_ok(object, what);
  record.id = object.value(openai ? "custom_id" : "id", Json());
  if (record.ok && !record.id.is_string() && !record.id.is_number_integer())
    fail("{}: field 'id': expected a string or an integer, found {}", what, describe(record.id));
  openai ? read_openai(object, what, record) : read_simple(object, what, record);
  const bool unique = !record.id.is_null() && record.error_code != error_code::kDuplicateId;
  const Json& place = openai ? openai_body(object, what) : object;
  record.key = unique ? record.id.dump()
                      : fmt::format("line {}", find_int(place, "line", what).value_or(number));
  return record;
}

Json finished_run(const fs::path& dir) {
  const std::string path = (dir / kRunRecordName).string();
  if (!fs::exists(path)) return nullptr;
  Json run = read_run_record(path);
  const std::string state = get_string(run, "state", path);
  if (state != "finished")
    fail("{}: the run is not finished: expected state \"finished\", found \"{}\"", path, state);
  return run;
}

}  // namespace

RunReader::RunReader(const std::string& path) : path_(path) {
  const bool folder = fs::is_directory(path);
  const fs::path dir = folder ? fs::path(path) : fs::path(path).parent_path();
  if (folder) path_ = (dir / kOutputsName).string();
  const std::string name = fs::path(path_).filename().string();
  if (!fs::exists(path_)) {
    if (folder && fs::exists(dir / kPartialName))
      fail("{}: the run is not finished: found {} but no {}", path, kPartialName, kOutputsName);
    fail("{}: expected a finished run, found no {}", path, folder ? kOutputsName : "such file");
  }
  if (!fs::is_regular_file(path_))
    fail("{}: expected a file, which is read more than once, found a pipe or a device", path_);
  if (name == kPartialName) fail("{}: the run is not finished", path_);
  if (name == kOutputsName) run_ = finished_run(dir);
  in_.open(path_, std::ios::binary);
  if (!in_) fail("{}: cannot be opened", path_);
}

std::optional<OutputRecord> RunReader::next() {
  in_.clear();
  in_.seekg(following_.offset);
  std::string line;
  if (!read_line(in_, line, path_, following_.line)) return std::nullopt;
  place_ = following_;
  following_.offset += static_cast<int64_t>(line.size()) + 1;
  ++following_.line;
  return parse_record(line, fmt::format("{}:{}", path_, place_.line), place_.line);
}

OutputRecord RunReader::at(Place place) {
  in_.clear();
  in_.seekg(place.offset);
  std::string line;
  if (!read_line(in_, line, path_, place.line))
    fail("{}:{}: expected a record, found the end: the file has changed", path_, place.line);
  return parse_record(line, fmt::format("{}:{}", path_, place.line), place.line);
}

}  // namespace mla
