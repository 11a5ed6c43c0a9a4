"""Steps per second of runs of one architecture, one by one and as one program (`sweep --vmap`).

    python benchmarks/together.py [--config=rank_nn_small:rank=8] [--runs=8] [--steps=200]

The runs differ in their seeds. Seconds are those of the training steps with their batches, without start-up
and compilation.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import timing


def measure_seconds(words: list[str], folder: Path, vmap: bool) -> float:
    """Return the seconds of the steps of all runs."""
    command = [sys.executable, "-m", "leanformer.sweep", *words, f"--workdir={folder}", *(["--vmap"] * vmap)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    step_seconds = [json.loads(path.read_text())["seconds"]["steps"] for path in folder.glob("*/summary.json")]
    return max(step_seconds) if vmap else sum(step_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="rank_nn_small:rank=8")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    f = parser.parse_args()
    words = [f"--config={f.config}", f"--seeds={f.runs}", f"--set=total_steps={f.steps}", "--set=optim.warmup_steps=0"]
    words += ["--set=eval.every=0", "--set=probe.every=0", "--set=checkpoint.every=0", "--set=loggers=()"]
    with tempfile.TemporaryDirectory() as root:
        times = [measure_seconds(words, Path(root) / str(vmap), vmap) for vmap in (False, True)]
    rates = [round(f.runs * f.steps / s, 1) for s in times]
    row = {"config": f.config, "runs": f.runs, "alone steps/s": rates[0], "together steps/s": rates[1]}
    timing.show([row | {"ratio": round(times[0] / times[1], 2)}], as_json=f.json)


if __name__ == "__main__":
    main()
