#include "apps/mla_run/named_file.h"

#include <filesystem>

#include "lib/base/error.h"
#include "lib/batch/output.h"

namespace mla {
namespace {

namespace fs = std::filesystem;

void check_place(const NamedFile& file, const std::vector<std::string>& made) {
  std::error_code ignored;
  if (fs::is_directory(file.path, ignored))
    usage_fail("{}: expected a file, found the folder {}", file.option, file.path);
  const fs::path folder = fs::path(file.path).parent_path();
  if (folder.empty() || fs::is_directory(folder, ignored)) return;
  for (const std::string& dir : made)
    if (same_file(folder.string(), dir)) return;
  usage_fail("{}: expected a folder {}, found none", file.option, folder.string());
}

}  // namespace

void check_named_files(const std::vector<NamedFile>& files, const std::vector<std::string>& others,
                       const std::vector<std::string>& made) {
  std::vector<std::string> taken = others;
  for (const NamedFile& file : files) {
    if (file.path.empty()) continue;
    check_place(file, made);
    std::error_code ignored;
    if (fs::exists(file.path, ignored) && !fs::is_regular_file(file.path, ignored)) continue;
    for (const std::string& other : taken)
      if (same_file(file.path, other))
        usage_fail("{}: expected a file of its own, found {}", file.option, file.path);
    taken.push_back(file.path);
  }
}

}  // namespace mla
