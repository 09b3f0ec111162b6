// SIGINT and SIGTERM: the first ends a run in good order, the second at once.
#pragma once

#include "lib/base/error.h"

namespace mla {

inline constexpr int kExitInterrupted = 130;

class Interrupted : public Error {
 public:
  using Error::Error;
};

// From here on the first signal is only noted. A signal that the parent ignores stays ignored.
void catch_signals();
bool interrupted();
// Throws Interrupted after a signal.
void check_interrupt();

}  // namespace mla
