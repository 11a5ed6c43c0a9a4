"""One layer of four heads against two layers of two, on ListOps of 100 to 200 symbols.

    python -m study.heads.listops --out=DIR [--seeds=3] [--landmarks=0]

2026-11-21, three seeds. One layer of four is better: test top-1 of 1x4 is 42.3 ± 1.3 %, of 2x2 37.6 ± 0.1 %, +4.7
points (1.6 to 7.8); 17 % is chance.

Trains configs/nystromformer_listops_short.py, and scores the best checkpoint by the validation split on the test
split. Runs are stored in DIR, so the same command resumes.
"""

import json
from pathlib import Path

import numpy as np

from leanformer import cli, evaluate
from leanformer.analysis import statistics
from study import common


SHAPES = {"2x2": "depth=2,heads=2", "1x4": "depth=1,heads=4"}


def report(scores: dict[str, np.ndarray]) -> str:
    """Format the scores in percent of each shape, and their difference with Welch's 95 % interval."""
    lines = [f"{name}: {x.mean():.2f} (sd {x.std(ddof=1):.2f}), {len(x)} seeds" for name, x in scores.items()]
    difference = statistics.welch(scores["1x4"], scores["2x2"])
    interval = difference.interval()
    return "\n".join([*lines, f"1x4 - 2x2: {difference.value:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"])


@cli.command(
    cli.Flag("out", "Folder for the data and the runs.", required=True),
    cli.Flag("seeds", "Seeds of each shape.", int, default=3),
    cli.Flag("landmarks", "Landmarks of Nyström attention; 0 is exact attention.", int, default=0),
)
def main(f: cli.Values) -> None:
    out, scores = Path(f.out).expanduser().absolute(), {}
    for name, shape in SHAPES.items():
        config = f"--config=nystromformer_listops_short:{shape},landmarks={f.landmarks}"
        common.sweep(out / name, config, f"--set=data.name=listops:{out / 'listops'}", f"--seeds={f.seeds}")
        folders = sorted(path.parent for path in (out / name).glob("*/summary.json"))
        for folder in folders:
            if status := evaluate.main([f"--workdir={folder}", "--best", "--split=test"]):
                raise SystemExit(status)
        values = [json.loads((folder / "evaluation.json").read_text())["top1"] for folder in folders]
        scores[name] = 100 * np.array(values)
    print(report(scores))


if __name__ == "__main__":
    cli.run(main)
