#include "apps/mla_run/interrupt.h"

#include <unistd.h>

#include <csignal>

namespace mla {
namespace {

volatile std::sig_atomic_t noted = 0;

void note(int) {
  if (noted) _exit(kExitInterrupted);
  noted = 1;
}

}  // namespace

void catch_signals() {
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = note;  // without SA_RESTART: a read that waits for input ends
    sigaction(signal, &action, nullptr);
  }
}

bool interrupted() { return noted != 0; }

void check_interrupt() {
  if (interrupted()) throw Interrupted("interrupted");
}

}  // namespace mla
