#!/usr/bin/env bash
# Training in two processes on the CPU of this machine, connected like hosts of a cluster, to test a multi-process run.
#
# Needs:  leanformer installed for the python on PATH, or the one named by $PYTHON. No GPU, no scheduler.
# Edit:   nothing. PROCESSES=4 starts four processes. MODULE=evaluate or MODULE=probe runs that command instead of train;
#         then the arguments are its flags.
# Usage:  launch/two_process_cpu.sh --config=configs/quickstart.py --workdir=runs/two [--dry_run] ...
# The exit status is the first that is not 0. Ctrl-C and SIGTERM are sent to all processes.
set -euo pipefail
python=${PYTHON:-python} processes=${PROCESSES:-2}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu
set -m # each process has a group of its own: a shell starts others with SIGINT ignored, and Ctrl-C would reach them twice
started=()
for ((i = 0; i < processes; i++)); do
  "$python" -m "leanformer.${MODULE:-train}" "$@" \
    --coordinator="localhost:$port" --processes="$processes" --process="$i" &
  started+=($!)
done
trap 'kill -TERM "${started[@]}" 2>/dev/null || true' TERM
trap 'kill -INT "${started[@]}" 2>/dev/null || true' INT

status=0
for pid in "${started[@]}"; do
  ended=0
  wait "$pid" || ended=$?
  while kill -0 "$pid" 2>/dev/null; do # a signal to this script ends `wait`, but not the process
    ended=0
    wait "$pid" || ended=$?
  done
  if ((status == 0)); then status=$ended; fi
done
exit "$status"
