#include "lib/eval/python_random.h"

#include "lib/base/error.h"
#include "lib/base/json.h"
#include "tests/support/catch.h"

namespace mla::python_random_test {
namespace {

using Draw = std::vector<int64_t>;

// Each from one random.Random(1234) of CPython 3.11, called in this order.
TEST_CASE("Draws are those of CPython, from a set and from a list") {
  PythonRandom random(1234);
  CHECK(random.sample(7473, 5) == Draw{6374, 3610, 957, 61, 742});
  CHECK(random.sample(7473, 8) == Draw{7462, 6610, 4769, 286, 5501, 5677, 687, 806});
  CHECK(random.sample(20, 6) == Draw{11, 7, 0, 17, 16, 5});
  CHECK(random.sample(21, 5) == Draw{20, 19, 15, 14, 4});  // the largest that is a list for 5
  CHECK(random.sample(22, 5) == Draw{2, 5, 3, 0, 16});
  CHECK(random.sample(84, 8) == Draw{62, 31, 8, 69, 59, 81, 76, 11});
  CHECK(random.sample(86, 8) == Draw{65, 74, 5, 34, 71, 8, 82, 38});
  CHECK(random.sample(3, 3) == Draw{1, 2, 0});
  CHECK(random.sample(1, 1) == Draw{0});
  CHECK(random.sample(5, 0).empty());
  CHECK(random.sample(4096, 5) == Draw{1638, 3714, 158, 578, 47});
  CHECK(random.sample(70000, 5) == Draw{43713, 18844, 61974, 49459, 21903});
}

// Where the two ways part: the largest list and the smallest set, of seeds that tell them apart.
TEST_CASE("A list and a set are drawn from on the sides of CPython's limit") {
  CHECK(PythonRandom(2).sample(21, 5) == Draw{1, 2, 19, 11, 5});
  CHECK(PythonRandom(2).sample(22, 5) == Draw{1, 2, 11, 5, 21});
  CHECK(PythonRandom(3).sample(85, 8) == Draw{30, 75, 69, 16, 47, 77, 60, 74});
  CHECK(PythonRandom(2).sample(86, 8) == Draw{7, 11, 10, 46, 21, 85, 39, 32});
}

TEST_CASE("More than there are cannot be drawn") {
  PythonRandom random(1234);
  CHECK_THROWS_AS(random.sample(4, 5), Error);
  CHECK_THROWS_AS(random.sample(4, -1), Error);
}

TEST_CASE("The few-shot examples of all 1,319 questions of GSM8K are those of the seed 1234") {
  if (test::assets().empty()) MLA_SKIP("no test assets");
  const std::string path = test::assets() + "/gsm8k/fewshot_indices_seed1234.json";
  const Json expected = parse_json(read_file(path), path);
  REQUIRE(expected.size() == 1319);
  PythonRandom random(1234);
  int same = 0;
  for (const Json& draw : expected) same += random.sample(7473, 5) == draw.get<Draw>();
  CHECK(same == 1319);
}

}  // namespace
}  // namespace mla::python_random_test
