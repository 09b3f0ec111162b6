#!/usr/bin/env bash
# Everything that needs a GPU of compute capability 9.0, or as many as there are: builds with the CUDA
# backend, then runs all tests, compute-sanitizer on small shapes, and the benches.
#   tests/gpu.sh [all|test|sanitize|bench]...     all of them by default
#   BUILD_DIR=build-gpu      where to build
#   MLA_TEST_ASSETS=DIR      the released config for the whole-model benches (default ../shared/data)
#   CMAKE_ARGS="-D…"         for configuring; -DMLA_WERROR=ON makes warnings errors
# Installs nothing. Needs what .ci/install-packages --tests installs, the NVIDIA driver with nvidia-smi,
# the CUDA Toolkit, 12.5 or newer, with cuBLAS (bench) and compute-sanitizer (sanitize), and NCCL where
# there are several GPUs. With cuobjdump the machine code of the kernels is looked at too (test).
set -euo pipefail
cd "$(dirname "$0")/.."

steps=("$@")
[ ${#steps[@]} -eq 0 ] && steps=(all)
for step in "${steps[@]}"; do
  case $step in
    all | test | sanitize | bench) ;;
    *)
      echo "tests/gpu.sh: expected steps of: all test sanitize bench; found '$step'" >&2
      exit 2
      ;;
  esac
done
wants() { [[ " ${steps[*]} " == *" all "* || " ${steps[*]} " == *" $1 "* ]]; }

build=${BUILD_DIR:-build-gpu}
export MLA_TEST_ASSETS=${MLA_TEST_ASSETS:-$PWD/../shared/data}
export MLA_REQUIRE_CUDA=1
MLA_REQUIRE_GPUS=$(nvidia-smi --list-gpus | wc -l)
export MLA_REQUIRE_GPUS

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
# shellcheck disable=SC2086
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMLA_CUDA=ON ${CMAKE_ARGS:-} >/dev/null
# The last line of a good build is enough; of a failed one, all that failed.
log=$(mktemp)
trap 'rm -rf "$log" ${model:+"$model"}' EXIT
if ! cmake --build "$build" -- -k 0 >"$log" 2>&1; then
  grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking)' "$log" >&2
  exit 1
fi
tail -n 1 "$log"

# named_tests LINES COMMAND…: runs tests by their names and prints the last lines. Fails where a name is
# of no test too, with which Catch2 may exit 0.
named_tests() {
  local lines=$1 code=0
  shift
  "$@" >"$log" 2>&1 || code=$?
  [ "$code" -eq 0 ] || lines=200
  tail -n "$lines" "$log"
  if grep -F "No test cases matched" "$log" >&2; then code=1; fi
  return "$code"
}

if wants test; then
  (cd "$build" && ctest -j 4 --output-on-failure --timeout 600 | tail -n 40)
  MLA_GPU_ALONE=1 named_tests 3 "$build/tests/e2e_tests" \
    "A run takes the memory that was planned and none after its start"
fi

if wants test && command -v cuobjdump >/dev/null; then
  # The products run on the tensor cores through wgmma, and nothing lives in local memory.
  for file in gemm_tile gemm_stream mla_prefill mla_decode; do
    sass=$(cuobjdump -sass "$build/CMakeFiles/mla_cuda.dir/kernels/cuda/$file.cu.o")
    hgmma=$(grep -c HGMMA <<<"$sass" || true)
    local_memory=$(grep -cE '\b(LDL|STL)\b' <<<"$sass" || true)
    echo "$file: $hgmma HGMMA, $local_memory LDL or STL"
    if [ "$hgmma" -eq 0 ] || [ "$local_memory" -ne 0 ]; then
      echo "expected HGMMA, and neither LDL nor STL" >&2
      exit 1
    fi
  done
fi

if wants sanitize; then
  # Racecheck does not see all hazards of TMA and wgmma: the poisoned buffers and repeated bits of
  # the tests stand beside it.
  small=(
    "Decode bits of a row depend neither on the batch nor on the threads"
    "A decode row without keys has an output of zero and its neighbours keep their bits"
    "Prefill carries its running maximum through rising and falling scores"
    "Prefill multiplies rounded probabilities and divides by the sum of unrounded ones"
    "A padding row goes to no expert and its neighbours keep their bits"
    "A padding row writes no cache and its neighbours keep their bits"
    "A gated layer keeps gate and up in fp32 until the one rounding of their product"
    "The residual is rounded once before its norm"
    "Embedding looks rows up"
    "Top-k and top-p keep the lower id of a tie"
    "Greedy sampling takes the lowest id of the largest logit"
  )
  filter=$(printf '"%s",' "${small[@]}")
  for tool in memcheck racecheck; do
    named_tests 4 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$build/tests/ops_tests" "${filter%,}"
  done
fi

if wants bench; then
  "$build/tests/cuda_ops_bench"
  model=$(mktemp -d)
  cp "$MLA_TEST_ASSETS/configs/DeepSeek-V2-Lite/config.json" "$model/"
  bench() { "$build/mla-run" bench -m "$model" --load-format dummy --quiet --repeats 3 "$@"; }
  bench --chunked-prefill on --max-num-batched-tokens 16384 \
    --workload prefill:16x1024 --workload prefill:1x16384 --workload prefill:1x131072
  bench --chunked-prefill off \
    --workload decode:1x1024x64 --workload decode:8x1024x64 --workload decode:64x1024x64 \
    --workload decode:256x1024x64 --workload decode:1024x1024x32
fi
