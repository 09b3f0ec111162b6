// Files that options name to be written.
#pragma once

#include <string>
#include <vector>

namespace mla {

struct NamedFile {
  const char* option;
  std::string path;  // "": it was not given
};

// Before any work. `others` are what the command reads or writes besides, `made` the folders that
// it makes. Throws UsageError where a file is a folder, lies in a folder that is not there, or is
// one of the others or of each other. Devices and pipes may be named more than once.
void check_named_files(const std::vector<NamedFile>& files, const std::vector<std::string>& others,
                       const std::vector<std::string>& made = {});

}  // namespace mla
