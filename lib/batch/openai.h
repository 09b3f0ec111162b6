// Records of the OpenAI batch API's output files, written and read.
#pragma once

#include <string>
#include <string_view>

#include "lib/base/json.h"
#include "lib/batch/result.h"

namespace mla {

// {"id","custom_id","response":{"status_code":200,"request_id","body"},"error":null}; the body is a
// completion or chat.completion object. Beside OpenAI's fields it has vLLM's (stop_reason and
// token_ids of a choice) and ours: logprob_hash of the choice, and index, timing and answer. The
// timing of one of several choices is its own.
OrderedJson openai_record(const Result& result);

// The same with status 400 and the body {"error":{"message","type","param","code"},"index","line"}.
OrderedJson openai_record(const BadLine& bad);

// A token as OpenAI writes it: its text, or "bytes:\xe2\x80" where its bytes are not whole UTF-8.
std::string token_text(std::string_view bytes);

// Of a record of either form, as this program writes them. `what` names it in errors.
bool is_openai_record(const Json& record);
int64_t record_index(const Json& record, std::string_view what);
bool record_ok(const Json& record, std::string_view what);  // false: an error record

// The body of an OpenAI record's response; throws Error where there is none.
const Json& openai_body(const Json& record, std::string_view what);

}  // namespace mla
