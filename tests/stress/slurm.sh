#!/usr/bin/env bash
# What the launchers do on a real SLURM, on this one machine: a dry run, a time limit with its requeue, scontrol requeue,
# scancel, a sweep as an array, and mpirun. Prints a line for each, and ends with 1 if one is not as launch/README.md says.
#
#   tests/stress/slurm.sh [DIR]         about ten minutes; logs and workdirs stay in DIR (a new folder in /tmp by default)
#
# Needs: root, to start SLURM's daemons, and Debian's packages: apt-get install slurm-wlm munge openmpi-bin
#        A .venv with leanformer in it (make demo), or VENV=FOLDER. Skips, with status 0, where root or SLURM is missing.
# The daemons get a configuration of their own; one that is installed here stays untouched, and they end with this script.
# shellcheck disable=SC2329  # "say" and "trap" call them
set -uo pipefail

skip() { echo "Skipped: $1." && exit 0; }
[ "$(id -u)" = 0 ] || skip "SLURM's daemons are started as root, and this is $(id -un)"
for program in slurmctld slurmd munged sbatch mpirun; do
  command -v $program >/dev/null || skip "$program is not here (apt-get install slurm-wlm munge openmpi-bin)"
done

cd "$(dirname "$0")/../.." || exit 2
VENV=$(realpath "${VENV:-.venv}")
DIR=$(realpath "${1:-$(mktemp -d)}") && mkdir -p "$DIR"
export SLURM_CONF=$DIR/slurm.conf JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$DIR/cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 PYTHONPATH=$PWD
echo "Logs and workdirs: $DIR"

# A run of two processes, long enough to be interrupted, small enough to end.
TINY=(--config.total_epochs=0 --config.batch_size=16 --config.log_every=5 --config.eval.every=0
  --config.eval.batch_size=500 --config.probe.every=0 --config.optim.warmup_epochs=0 --config.data.workers=0
  --config.model.width=16 --config.model.depth=1 --config.model.num_heads=2 --config.model.mlp_dim=16)

conf() {
  cat <<END
ClusterName=one
SlurmctldHost=$(hostname -s)
SlurmctldPort=16817
SlurmdPort=16818
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.pid
SlurmdSpoolDir=$DIR/spool
StateSaveLocation=$DIR/state
SlurmUser=root
SlurmdUser=root
SwitchType=switch/none
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=60
OverTimeLimit=2
$(slurmd -C | head -n 1) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
END
}

stop_daemons() {
  scancel --user=root 2>/dev/null
  kill "${daemons[@]}" 2>/dev/null
  wait
}

conf >"$SLURM_CONF"
mkdir -p "$DIR/spool" "$DIR/state" /run/munge && chown munge: /run/munge
daemons=()
pgrep -x munged >/dev/null || { runuser -u munge -- munged --foreground >"$DIR/munged.log" 2>&1 & daemons+=($!); }
slurmctld -D >"$DIR/slurmctld.log" 2>&1 & daemons+=($!)
slurmd -D >"$DIR/slurmd.log" 2>&1 & daemons+=($!)
trap stop_daemons EXIT
for _ in $(seq 60); do
  [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ] && break
  sleep 1
done

# The launcher with its lines marked EDIT set to two processes on this node.
sed -e 's/^#SBATCH --nodes=.*/#SBATCH --nodes=1/' -e 's/^#SBATCH --ntasks-per-node=.*/#SBATCH --ntasks-per-node=2/' \
  -e '/^#SBATCH --gpus-per-node/d' -e '/^#SBATCH --mem=0/d' -e 's/^#SBATCH --cpus-per-task=.*/#SBATCH --cpus-per-task=1/' \
  -e 's/^#SBATCH --time=.*/#SBATCH --time=2/' -e 's/^#SBATCH --signal=.*/#SBATCH --signal=USR1@75/' \
  -e "s|^#SBATCH --output=.*|#SBATCH --output=$DIR/%j.log|" -e 's|^CONFIG=.*|CONFIG=configs/quickstart.py|' \
  -e "s|^WORKDIR=.*|WORKDIR=\${RUN:?}|" -e "s|^source .venv|source $VENV|" launch/slurm.sbatch >"$DIR/job.sbatch"

failed=0
# say NAME COMMAND…: one line, and what the command printed where it fails.
say() {
  local name=$1 said
  shift
  if said=$("$@" 2>&1); then echo "as it should be: $name"; else echo "NOT AS IT SHOULD BE: $name: $said" && failed=1; fi
}
submit() { RUN=$1 sbatch --parsable "${@:2:1}" "$DIR/job.sbatch" "${TINY[@]}" "${@:3}"; }
state() { scontrol --oneliner show job "$1" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
# until_in SECONDS PATTERN FILE: waits until the file has the pattern.
until_in() {
  for _ in $(seq "$1"); do
    grep -q -- "$2" "$3" 2>/dev/null && return 0
    sleep 1
  done
  echo "no \"$2\" in $3 after $1 s"
  tail -n 20 "$3"
  return 1
}
# A job that was put back in the queue waits for two minutes; told to start now, it does.
start_now() {
  for _ in $(seq 60); do
    [ "$(state "$1")" = PENDING ] && scontrol update "JobId=$1" StartTime=now 2>/dev/null && return 0
    sleep 1
  done
  echo "job $1 is $(state "$1")"
  return 1
}

job=$(submit "$DIR/dry" --time=5 --config.total_steps=10 --dry_run)
say "a dry run meets both processes" until_in 120 "Ended with status 0" "$DIR/$job.log"
say "and says so" grep -q "processes  *2 (from SLURM" "$DIR/$job.log"

job=$(submit "$DIR/limit" --time=2 --config.total_steps=1000000)
say "near its time limit a run saves" until_in 180 "Saved at step" "$DIR/$job.log"
say "ends with 75" until_in 60 "Ended with status 75" "$DIR/$job.log"
say "is put back in the queue" start_now "$job"
say "and goes on from there" until_in 120 "Going on from step" "$DIR/$job.log"
saved=$(sed -n 's/^Saved at step \([0-9]*\).*/\1/p' "$DIR/$job.log" | head -n 1)
say "from the step that it saved" grep -q "Going on from step $saved " "$DIR/$job.log"
scancel "$job"

job=$(submit "$DIR/requeue" --time=20 --config.total_steps=1000000)
say "a run trains" until_in 120 "step 20/" "$DIR/$job.log"
scontrol requeue "$job"
say "scontrol requeue: it saves" until_in 90 "Saved at step" "$DIR/$job.log"
say "is started again" start_now "$job"
say "and goes on" until_in 120 "Going on from step" "$DIR/$job.log"

scancel "$job"
ended() {
  for _ in $(seq 90); do
    [ "$(state "$job")" = CANCELLED ] && return 0
    sleep 1
  done
  state "$job"
  return 1
}
say "scancel ends it for good" ended

sweep=("$VENV/bin/python" -m leanformer.sweep --config=configs/quickstart.py "--over=model.num_heads=1,2" --seeds=2
  --cluster=slurm --parallel=2 --minutes=10 --slurm=cpus_per_task=1 "--workdir=$DIR/sweep" --set=total_steps=20)
for word in "${TINY[@]}"; do sweep+=("--set=${word#--config.}"); done
timeout 400 "${sweep[@]}" >"$DIR/sweep.log" 2>&1
say "a sweep of four as an array" test $? = 0
say "all four are finished" test "$(find "$DIR/sweep" -name summary.json | wc -l)" = 4
say "without accounts, and without a complaint of it" test "$(grep -c sacct "$DIR/sweep.log")" = 0

mpi=(mpirun --allow-run-as-root --oversubscribe -n 2 "$VENV/bin/python" -m leanformer.train --config=configs/quickstart.py
  "${TINY[@]}" "--workdir=$DIR/mpi" --config.total_steps=10)
"${mpi[@]}" >"$DIR/mpi.log" 2>&1
say "mpirun -n 2 trains to the end" test $? = 0
say "as two processes" grep -q "2 process" "$DIR/mpi.log"
say "and writes one summary" test -f "$DIR/mpi/summary.json"
exit $failed
