// The message that a call throws, for tests that assert it.
#pragma once

#include <string>

#include "lib/base/error.h"

namespace mla::test {

template <class Call>
std::string error_text(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

}  // namespace mla::test
