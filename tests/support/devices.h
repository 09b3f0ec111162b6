// What a test needs of GPUs, and how it ends where that is not there. Its macros are for tests,
// which include tests/support/catch.h.
#pragma once

#include <cstdint>
#include <string>

namespace mla::test {

// Why there is no CUDA backend, or "".
std::string cuda_absence();

// Why there are not so many GPUs that can work together, or "".
std::string cuda_ranks_absence(int32_t ranks);

// Whether they have to be there: $MLA_REQUIRE_CUDA is set, $MLA_REQUIRE_GPUS is so many or more.
bool cuda_required();
bool gpus_required(int32_t count);

}  // namespace mla::test

// Ends a test that needs what is absent: as skipped, or as failed where it is required.
#define MLA_NEED(absence, required)      \
  do {                                   \
    const std::string missing = absence; \
    if (missing.empty()) break;          \
    if (required) FAIL(missing);         \
    MLA_SKIP(missing.c_str());           \
  } while (0)

#define MLA_NEED_CUDA() MLA_NEED(::mla::test::cuda_absence(), ::mla::test::cuda_required())
#define MLA_NEED_GPUS(ranks) \
  MLA_NEED(::mla::test::cuda_ranks_absence(ranks), ::mla::test::gpus_required(ranks))
