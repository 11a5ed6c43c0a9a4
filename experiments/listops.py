"""Two layers with two heads against one layer with four, on ListOps of 100 to 200 symbols, trained to the end.

    python -m experiments.listops --out=DIR [--seeds=3] [--parallel=1] [--landmarks=0] [--set=KEY=VALUE ...]

Trains every member by the ordinary command (configs/nystromformer_listops_short.py), takes the checkpoint that is best
on the validation split, and scores it on the test split. Prints each seed, means, and the difference of the two shapes
with Welch's 95 % interval over seeds. Finished members are kept in DIR, so the same command goes on where it stopped.
"""

import argparse
import concurrent.futures
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from scipy import stats


ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "nystromformer_listops_short.py"
SHAPES = {"2x2": "depth=2,heads=2", "1x4": "depth=1,heads=4"}


def member(out: Path, shape: str, seed: int, landmarks: int, changes: list[str]) -> dict:
    """Trains and scores one member, or goes on with it: its test accuracy and the seconds it took."""
    workdir, argument = out / f"{shape}_seed{seed}", f"{SHAPES[shape]},landmarks={landmarks}"
    words = [f"--config={CONFIG}:{argument}", f"--config.data.name=listops:{out / 'listops'}", f"--config.seed={seed}"]
    words += [f"--config.{change}" for change in changes]
    for command in (["train", *words], ["evaluate", "--best", "--split=test"]):
        call = [sys.executable, "-m", f"leanformer.{command[0]}", *command[1:], f"--workdir={workdir}"]
        subprocess.run(call, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    summary, test = (json.loads((workdir / f"{name}.json").read_text()) for name in ("summary", "evaluation"))
    return {"shape": shape, "seed": seed, "params": summary["params"], "wall_s": summary["wall_s"], **test}


def difference(a: np.ndarray, b: np.ndarray) -> str:
    """Mean of `a` minus mean of `b` with Welch's 95 % interval."""
    found = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return f"{a.mean() - b.mean():+.2f} points, 95 % interval {found.low:+.2f} to {found.high:+.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--landmarks", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the config, for every member")
    options = parser.parse_args()
    out = options.out.absolute()
    settings, asked = out / "settings.json", {"landmarks": options.landmarks, "set": options.set}
    if settings.is_file() and json.loads(settings.read_text()) != asked:
        parser.error(f"{out} holds members of other settings, see {settings}. Take another --out.")
    build = ["prepare", "build", f"--config={CONFIG}", f"--config.data.name=listops:{out / 'listops'}"]
    build += [f"--config.{change}" for change in options.set]
    subprocess.run([sys.executable, "-m", f"leanformer.{build[0]}", *build[1:]], check=True, cwd=ROOT)
    settings.write_text(json.dumps(asked) + "\n")
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        jobs = [
            pool.submit(member, out, shape, seed, options.landmarks, options.set)
            for seed in range(options.seeds)
            for shape in SHAPES
        ]
        found = [job.result() for job in jobs]
    scores = {}
    for shape in SHAPES:
        rows = [row for row in found if row["shape"] == shape]
        scores[shape] = 100 * np.array([row["top1"] for row in rows])
        seeds = ", ".join(f"{score:.2f}" for score in scores[shape])
        spread = f"{scores[shape].mean():.2f} ± {scores[shape].std(ddof=1):.2f}" if len(rows) > 1 else ""
        minutes = max(row["wall_s"] for row in rows) / 60
        print(f"{shape}  {rows[0]['params']:,} parameters  test {seeds}  {spread}  at most {minutes:.1f} min a run")
    if options.seeds > 1:
        print(f"1x4 minus 2x2: {difference(scores['1x4'], scores['2x2'])}")
    (out / "listops.json").write_text(json.dumps({"members": found, **asked}, indent=1) + "\n")


if __name__ == "__main__":
    main()
