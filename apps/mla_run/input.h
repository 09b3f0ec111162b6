// The prompts of a run: a file, a pipe or standard input.
#pragma once

#include <istream>
#include <memory>
#include <optional>
#include <string>

#include "lib/batch/pipe_stream.h"
#include "lib/batch/resume.h"

namespace mla {

// Opened anew for each mode. What can be read only once, standard input or a pipe, is kept when it
// is needed twice. It is opened at once, so that a wrong path is told before anything loads.
class Input {
 public:
  // Throws Interrupted where a signal ends the wait for a pipe.
  Input(const std::string& path, bool twice);
  // `text` in place of a file that need not be there.
  Input(std::string path, std::string text);
  std::istream& open();
  // Whether a read of what was opened last would not wait.
  bool ready() const { return kept_ || !pipe_ || pipe_->ready(); }
  // Throws Error where a pipe ended in an error, which a reader takes for its end.
  void check_read() const;
  // What a file has; nothing of a stream.
  const std::optional<InputScan>& scan() const { return scan_; }
  // What is kept to be read again; nothing of a file.
  const std::optional<std::string>& kept() const { return kept_; }

 private:
  std::string path_;
  std::optional<std::string> kept_;
  std::optional<InputScan> scan_;
  std::unique_ptr<PipeStream> pipe_;  // of what is no regular file
  std::unique_ptr<std::istream> stream_;
};

}  // namespace mla
