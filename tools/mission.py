"""The mission, a line a row: `python tools/mission.py [--only=WORD]`.

Each row runs the tests that show it, slow ones too. Exit status 1 if a row fails; its output is in the folder --out.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path


ROOT = Path(__file__).parents[1]
ROWS = {
    "nine families train a step": ["tests/models/test_zoo.py"],
    "nine families have the published weights' outputs": ["tests/pretrained"],
    "images": ["tests/cli/test_run.py", "tests/test_tutorials.py", "-k", "not text_tutorial"],
    "language": ["tests/tasks", "tests/test_tutorials.py", "-k", "language or text_tutorial or generat or masked"],
    "Long Range Arena": ["tests/data", "tests/tasks", "-k", "sequence or listops or pathfinder or pixel"],
    "GLUE and sentences": ["tests/data", "tests/tasks", "study/tests/test_glue.py", "-k", "sentence or glue"],
    "point sets": ["tests/data", "tests/tasks", "-k", "point"],
    "probe, evaluate, predict, cost": ["tests/cli", "tests/costs"],
    "compare, plan": ["tests/analysis", "tests/reports"],
    "sweep": ["tests/sweeps"],
    "resume bit for bit": ["tests/training/test_resume.py", "tests/cli/test_train.py"],
    "mesh: one device and eight": ["tests/training/test_sharding.py"],
    "hosts: two processes, launchers": ["tests/runtime/test_distributed.py", "tests/test_launch.py"],
    "programs lower for a GPU": ["tests/costs/test_gpu_lowering.py"],
    "exports to transformers and timm": ["tests/exports"],
    "watch: Flax NNX, linen, Equinox, weights": ["tests/watching", "--ignore=tests/watching/test_torch.py"],
    "extend: a model, an attention, a dataset, a command": ["tests/test_recipes.py"],
    "notebooks": ["tests/test_notebooks.py"],
}
TORCH = "watch: PyTorch without JAX"  # in its own environment, see `make .venv/.torch`
TORCH_TESTS = ["tests/watching/test_torch.py", "-o", "addopts=-q", "-o", "filterwarnings=default"]


def run(name: str, command: list[str], out: Path) -> bool:
    """Run the tests of a row, print its line, and return whether they passed."""
    start, log = time.monotonic(), out / f"{name.replace(' ', '_').replace(':', '')}.log"
    with log.open("w") as file:
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    seconds, counts = time.monotonic() - start, log.read_text().strip().splitlines()[-1:]
    print(f"{'FAILED' if status else 'works '}  {name}: {''.join(counts).strip('= ')} [{seconds:.0f} s]", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mission")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch = ROOT / ".venv" / "torch" / "bin" / "python"
    rows = {name: [sys.executable, "-m", "pytest", "-n", args.jobs, *words] for name, words in ROWS.items()}
    rows[TORCH] = [str(torch), "-m", "pytest", *TORCH_TESTS, "--confcutdir=tests/watching"]
    results = [run(name, command, args.out) for name, command in rows.items() if args.only in name]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
