#!/usr/bin/env bash
# Training on one host, with all of its GPUs, in one process.
#
# Needs:  leanformer installed (`pip install -e '.[cuda]'`) for the python on PATH, or the one named by $PYTHON.
# Edit:   nothing. The arguments are the config, the workdir, and flags of leanformer.train.
# Usage:  launch/local.sh configs/vit_b_7x16.py runs/vit_b_7x16 [--dry_run] [--config.mesh.fsdp=8] ...
# Stop:   Ctrl-C or SIGTERM save a checkpoint and end the run; the same command resumes it.
# Fewer GPUs: CUDA_VISIBLE_DEVICES=0,1 launch/local.sh ...
set -euo pipefail
if (($# < 2)); then
  echo "Usage: $0 CONFIG WORKDIR [flags of leanformer.train]" >&2
  exit 2
fi
config=$1 workdir=$2
shift 2
exec "${PYTHON:-python}" -m leanformer.train --config="$config" --workdir="$workdir" "$@"
