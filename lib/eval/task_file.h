// A task made of the lines of a file of requests, each with its answer.
#pragma once

#include <string>

#include "lib/batch/request.h"
#include "lib/eval/task.h"

namespace mla {

// What `reader` has to say of the file `path`, its first `limit` records (negative: all). A line
// that is no request stays a question, which nobody can answer. Throws Error that names the line:
// a request without `answer`, or with `echo` or n > 1; or where there is none at all.
EvalTask file_task(RequestReader& reader, const std::string& path, int64_t limit);

}  // namespace mla
