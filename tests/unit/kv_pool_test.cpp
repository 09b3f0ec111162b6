#include "lib/schedule/kv_pool.h"

#include <set>
#include <vector>

#include "lib/base/error.h"
#include "lib/base/step_types.h"
#include "tests/support/catch.h"

namespace mla::test::kv_pool_test {

using mla::KvPool;

TEST_CASE("Tokens round up to whole pages") {
  CHECK(mla::pages_of(0) == 0);
  CHECK(mla::pages_of(1) == 1);
  CHECK(mla::pages_of(63) == 1);
  CHECK(mla::pages_of(64) == 1);
  CHECK(mla::pages_of(65) == 2);
  CHECK(mla::pages_of(2147483647) == 33554432);
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

namespace {

// Prompts that are alike in their first `same` tokens.
std::vector<int32_t> prompt_of(int32_t length, int32_t same, int32_t rest) {
  std::vector<int32_t> tokens(static_cast<size_t>(length), rest);
  std::fill_n(tokens.begin(), std::min(length, same), 7);
  return tokens;
}

std::vector<int32_t> table_of(KvPool& pool, const std::vector<int32_t>& tokens) {
  std::vector<int32_t> pages = {};
  pool.share(pool.find_prefix(tokens), pages);
  REQUIRE(pool.grow(pages, static_cast<int32_t>(tokens.size())));
  pool.publish(pages, tokens, 0, static_cast<int32_t>(tokens.size()) / mla::kPageTokens);
  return pages;
}

}  // namespace

TEST_CASE("Tables that begin with the same tokens share whole pages while one of them is held") {
  for (const bool keep : {false, true}) {
    KvPool pool(10, keep);
    auto a = table_of(pool, prompt_of(200, 150, 1));
    CHECK(a == std::vector<int32_t>{0, 1, 2, 3});
    auto b = table_of(pool, prompt_of(200, 150, 2));  // the third page differs
    CHECK(b == std::vector<int32_t>{0, 1, 4, 5});
    CHECK(pool.find_prefix(prompt_of(127, 127, 1)) == std::vector<int32_t>{0});
    CHECK(pool.find_prefix(prompt_of(300, 150, 2)) == std::vector<int32_t>{0, 1, 4});
    CHECK(pool.find_prefix(prompt_of(300, 0, 2)).empty());
    CHECK(pool.free_pages() == 4);
    pool.release(a);
    CHECK(pool.free_pages() == 6);
    CHECK(pool.find_prefix(prompt_of(300, 150, 2)) == std::vector<int32_t>{0, 1, 4});
    // The third page of the first is found only where pages are kept.
    CHECK(pool.find_prefix(prompt_of(300, 150, 1)).size() == (keep ? 3u : 2u));
    pool.release(b);
    CHECK(pool.free_pages() == 10);
    CHECK(pool.find_prefix(prompt_of(300, 150, 2)).size() == (keep ? 3u : 0u));
  }
}

TEST_CASE(
    "Kept pages are taken last, those released first before others and the end of a prefix "
    "before its beginning") {
  KvPool pool(6, true);
  auto a = table_of(pool, prompt_of(192, 192, 0)), b = table_of(pool, prompt_of(64, 0, 3));
  pool.release(a);
  pool.release(b);
  CHECK(pool.free_pages() == 6);
  std::vector<int32_t> c;
  REQUIRE(pool.grow(c, 2 * mla::kPageTokens));  // the two that nobody had
  CHECK(pool.find_prefix(prompt_of(192, 192, 0)).size() == 3);
  REQUIRE(pool.grow(c, 3 * mla::kPageTokens));
  CHECK(pool.find_prefix(prompt_of(192, 192, 0)).size() == 2);
  CHECK(pool.free_among(pool.find_prefix(prompt_of(192, 192, 0))) == 2);
  a = table_of(pool, prompt_of(128, 128, 0));  // held again: not the next one to go
  CHECK(pool.free_among(a) == 0);
  REQUIRE(pool.grow(c, 4 * mla::kPageTokens));
  CHECK(pool.find_prefix(prompt_of(64, 0, 3)).empty());
  CHECK(pool.find_prefix(prompt_of(192, 192, 0)).size() == 2);
  CHECK_FALSE(pool.grow(c, 5 * mla::kPageTokens));
}

TEST_CASE("Of pages with the same tokens one is found and what follows the other is not") {
  KvPool pool(10, true);
  const std::vector<int32_t> tokens = prompt_of(192, 192, 0);
  std::vector<int32_t> a, b;
  REQUIRE(pool.grow(a, 192));
  REQUIRE(pool.grow(b, 192));
  pool.publish(a, tokens, 0, 1);
  pool.publish(b, tokens, 0, 3);
  CHECK(pool.find_prefix(tokens) == std::vector<int32_t>{a[0]});
  pool.publish(a, tokens, 1, 3);
  CHECK(pool.find_prefix(tokens) == a);
  pool.release(a);
  pool.release(b);
  CHECK(pool.free_pages() == 10);
}

TEST_CASE("Nothing is found behind a page that has been given to other tokens") {
  KvPool pool(10, true);
  std::vector<int32_t> tokens = prompt_of(192, 192, 0);
  std::vector<int32_t> a, b, c;
  REQUIRE(pool.grow(a, 192));
  REQUIRE(pool.grow(b, 192));
  const int32_t first = b[0];
  pool.publish(a, tokens, 0, 1);
  pool.publish(b, tokens, 0, 1);  // there is one already
  pool.publish(b, tokens, 1, 3);
  pool.release(b);
  REQUIRE(pool.grow(c, 64));
  REQUIRE(c[0] == first);
  std::fill_n(tokens.begin(), 64, 9);
  pool.publish(c, tokens, 0, 1);
  CHECK(pool.find_prefix(tokens) == c);
}

TEST_CASE("Sharing what is not published or into a table that has pages is an error") {
  KvPool pool(4);
  std::vector<int32_t> a, b;
  REQUIRE(pool.grow(a, 64));
  CHECK_THROWS_WITH(pool.share(a, b), "KV pool: page 0 is shared and not published");
  REQUIRE(pool.grow(b, 64));
  CHECK_THROWS_WITH(pool.share({}, b), "KV pool: a table of 1 pages cannot begin anew");
}

}  // namespace mla::test::kv_pool_test
