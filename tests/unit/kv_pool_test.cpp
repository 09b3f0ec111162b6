#include "lib/schedule/kv_pool.h"

#include <set>
#include <vector>

#include "lib/base/error.h"
#include "lib/base/step_types.h"
#include "tests/support/catch.h"

using mla::KvPool;

TEST_CASE("Tokens round up to whole pages") {
  CHECK(mla::pages_for(0) == 0);
  CHECK(mla::pages_for(1) == 1);
  CHECK(mla::pages_for(63) == 1);
  CHECK(mla::pages_for(64) == 1);
  CHECK(mla::pages_for(65) == 2);
  CHECK(mla::pages_for(2147483647) == 33554432);
}

TEST_CASE("Growing takes only the pages that are missing") {
  KvPool pool(4);
  std::vector<int32_t> a;
  REQUIRE(pool.grow(a, 65));
  CHECK(a == std::vector<int32_t>{0, 1});
  REQUIRE(pool.grow(a, 128));
  CHECK(a.size() == 2);
  REQUIRE(pool.grow(a, 1));
  CHECK(a.size() == 2);
  CHECK(pool.free_pages() == 2);
  CHECK(pool.num_pages() == 4);
}

TEST_CASE("A request beyond the free pages changes nothing") {
  KvPool pool(3);
  std::vector<int32_t> a, b;
  REQUIRE(pool.grow(a, 2 * mla::kPageTokens));
  CHECK_FALSE(pool.grow(b, mla::kPageTokens + 1));
  CHECK(b.empty());
  CHECK(pool.free_pages() == 1);
  CHECK(pool.grow(b, mla::kPageTokens));
  CHECK(pool.free_pages() == 0);
}

TEST_CASE("No page is handed out twice and all come back") {
  KvPool pool(10);
  std::vector<std::vector<int32_t>> tables(5);
  for (auto& t : tables) REQUIRE(pool.grow(t, 100));
  std::set<int32_t> seen;
  for (const auto& t : tables) seen.insert(t.begin(), t.end());
  CHECK(seen.size() == 10);
  CHECK(*seen.begin() == 0);
  CHECK(*seen.rbegin() == 9);
  for (auto& t : tables) {
    pool.release(t);
    CHECK(t.empty());
  }
  CHECK(pool.free_pages() == 10);
}

TEST_CASE("Pages released and taken again are the same ones in the same order") {
  KvPool pool(6);
  std::vector<int32_t> a;
  REQUIRE(pool.grow(a, 200));
  const std::vector<int32_t> before = a;
  pool.release(a);
  REQUIRE(pool.grow(a, 200));
  CHECK(a == before);
}

TEST_CASE("Releasing a free page or a page that is not of the pool is an error") {
  KvPool pool(2);
  std::vector<int32_t> free_page{1};
  CHECK_THROWS_WITH(pool.release(free_page), "KV pool: page 1 is free already");
  std::vector<int32_t> strange{2};
  CHECK_THROWS_WITH(pool.release(strange), "KV pool: released page 2, expected 0 to 1");
  std::vector<int32_t> a;
  REQUIRE(pool.grow(a, 1));
  std::vector<int32_t> copy = a;
  pool.release(a);
  CHECK_THROWS_AS(pool.release(copy), mla::Error);
}

TEST_CASE("A pool without pages is an error") {
  CHECK_THROWS_WITH(KvPool(0), "KV pool: expected at least 1 page, found 0");
}
