#include "tests/e2e/bit_contract.h"

namespace mla::test::bit_contract_test {
namespace {

TEST_CASE("The bits of a request depend on nothing around it in bfloat16") {
  check_contract("lite_yarn", DType::bf16);
}

TEST_CASE("The bits of a request depend on nothing around it in float32") {
  check_contract("lite_yarn", DType::f32);
}

TEST_CASE("The bits hold with odd dimensions and expert groups in bfloat16") {
  check_contract("odd_groups", DType::bf16);
}

TEST_CASE("The bits hold with odd dimensions and expert groups in float32") {
  check_contract("odd_groups", DType::f32);
}

}  // namespace
}  // namespace mla::test::bit_contract_test
