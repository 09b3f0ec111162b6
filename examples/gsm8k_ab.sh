#!/usr/bin/env bash
# Checks that chunked prefill leaves the accuracy as it is: 100 questions of GSM8K, 5 examples each,
# with chunked prefill off and on. Prints beside it the score published with vLLM's MLA chunked
# prefill: 0.66 ± 0.0476 in both modes (DeepSeek-V2-Lite-Chat, tensor parallel over two GPUs).
#   GSM8K=FOLDER examples/gsm8k_ab.sh DIR [OPTIONS of mla-run eval …]
# FOLDER has train.jsonl and test.jsonl; by default it is gsm8k. All options, -tp too, go to mla-run.
# Exits with mla-run's code: 0 when both modes gave the same bits, else 4.
# MLA_RUN: the program, by default build/mla-run. OUT_DIR: for outputs, by default out/gsm8k_ab.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
model=$1
shift
program=${MLA_RUN:-$(dirname "$0")/../build/mla-run}
out=${OUT_DIR:-out/gsm8k_ab}

code=0
"$program" eval gsm8k -m "$model" --data "${GSM8K:-gsm8k}" --num-fewshot 5 --limit 100 \
  --chunked-prefill both --overwrite -o "$out" "$@" || code=$?
[ $code -eq 0 ] || [ $code -eq 3 ] || [ $code -eq 4 ] || exit $code

python3 - "$out" <<'END'
import json, sys
PUBLISHED, ERROR = 0.66, 0.0476
print(f"published: 0.6600 ± {ERROR}, both modes, both filters")
for mode in ("off", "on"):
    scores = json.load(open(f"{sys.argv[1]}/{mode}/results.json"))["results"]["gsm8k"]
    for name in ("strict-match", "flexible-extract"):
        value, error = scores[f"exact_match,{name}"], scores[f"exact_match_stderr,{name}"]
        print(f"{mode:>9}: {value:.4f} ± {error if isinstance(error, str) else f'{error:.4f}'}"
              f"  {name}, {(value - PUBLISHED) / ERROR:+.1f} of the published standard errors")
END
exit $code
