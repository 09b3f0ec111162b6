#!/usr/bin/env bash
# Builds the fuzz targets with clang, in build-fuzz/, and runs each for some seconds.
#   tests/fuzz/run.sh [seconds] [target…]     60 seconds, all targets
#   JOBS=2 tests/fuzz/run.sh                  two targets at a time
# What a run finds is kept in build-fuzz/found/, its corpus in build-fuzz/corpus/. A kept input runs
# alone as build-fuzz/tests/fuzz/fuzz_TARGET FILE. Not part of CI: one long run finds more than many
# short ones.
set -euo pipefail
cd "$(dirname "$0")/../.."

.ci/install-packages --fuzz
seconds=${1:-60}
shift || true
build=build-fuzz
cmake -S . -B "$build" -G Ninja -DMLA_FUZZ=ON -DMLA_TESTS=OFF -DMLA_CUDA=OFF \
  -DCMAKE_CXX_COMPILER=clang++-16 >/dev/null
cmake --build "$build" --target fuzz

targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
  for source in tests/fuzz/*.cpp; do targets+=("$(basename "$source" .cpp)"); done
fi

run_target() {
  local name=$1 log=$build/found/$1.log
  mkdir -p "$build/corpus/$name" "$build/found"
  # One allocation of at most 256 MiB, 1 GiB in all (AddressSanitizer's own included), 10 s an input.
  if ASAN_OPTIONS=quarantine_size_mb=64 "$build/tests/fuzz/fuzz_$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 \
    -malloc_limit_mb=256 -max_len=4096 -print_final_stats=1 -artifact_prefix="$build/found/$name-" \
    -dict="tests/fuzz/dict/$name.txt" "$build/corpus/$name" "tests/fuzz/corpus/$name" \
    >"$log" 2>&1; then
    awk -v name="$name" '/cov:/ {for (i = 1; i < NF; ++i) if ($i == "cov:") cov = $(i + 1)}
      /number_of_executed_units/ {runs = $2} /peak_rss_mb/ {rss = $2}
      END {printf "%-16s %12d executions, coverage %d, %d MiB\n", name, runs, cov, rss}' "$log"
  else
    echo "$name: found something; the end of $log:" >&2
    tail -n 30 "$log" >&2
    return 1
  fi
}
export -f run_target
export build seconds
printf '%s\n' "${targets[@]}" | xargs -P "${JOBS:-1}" -I{} bash -c 'run_target {}'
