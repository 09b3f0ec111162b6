// The program as a child that gets signals, and what its folder says then.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string>

#include "tests/e2e/process.h"

namespace mla::test {

// The program as a child that can get signals; its standard streams are files of `dir`.
class Child {
 public:
  Child(const TempDir& dir, const std::string& arguments, const std::string& input = "/dev/null",
        const std::string& environment = "", const std::string& program = "mla-run")
      : dir_(dir.path()) {
    const std::string command = environment + " exec " + std::string(MLA_BINARY_DIR) + "/" +
                                program + " " + arguments + " >" + dir_ + "/stdout 2>" + dir_ +
                                "/stderr <" + input;
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
  }
  ~Child() {
    if (pid_ > 0) {
      send(SIGKILL);
      wait();
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // Nothing where it has ended: a pid of -1 would mean every process there is.
  void send(int signal) const {
    if (pid_ > 0) kill(pid_, signal);
  }
  bool running() {
    if (pid_ > 0 && waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
    return pid_ > 0;
  }
  // The exit code, 128 + the number of a signal that ended it.
  int wait() {
    if (pid_ > 0) waitpid(pid_, &status_, 0);
    pid_ = -1;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  }
  std::string err() const { return read_file(dir_ + "/stderr"); }

 private:
  std::string dir_;
  pid_t pid_ = -1;
  int status_ = 0;
};

// Asks every 0.2 ms until `done` says yes or the time is over.
template <class Done>
bool wait_until(Done done, double seconds = 60) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    usleep(200);
  }
  return true;
}

// outputs.jsonl without what differs from run to run: the timing.
inline std::string without_timing(const std::string& path) {
  std::ifstream in(path);
  std::string text;
  for (std::string line; std::getline(in, line);) {
    OrderedJson record = OrderedJson::parse(line);
    OrderedJson& body = record.contains("response") ? record["response"]["body"] : record;
    body.erase("timing");
    body.erase("created");
    if (body.contains("choices"))
      for (OrderedJson& choice : body["choices"]) choice.erase("timing");
    text += record.dump() + "\n";
  }
  return text;
}

inline Json run_json(const std::string& folder) {
  return parse_json(read_file(folder + "/run.json"), "run.json");
}

}  // namespace mla::test
