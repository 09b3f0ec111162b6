#!/usr/bin/env bash
# Builds everything and runs the tests that need no GPU. Installs what it needs. Arguments go to ctest.
#   PRESET=asan tests/run.sh     the same under AddressSanitizer and UndefinedBehaviorSanitizer
set -euo pipefail
cd "$(dirname "$0")/.."

.ci/install-packages --tests
preset=${PRESET:-release}
cmake --preset "$preset" -DMLA_WERROR=ON >/dev/null
cmake --build --preset "$preset"
ctest --preset "$preset" -j "$(nproc)" "$@"
