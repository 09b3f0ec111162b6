#!/usr/bin/env bash
# Builds mla-run, has the small trained model of this folder solve 200 word problems with chunked
# prefill off and on (token budget 64), and compares the two runs: tokens, logprob bits, right
# answers, time. Installs what it needs on Debian and Ubuntu.
# Exits with the comparison's code: 0 when every token and every logprob bit is the same, else 4.
set -euo pipefail
cd "$(dirname "$0")/.."

.ci/install-packages
build=${BUILD_DIR:-build-quickstart}
# The CUDA backend takes minutes to compile and is of use only where there is a GPU.
cuda=OFF
[ -e /dev/nvidia0 ] && cuda=AUTO
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMLA_TESTS=OFF -DMLA_CUDA="$cuda" >/dev/null
cmake --build "$build" --target mla-run

out=${OUT_DIR:-out/quickstart}
exec "$build/mla-run" -m examples/word-problems --chunked-prefill both --max-num-batched-tokens 64 \
  -o "$out" --overwrite examples/prompts.jsonl
