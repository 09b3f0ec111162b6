#!/usr/bin/env bash
# examples/slurm_array.sh on a Slurm of one machine that is started for this test and ended with it:
# four shards, one of them killed and one requeued while they run; the merged file is that of one run
# but for timing. Needs root and Debian's or Ubuntu's packages, which it installs. Not part of
# tests/run.sh.
#   tests/slurm/run.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
program=$(realpath "${1:-build}/mla-run")

missing=
for name in slurmctld slurmd sbatch munged python3; do
  command -v "$name" >/dev/null || missing="$missing $name"
done
if [ -n "$missing" ]; then
  echo "installing Slurm; not found:$missing"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge python3 \
    >/dev/null
fi

dir=$(mktemp -d /tmp/mla-slurm-XXXXXX)
chmod 755 "$dir"
pids=()
end() {
  code=$?
  [ $code -eq 0 ] || tail -n 20 "$dir"/*.log "$dir"/out/logs/*.log || true
  [ -s "$dir/jobs" ] && scancel $(cat "$dir/jobs") 2>/dev/null || true
  sleep 1
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait || true
  rm -rf "$dir"
  exit $code
}
trap end EXIT

start() {  # NAME COMMAND…
  local name=$1
  shift
  "$@" >"$dir/$name.log" 2>&1 &
  pids+=($!)
}
wait_for() {  # SECONDS COMMAND…
  local seconds=$1
  shift
  for ((i = 0; i < seconds * 5; ++i)); do
    "$@" >/dev/null 2>&1 && return
    sleep 0.2
  done
  echo "not within $seconds s: $*" >&2
  return 1
}

# A key, a socket and a configuration of our own, on ports of our own.
mkdir -m 711 "$dir/munge"
mkdir "$dir/ctld" "$dir/d"
dd if=/dev/urandom bs=1 count=1024 of="$dir/munge/key" 2>/dev/null
chmod 400 "$dir/munge/key"
host=$(hostname -s)
cat >"$dir/slurm.conf" <<END
ClusterName=mla
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=2
SlurmctldPort=36817
SlurmdPort=36818
SlurmctldPidFile=$dir/ctld.pid
SlurmdPidFile=$dir/d.pid
StateSaveLocation=$dir/ctld
SlurmdSpoolDir=$dir/d
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,requeue_delay=0
KillWait=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=5 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$dir/slurm.conf
start munged munged --foreground --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
  --pid-file="$dir/munge/pid" --seed-file="$dir/munge/seed" --log-file="$dir/munged-self.log"
wait_for 10 test -S "$dir/munge/socket"
start slurmctld slurmctld -D -f "$SLURM_CONF"
start slurmd slurmd -D -f "$SLURM_CONF"
wait_for 30 bash -c "sinfo -h -o %T | grep -q idle"

python3 - "$dir/p.jsonl" <<'END'
import json, sys
with open(sys.argv[1], "w") as out:
    for i in range(120):
        out.write(json.dumps({"id": f"q{i}", "prompt": [5 + i, 6, 7], "temperature": i % 2,
                              "max_tokens": 200, "ignore_eos": True}) + "\n")
    out.write("{broken\n")
END
options=(-m "$PWD/tests/data/tiny-random" --device cpu --threads 1 --max-num-seqs 2)
code=0
"$program" "${options[@]}" --quiet -o "$dir/whole" "$dir/p.jsonl" || code=$?
[ $code -eq 3 ]  # the broken line

MLA_RUN=$program examples/slurm_array.sh 4 "$dir/p.jsonl" "$dir/out" "${options[@]}" >"$dir/jobs"
read -r array merge <"$dir/jobs"
partial() { [ "$(wc -l <"$dir/out/shards/$1/outputs.jsonl.partial")" -ge 3 ]; }
wait_for 60 partial 1
pid=$(pgrep -f -- "--shard 1/4 -o $dir/out/shards/1 ")
kill -KILL "$pid"
wait_for 60 partial 2
scontrol requeue "${array}_2"
wait_for 240 test -e "$dir/out/run.json"
wait_for 30 bash -c "! squeue -h -j $merge | grep -q ."

grep -q "exit code 137: to be run again" "$dir/out/logs/shard-1.log"
python3 - "$dir" <<'END'
import json, sys
folder = sys.argv[1]
def records(path):
    return [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in open(path)]
merged, whole = records(f"{folder}/out/outputs.jsonl"), records(f"{folder}/whole/outputs.jsonl")
assert merged == whole, "the merged file is not that of one run"
for shard in (1, 2):
    kept = json.load(open(f"{folder}/out/shards/{shard}/run.json"))["counts"]["kept"]
    assert kept >= 3, f"shard {shard}: expected records kept from the run that was ended, found {kept}"
    print(f"shard {shard}: {kept} records kept")
print(f"{len(merged)} records merged, as one run has them")
END
