"""Evaluation of a model: `python -m leanformer.evaluate --workdir=runs/quickstart [--best] [--step=N] [--split=S]`.

Prints the metrics of the run's task on a whole split, by default the evaluation split. Metrics of EMA weights, if the
run keeps them, have the prefix `ema_`. For classification it also computes the confusion matrix, with EMA weights if
available. Writes `evaluation.json` with the accuracy per class, `confusion.csv` and `plots/confusion.png` to the
workdir, or to --out.
"""

from pathlib import Path

import numpy as np

from leanformer import cli
from leanformer.analysis import confusion
from leanformer.runtime import text


ROWS_PRINTED = 5  # of classes, and of errors


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
    from leanformer.reports import plots
    from leanformer.runtime import mesh as meshes
    from leanformer.runtime import multihost, startup, timing
    from leanformer.runtime.timing import Timer, Watchdog
    from leanformer.tasks import artifacts
    from leanformer.training import evaluators, inference, run_files
    from leanformer.training import step as steps

    workdir = inference.run_folder(f.workdir)
    c = artifacts.load_config(workdir)
    startup.require_deterministic(c.get("deterministic", False))
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
        batches = timer.watched(evaluators.evaluation_batches(c, run.model, task.data, source), "evaluation")
        with timing.announce("Compiling the evaluation step, and evaluating"):
            values = steps.evaluate(eval_step, task.objective.metrics, weights, batches)
    matrices = {name: values.pop(name) for name in [*values] if isinstance(values[name], np.ndarray)}
    values = {"step": restored.step, "split": f"{c.data.name}, {c.data.eval_split}", **values}
    print(text.page(f"Evaluation of {workdir}", text.format_scores(values)))
    if not multihost.is_primary():
        return
    folder = workdir if f.out is None else Path(f.out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    counts = matrices.get(f"{[*weights][-1]}confusion")
    if counts is None:
        run_files.write_json(folder / "evaluation.json", values)
        return
    classes = artifacts.output_names(named, c.model.num_classes)
    by_class = dict(zip(classes, confusion.accuracy(counts), strict=True))
    run_files.write_json(folder / "evaluation.json", values | {"accuracy": by_class})
    confusion.write_csv(folder / "confusion.csv", counts, classes)
    chart = folder / "plots" / "confusion.png"
    chart.parent.mkdir(exist_ok=True)
    plots.plot_confusion(counts, classes, chart, f"{values['split']}, step {values['step']}")
    print(format_errors(counts, by_class, chart))


def format_errors(counts: np.ndarray, by_class: dict[str, float | None], chart: Path) -> str:
    """Return the classes of lowest accuracy and the most frequent errors as text for a terminal.

    Args:
        counts: confusion matrix, V V: rows are labels, columns predictions.
        by_class: accuracy of each of the V classes by name; None without examples.
        chart: path of the plot of the matrix.
    """
    classes = [*by_class]
    accuracies = {name: value for name, value in by_class.items() if value is not None}
    worst = sorted(accuracies, key=accuracies.__getitem__)[:ROWS_PRINTED]
    rows = {name: f"accuracy {100 * accuracies[name]:.1f} %" for name in worst}
    errors = confusion.most_confused(counts, ROWS_PRINTED)
    rows |= {f"{classes[label]} predicted as {classes[other]}": f"{times} times" for label, other, times in errors}
    title = f"Lowest accuracy of {len(accuracies)} classes, and most frequent errors (plot: {chart})"
    return text.page(title, rows)


if __name__ == "__main__":
    cli.run(main)
