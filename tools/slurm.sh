#!/usr/bin/env bash
# Test of the launchers with a real SLURM on this machine: a dry run, a time limit with its requeue, scontrol requeue,
# scancel, a sweep as an array, and mpirun. Prints a line per check; exit status 1 if one differs from launch/README.md.
#
#   tools/slurm.sh [DIR]         about ten minutes; logs and workdirs stay in DIR (a new folder in /tmp by default)
#
# Needs: root, to start SLURM's daemons, and Debian's packages: apt-get install slurm-wlm munge openmpi-bin
#        A .venv with leanformer in it (make demo), or VENV=FOLDER. Without root or SLURM it is skipped, with status 0.
# The daemons get a separate configuration, so an installed one is not changed, and they end with this script.
# shellcheck disable=SC2329  # "check" and "trap" call them
set -uo pipefail

skip() { echo "Skipped: $1." && exit 0; }
[ "$(id -u)" = 0 ] || skip "SLURM's daemons are started as root, and this is $(id -un)"
for program in slurmctld slurmd munged sbatch mpirun; do
  command -v $program >/dev/null || skip "$program is not installed (apt-get install slurm-wlm munge openmpi-bin)"
done

cd "$(dirname "$0")/.." || exit 2
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

# The launcher, with its lines marked EDIT set to two processes on this node.
sed -e 's/^#SBATCH --nodes=.*/#SBATCH --nodes=1/' -e 's/^#SBATCH --ntasks-per-node=.*/#SBATCH --ntasks-per-node=2/' \
  -e '/^#SBATCH --gpus-per-node/d' -e '/^#SBATCH --mem=0/d' -e 's/^#SBATCH --cpus-per-task=.*/#SBATCH --cpus-per-task=1/' \
  -e 's/^#SBATCH --time=.*/#SBATCH --time=2/' -e 's/^#SBATCH --signal=.*/#SBATCH --signal=USR1@75/' \
  -e "s|^#SBATCH --output=.*|#SBATCH --output=$DIR/%j.log|" -e 's|^CONFIG=.*|CONFIG=configs/quickstart.py|' \
  -e "s|^WORKDIR=.*|WORKDIR=\${RUN:?}|" -e "s|^source .venv|source $VENV|" launch/slurm.sbatch >"$DIR/job.sbatch"

failed=0
# check NAME COMMAND…: prints one line, with the output of the command if it fails.
check() {
  local name=$1 output
  shift
  if output=$("$@" 2>&1); then echo "passed: $name"; else echo "FAILED: $name: $output" && failed=1; fi
}
submit() { RUN=$1 sbatch --parsable "${@:2:1}" "$DIR/job.sbatch" "${TINY[@]}" "${@:3}"; }
state() { scontrol --oneliner show job "$1" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
# wait_for SECONDS PATTERN FILE: waits until the file contains the pattern.
wait_for() {
  for _ in $(seq "$1"); do
    grep -q -- "$2" "$3" 2>/dev/null && return 0
    sleep 1
  done
  echo "no \"$2\" in $3 after $1 s"
  tail -n 20 "$3"
  return 1
}
# A requeued job waits for two minutes, unless its start time is set to now.
start_now() {
  for _ in $(seq 60); do
    [ "$(state "$1")" = PENDING ] && scontrol update "JobId=$1" StartTime=now 2>/dev/null && return 0
    sleep 1
  done
  echo "job $1 is $(state "$1")"
  return 1
}

job=$(submit "$DIR/dry" --time=5 --config.total_steps=10 --dry_run)
check "a dry run connects both processes" wait_for 120 "Ended with status 0" "$DIR/$job.log"
check "and reports the processes" grep -q "processes  *2 (from SLURM" "$DIR/$job.log"

job=$(submit "$DIR/limit" --time=2 --config.total_steps=1000000)
check "near its time limit a run saves" wait_for 180 "Saved at step" "$DIR/$job.log"
check "ends with 75" wait_for 60 "Ended with status 75" "$DIR/$job.log"
check "is requeued" start_now "$job"
check "and resumes from there" wait_for 120 "Resuming from step" "$DIR/$job.log"
saved=$(sed -n 's/^Saved at step \([0-9]*\).*/\1/p' "$DIR/$job.log" | head -n 1)
check "from the step that it saved" grep -q "Resuming from step $saved " "$DIR/$job.log"
scancel "$job"

job=$(submit "$DIR/requeue" --time=20 --config.total_steps=1000000)
check "a run trains" wait_for 120 "step 20/" "$DIR/$job.log"
scontrol requeue "$job"
check "scontrol requeue: the run saves" wait_for 90 "Saved at step" "$DIR/$job.log"
check "is started again" start_now "$job"
check "and resumes" wait_for 120 "Resuming from step" "$DIR/$job.log"

scancel "$job"
is_cancelled() {
  for _ in $(seq 90); do
    [ "$(state "$job")" = CANCELLED ] && return 0
    sleep 1
  done
  state "$job"
  return 1
}
check "scancel ends the job for good" is_cancelled

sweep=("$VENV/bin/python" -m leanformer.sweep --config=configs/quickstart.py "--over=model.num_heads=1,2" --seeds=2
  --cluster=slurm --parallel=2 --minutes=10 --slurm=cpus_per_task=1 "--workdir=$DIR/sweep" --set=total_steps=20)
for word in "${TINY[@]}"; do sweep+=("--set=${word#--config.}"); done
timeout 400 "${sweep[@]}" >"$DIR/sweep.log" 2>&1
check "a sweep of four as an array" test $? = 0
check "all four are finished" test "$(find "$DIR/sweep" -name summary.json | wc -l)" = 4
check "without accounting, and without an error about it" test "$(grep -c sacct "$DIR/sweep.log")" = 0

mpi=(mpirun --allow-run-as-root --oversubscribe -n 2 "$VENV/bin/python" -m leanformer.train --config=configs/quickstart.py
  "${TINY[@]}" "--workdir=$DIR/mpi" --config.total_steps=10)
"${mpi[@]}" >"$DIR/mpi.log" 2>&1
check "mpirun -n 2 trains to the end" test $? = 0
check "as two processes" grep -q "2 process" "$DIR/mpi.log"
check "and writes one summary" test -f "$DIR/mpi/summary.json"
exit $failed
