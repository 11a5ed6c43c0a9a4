"""Evaluation of a model: `python -m leanformer.evaluate --workdir=runs/quickstart [--best] [--step=N] [--split=S]`.

Prints the metrics of the run's task on a whole split, by default the evaluation split. Metrics of EMA weights, if the
run keeps them, have the prefix `ema_`. For classification it also computes the confusion matrix, with EMA weights if
available. Writes `evaluation.json` (metrics and `accuracy_by_class`), `confusion.csv` and `plots/confusion.png` to the
workdir, or to --out.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from leanformer import cli


ROWS_PRINTED = 5  # of classes, and of errors


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True),
    cli.Flag("step", "Checkpoint step to evaluate; the newest if neither --step nor --best is given.", int),
    cli.Flag("best", "Evaluate the best checkpoint by validation score.", bool, default=False),
    cli.Flag("split", "Split of the data; by default the run's evaluation split."),
    cli.Flag("out", "Folder to write to; by default WORKDIR."),
    multi_process=True,
)
def main(flags: cli.Values) -> None:
    import jax

    from leanformer import tasks, text
    from leanformer.reports import plots
    from leanformer.runtime import multihost, timing
    from leanformer.runtime.mesh import check_batches, make_mesh
    from leanformer.training import evaluators, inference, run_files
    from leanformer.training import step as steps

    workdir = inference.run_folder(flags.workdir)
    cli.require_deterministic(run_files.load_config(workdir).get("deterministic", False))
    mesh = make_mesh()
    run = inference.open_run(workdir, mesh=mesh, **({} if flags.split is None else {"eval_split": flags.split}))
    config, task = run.config, run.task
    check_batches(mesh, {"eval.batch_size": config.eval.batch_size})
    named = run_files.load_classes(workdir)
    if named is None:  # a run without a list of classes, or of data without classes
        named = tasks.class_names(task.data.open(config.data.train_split))
    source = task.data.open(config.data.eval_split, named)
    restored = inference.restore_weights(workdir, run.model, flags.step, best=flags.best)
    weights = {"ema_": restored.ema} if restored.ema else {}
    if restored.weights is not restored.ema:  # which they are in a folder that `convert` wrote from a run with EMA
        weights = {"": restored.weights} | weights
    eval_step = jax.jit(run.model.eval_step(task.objective, detail=True))
    batches = evaluators.evaluation_batches(config, run.model, task.data, source)
    with timing.announce("Compiling the evaluation step, and evaluating"):
        values = steps.evaluate(eval_step, task.objective.metrics, weights, batches)
    matrices = {name: values.pop(name) for name in [*values] if isinstance(values[name], np.ndarray)}
    values = {"step": restored.step, "split": f"{config.data.name}, {config.data.eval_split}", **values}
    print(text.page(f"Evaluation of {workdir}", text.format_scores(values)))
    if not multihost.is_primary():
        return
    folder = workdir if flags.out is None else Path(flags.out).expanduser()
    counts = matrices.get(f"{[*weights][-1]}confusion")
    if counts is None:
        run_files.write_json(folder / "evaluation.json", values)
        return
    classes = run_files.output_names(named, config.model.num_classes)
    by_class = dict(zip(classes, class_accuracy(counts), strict=True))
    run_files.write_json(folder / "evaluation.json", values | {"accuracy_by_class": by_class})
    write_confusion(folder / "confusion.csv", counts, classes)
    chart = folder / "plots" / "confusion.png"
    chart.parent.mkdir(exist_ok=True)
    plots.plot_confusion(counts, classes, chart, f"{values['split']}, step {values['step']}")
    title = f"Classes of lowest accuracy, and most frequent errors (plot: {chart})"
    print(text.page(title, describe_errors(counts, by_class)))


def class_accuracy(matrix: Int[np.ndarray, "v v"]) -> list[float | None]:
    """Return the accuracy of each class from counts (labels x predictions); None without examples."""
    totals = matrix.sum(axis=1)
    counts = zip(matrix.diagonal(), totals, strict=True)
    return [float(correct / total) if total else None for correct, total in counts]


def most_confused(matrix: Int[np.ndarray, "v v"], most: int) -> list[tuple[int, int, int]]:
    """Return up to `most` of the most frequent errors, each as label, prediction and count."""
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    cells = (tuple(map(int, np.unravel_index(place, wrong.shape))) for place in order)
    return [(label, predicted, int(wrong[label, predicted])) for label, predicted in cells if wrong[label, predicted]]


def describe_errors(counts: Int[np.ndarray, "v v"], by_class: Mapping[str, float | None]) -> dict[str, str]:
    """Return lines on the classes of lowest accuracy, and on the most frequent errors."""
    classes = [*by_class]
    accuracies = {name: value for name, value in by_class.items() if value is not None}
    worst = sorted(accuracies, key=accuracies.__getitem__)[:ROWS_PRINTED]
    rows = {name: f"accuracy {100 * accuracies[name]:.1f} %" for name in worst}
    errors = most_confused(counts, ROWS_PRINTED)
    return rows | {f"{classes[label]} predicted as {classes[other]}": f"{n} times" for label, other, n in errors}


def write_confusion(path: Path, matrix: Int[np.ndarray, "v v"], classes: Sequence[str]) -> None:
    """Write counts (labels x predictions) as CSV, with the names of the classes in the first row and column."""
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        table = csv.writer(file)
        table.writerow(["label \\ predicted", *classes])
        table.writerows([name, *row] for name, row in zip(classes, matrix.tolist(), strict=True))


if __name__ == "__main__":
    cli.run(main)
