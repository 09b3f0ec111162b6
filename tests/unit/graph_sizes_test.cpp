#include "lib/model/graph_sizes.h"

#include "tests/support/catch.h"

namespace mla::test::graph_sizes_test {

namespace {

using Sizes = std::vector<int32_t>;

TEST_CASE("Decode steps are padded to few sizes, the last of which is the largest step") {
  CHECK(mla::graph_sizes(1) == Sizes{1});
  CHECK(mla::graph_sizes(3) == Sizes{1, 2, 3});
  CHECK(mla::graph_sizes(8) == Sizes{1, 2, 4, 8});
  CHECK(mla::graph_sizes(90) == Sizes{1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 90});
  const Sizes sizes = mla::graph_sizes(1024);
  CHECK(sizes.back() == 1024);
  CHECK(sizes.size() == 11 + 12 + 12);
  for (int32_t rows = 1; rows <= 1024; ++rows) {
    const int32_t size = mla::graph_size(sizes, rows);
    CHECK(size >= rows);
    CHECK((size == rows || mla::graph_size(sizes, rows - 1) == size || rows == 3 || rows == 5 ||
           mla::graph_size(sizes, rows - 1) == rows - 1));
  }
  CHECK(mla::graph_size(sizes, 256) == 256);
  CHECK(mla::graph_size(sizes, 257) == 320);
  CHECK(mla::graph_size(sizes, 1025) == 0);
  CHECK(mla::graph_size({}, 1) == 0);
}

}  // namespace

}  // namespace mla::test::graph_sizes_test
