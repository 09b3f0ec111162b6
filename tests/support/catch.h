// Catch2 2 and 3 under one name, and a skip that both have.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

// Ends the test as skipped. Use where an asset or a GPU is not there.
#define MLA_SKIP(reason)                    \
  do {                                      \
    std::printf("SKIPPED: %s\n", (reason)); \
    ::mla::test::case_skipped = true;       \
    SUCCEED("SKIPPED");                     \
    return;                                 \
  } while (0)

namespace mla::test {

// Read and reset by the main function at the end of each test case.
inline bool case_skipped = false;

// Folder of the released tokenizer, configs and vectors ($MLA_TEST_ASSETS), or "" where absent.
inline std::string assets() {
  const char* env = std::getenv("MLA_TEST_ASSETS");
  const std::string dir = env ? env : MLA_TEST_ASSETS_DEFAULT;
  return std::filesystem::is_directory(dir) ? dir : std::string();
}

// A file or folder of the repository, by its path from the top.
inline std::string source_path(const std::string& path) {
  return std::string(MLA_SOURCE_DIR) + "/" + path;
}

// Whether a part is in a text, which a failed check shows.
inline bool has(const std::string& text, const std::string& part) {
  UNSCOPED_INFO(text);
  return text.find(part) != std::string::npos;
}

// A new empty folder under the system's temporary folder, removed with its contents at the end.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "mla-test-XXXXXX").string();
    if (!mkdtemp(pattern.data())) std::abort();
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace mla::test
