#!/usr/bin/env bash
# One file of prompts over many machines: a Slurm job array with a shard a task, and a job that waits
# for all of them and merges their outputs into OUT/outputs.jsonl.
#   examples/slurm_array.sh SHARDS PROMPTS.jsonl OUT [OPTIONS of mla-run …]
#   SBATCH_OPTIONS="--gpus=1 --time=4:00:00" examples/slurm_array.sh 8 prompts.jsonl out -m DeepSeek-V2-Lite
# A task that fails, or whose machine does, is queued again, three times at most, and goes on with
# --resume. Called again with the same arguments, what is finished is kept.
# MLA_RUN: the program, by default build/mla-run. Prints the numbers of the two jobs.
set -euo pipefail

[ $# -ge 3 ] || { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
shards=$1 prompts=$(realpath "$2") out=$(realpath -m "$3")
shift 3
[[ $shards =~ ^[1-9][0-9]*$ ]] || { echo "SHARDS: expected a number, found '$shards'" >&2; exit 2; }
program=$(realpath "${MLA_RUN:-$(dirname "$0")/../build/mla-run}")
read -ra sbatch_options <<<"${SBATCH_OPTIONS:-}"
mkdir -p "$out/shards" "$out/logs"

# Exit code 3, some lines failed, is a finished shard; 2, a mistake in the options, does not get
# better by doing it again.
task=$(cat <<'END'
#!/usr/bin/env bash
program=$1 prompts=$2 out=$3 shards=$4
shift 4
"$program" run --resume --shard "$SLURM_ARRAY_TASK_ID/$shards" -o "$out/shards/$SLURM_ARRAY_TASK_ID" \
  "$@" "$prompts"
code=$?
[ $code -eq 3 ] && exit 0
if [ $code -ne 0 ] && [ $code -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
  echo "exit code $code: to be run again"
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" && sleep 60  # ends us
fi
exit $code
END
)
merge=$(cat <<'END'
#!/usr/bin/env bash
program=$1 out=$2 shards=$3
dirs=()
for ((i = 0; i < shards; ++i)); do dirs+=("$out/shards/$i"); done
"$program" merge --overwrite -o "$out" "${dirs[@]}"
code=$?
[ $code -eq 3 ] && exit 0
exit $code
END
)

array=$(sbatch --parsable --job-name=mla-run --array="0-$((shards - 1))" --requeue --open-mode=append \
  --output="$out/logs/shard-%a.log" "${sbatch_options[@]}" \
  /dev/stdin "$program" "$prompts" "$out" "$shards" "$@" <<<"$task")
last=$(sbatch --parsable --job-name=mla-merge --dependency="afterok:$array" --kill-on-invalid-dep=yes \
  --output="$out/logs/merge.log" \
  /dev/stdin "$program" "$out" "$shards" <<<"$merge")
echo "$array $last"
