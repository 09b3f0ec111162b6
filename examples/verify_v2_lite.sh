#!/usr/bin/env bash
# Is DIR DeepSeek-V2-Lite (base), and are its greedy tokens those of other engines?
#   examples/verify_v2_lite.sh DIR [OPTIONS of mla-run …]
# Runs the eight prompts of v2_lite_greedy.jsonl, without BOS, with chunked prefill off and on (budget
# 8, so that prompts are cut) and says of each how many of its 16 tokens are those recorded. The file
# has greedy answers of two other engines, which it does not name: greedy_ids, the same in five runs of
# the first, and other_engine_ids of the second. The two differ in rows 2, 3 and 5, counted from 0,
# where the best tokens are nearly tied: these rows are only reported.
# Exit 0: both modes are the same bits, and all other rows agree; 4: they do not.
# MLA_RUN: the program, by default build/mla-run. OUT_DIR: for outputs, by default out/verify_v2_lite.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,11s/^# //p' "$0" >&2; exit 2; }
model=$1
shift
here=$(dirname "$0")
program=${MLA_RUN:-$here/../build/mla-run}
golden=${GREEDY:-$here/v2_lite_greedy.jsonl}
out=${OUT_DIR:-out/verify_v2_lite}
mkdir -p "$out"

python3 - "$golden" >"$out/prompts.jsonl" <<'END'
import json, sys
for row, line in enumerate(open(sys.argv[1], encoding="utf-8")):
    print(json.dumps({"id": row, "prompt": json.loads(line)["prompt"], "max_tokens": 16}))
END

code=0
"$program" -m "$model" --chunked-prefill both --max-num-batched-tokens 8 --max-num-seqs 4 \
  --add-bos never --return-token-ids --logprobs 2 --overwrite -o "$out" "$@" \
  "$out/prompts.jsonl" || code=$?
[ $code -eq 0 ] || [ $code -eq 4 ] || exit $code

python3 - "$golden" "$out" <<'END' || code=4
import json, sys
NEAR_TIES = {2, 3, 5}

def lines(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]

def agreeing(ids, expected):
    return next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), len(expected))

rows, good = lines(sys.argv[1]), True
modes = {mode: lines(f"{sys.argv[2]}/{mode}/outputs.jsonl") for mode in ("off", "on")}
print("\ntokens that agree before the first other one, of 16: off, on; the other engine's")
for row, golden in enumerate(rows):
    expected = golden["greedy_ids"]
    same_prompt = all(m[row]["prompt_token_ids"] == golden["prompt_ids"] for m in modes.values())
    counts = [agreeing(m[row]["token_ids"], expected) for m in modes.values()]
    right = same_prompt and all(count == len(expected) for count in counts)
    tie = row in NEAR_TIES
    good &= right or (tie and same_prompt)
    print(f"  row {row}: {counts[0]:2d}, {counts[1]:2d}; "
          f"{agreeing(golden['other_engine_ids'], expected):2d}  "
          f"{'ok' if right else 'near tie, only reported' if tie and same_prompt else 'DIFFERENT'}"
          f"{'' if same_prompt else ': the prompt has other tokens'}  {golden['prompt']!r}")
sys.exit(0 if good else 4)
END
exit $code
