// Who may include what: the rules of the house, read from the sources.
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace mla::test::layering_test {
namespace {

namespace fs = std::filesystem;

// "file: line" of every #include below `folder` whose target contains one of `words`.
std::vector<std::string> includes_of(const std::string& folder,
                                     const std::vector<std::string>& words) {
  std::vector<std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(source_path(folder))) {
    const std::string ext = entry.path().extension();
    if (ext != ".h" && ext != ".cpp") continue;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);)
      for (const std::string& word : words)
        if (line.starts_with("#include") && line.find(word) != std::string::npos)
          found.push_back(entry.path().filename().string() + ": " + line);
  }
  return found;
}

TEST_CASE("lib sees no header of CUDA, cuBLAS or NCCL and no backend") {
  for (const char* folder : {"lib", "weights_loader"})
    CHECK(includes_of(folder, {"cuda", "cublas", "nccl", "kernels/cpu"}).empty());
  // The search finds what is there.
  CHECK(!includes_of("kernels/cuda", {"cuda_runtime"}).empty());
}

TEST_CASE("The CUDA backend's factory header is plain C++") {
  const std::set<std::string> plain = {"#include <cstdint>", "#include <memory>",
                                       "#include <string>", "#include \"kernels/ops.h\""};
  std::ifstream in(source_path("kernels/cuda/cuda_backend.h"));
  int includes = 0;
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("#include")) {
      INFO(line);
      CHECK(plain.contains(line));
      ++includes;
    }
  CHECK(includes > 0);
  CHECK(in.eof());
}

}  // namespace
}  // namespace mla::test::layering_test
