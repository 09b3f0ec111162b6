#!/usr/bin/env bash
# Builds everything and runs the tests; those that need a GPU are skipped where there is none. Installs
# what it needs on Debian and Ubuntu. Arguments go to ctest.
#   PRESET=asan tests/run.sh     the same under AddressSanitizer and UndefinedBehaviorSanitizer
#   CMAKE_ARGS="-D…"             for configuring; -DMLA_WERROR=ON makes warnings errors
set -euo pipefail
cd "$(dirname "$0")/.."

.ci/install-packages --tests
preset=${PRESET:-release}
# shellcheck disable=SC2086
cmake --preset "$preset" -DMLA_TESTS=ON ${CMAKE_ARGS:-} >/dev/null
cmake --build --preset "$preset"
ctest --preset "$preset" --no-tests=error -j "$(nproc)" "$@"
