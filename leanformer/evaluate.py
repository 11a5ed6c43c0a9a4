"""Evaluation of a model: `python -m leanformer.evaluate --workdir=runs/quickstart [--best] [--step=N] [--split=S]`.

Prints the metrics of the run's task on a whole split, by default the evaluation split. Metrics of EMA weights, if the
run keeps them, have the prefix `ema_`. For classification it also computes the confusion matrix, with EMA weights if
available. Writes `evaluation.json` with the accuracy per class, `confusion.csv` and `plots/confusion.png` to the
workdir, or to --out.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.analysis import confusion
from leanformer.errors import first_line
from leanformer.training import progress


SHOWN = 5  # printed classes, and printed errors


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True),
    cli.Flag("step", "Checkpoint step to evaluate; the newest if neither --step nor --best is given.", int),
    cli.Flag("best", "Evaluate the best checkpoint by validation score.", bool, default=False),
    cli.Flag("split", "Split of the data; by default the run's evaluation split."),
    cli.Flag("out", "Folder to write to; by default WORKDIR."),
    multi_process=True,
)
def main(f: cli.Values) -> None:
    import jax

    from leanformer import tasks
    from leanformer.runtime import determinism, multihost, phases
    from leanformer.runtime import mesh as meshes
    from leanformer.runtime.watchdog import Watchdog
    from leanformer.tasks import artifacts
    from leanformer.training import inference, streams
    from leanformer.training import step as steps
    from leanformer.training.timer import Timer

    workdir = inference.run_folder(f.workdir)
    c = artifacts.load_config(workdir)
    determinism.require(c.get("deterministic", False))
    mesh = meshes.make_mesh()
    run = inference.open_run(workdir, mesh=mesh, **({} if f.split is None else {"eval_split": f.split}))
    c, task = run.config, run.task
    meshes.check_batches(mesh, {"eval.batch_size": c.eval.batch_size})
    named = artifacts.load_classes(workdir)
    if named is None:  # a run without a list of classes, or of data without classes
        named = tasks.class_names(task.data.open(c.data.train_split))
    source = task.data.open(c.data.eval_split, named)
    timer = Timer()
    with Watchdog(c.hang_seconds, lambda: timer.activity):
        timer.touch("restore")
        restored = run.restore(f.step, best=f.best)
        weights = {"": restored.weights} | ({"ema_": restored.ema} if restored.ema else {})
        eval_step = jax.jit(run.model.eval_step(task.objective, detail=True))
        batches = timer.watched(streams.evaluation(c, run.model, task.data, source), "evaluation")
        with phases.announce("Compiling the evaluation step, and evaluating"):
            values = steps.evaluate(eval_step, task.objective.metrics, weights, batches)
    matrices = {name: values.pop(name) for name in [*values] if isinstance(values[name], np.ndarray)}
    values = {"step": restored.step, "split": f"{c.data.name}, {c.data.eval_split}", **values}
    print(progress.format_page(f"Evaluation of {workdir}", progress.format_scores(values)))
    if not multihost.is_primary():
        return
    counted = matrices.get(f"{[*weights][-1]}confusion")
    classes = artifacts.output_names(named, c.model.num_classes) if counted is not None else []
    recorded = record(workdir, None if f.out is None else Path(f.out).expanduser(), values, counted, classes)
    if counted is not None:
        print(format_errors(counted, classes, recorded))


def record(
    workdir: Path, out: Path | None, values: dict[str, Any], matrix: np.ndarray | None, classes: list[str]
) -> Path | None:
    """Write an evaluation to a folder: its metrics to evaluation.json, and its confusion matrix, if there is one.

    The matrix is written to confusion.csv and plots/confusion.png, and the accuracy per class to evaluation.json. If no
    `out` is given and the run's folder is not writable, a warning is printed to stderr.

    Args:
        workdir: folder of the run, which is written to by default.
        out: folder to write to instead, if not None; it is created.
        values: metrics by name, with `split` and `step`.
        matrix: counts, V V: rows are labels, columns predictions; None without classes.
        classes: names of the V classes; [] without classes.

    Returns:
        The path of the plot; None without a matrix, or if the folder is not writable.

    Raises:
        OSError: `out` is given and cannot be written.
    """

    from leanformer.reports import plots
    from leanformer.training import run_files

    folder = out or workdir
    chart = None if matrix is None else folder / "plots" / "confusion.png"
    by_class = {} if matrix is None else {"accuracy": dict(zip(classes, confusion.accuracy(matrix), strict=True))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run_files.write_json(folder / "evaluation.json", values | by_class)
        if chart is not None and matrix is not None:
            confusion.write_csv(folder / "confusion.csv", matrix, classes)
            chart.parent.mkdir(exist_ok=True)
            plots.plot_confusion(matrix, classes, chart, f"{values['split']}, step {values['step']}")
    except OSError as error:
        if out is not None:
            raise
        reason = error.strerror or first_line(error)
        print(f"WARNING: {workdir}: not recorded: {reason}. Pass --out=DIR.", file=sys.stderr, flush=True)
        return None
    return chart


def format_errors(matrix: np.ndarray, classes: list[str], chart: Path | None) -> str:
    """Return the 5 classes of lowest accuracy and the 5 most frequent errors as text for a terminal.

    Args:
        matrix: counts, V V: rows are labels, columns predictions.
        classes: names of the V classes.
        chart: path of the plot of the matrix, to be named in the title; None if there is none.
    """
    by_class = dict(zip(classes, confusion.accuracy(matrix), strict=True))
    accuracies = {name: value for name, value in by_class.items() if value is not None}
    worst = sorted(accuracies, key=accuracies.__getitem__)[:SHOWN]
    rows = {name: f"accuracy {100 * accuracies[name]:.1f} %" for name in worst}
    errors = confusion.most_confused(matrix, SHOWN)
    rows |= {f"{classes[label]} predicted as {classes[other]}": f"{times} times" for label, other, times in errors}
    plot = f" (plot: {chart})" if chart else ""
    return progress.format_page(f"Lowest accuracy of {len(accuracies)} classes, and most frequent errors{plot}", rows)


if __name__ == "__main__":
    cli.run(main)
