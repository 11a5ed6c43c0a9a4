"""Evaluation of a model: `python -m leanformer.evaluate --workdir=runs/quickstart [--best] [--step=N] [--split=S]`.

Prints the metrics of the run's task on a whole split, by default the evaluation split. Metrics of EMA weights, if the
run keeps them, have the prefix `ema_`. For classification it also computes the confusion matrix, with EMA weights if
available. Writes `evaluation.json` with the accuracy per class, `confusion.csv` and `plots/confusion.png` to the
workdir.
"""

if __name__ == "__main__":
    from leanformer.__main__ import run

    run("evaluate")  # imports this module again, once the command line is parsed


from pathlib import Path
from typing import Any

import jax
import numpy as np

from leanformer import cli, tasks
from leanformer.reports import confusion, plots
from leanformer.runtime import determinism, multihost, phases
from leanformer.runtime import mesh as meshes
from leanformer.tasks import artifacts
from leanformer.training import inference, progress, run_files, streams
from leanformer.training import step as steps


SHOWN = 5  # printed classes, and printed errors


@cli.body("evaluate")
def main(f: cli.Values) -> None:
    workdir = inference.run_folder(f.workdir)
    c = artifacts.load_config(workdir)
    determinism.require(c.get("deterministic", False))
    mesh = meshes.make_fitting_mesh(**c.mesh)
    run = inference.open_run(workdir, mesh=mesh, **({} if f.split is None else {"eval_split": f.split}))
    c, task = run.config, run.task
    meshes.check_batch(mesh, "eval.batch_size", c.eval.batch_size)
    train_source, held_out = tasks.open_data(task.data, c, artifacts.load_classes(workdir))
    artifacts.check_tokenizer(workdir, train_source)
    named = tasks.class_names(train_source)
    artifacts.warn_missing_classes(workdir, named)
    restored = run.restore(f.step, best=f.best)
    weights = {"": restored.weights} | ({"ema_": restored.ema} if restored.ema else {})
    eval_step = jax.jit(run.model.eval_step(task.objective, detail=True))
    batches = streams.evaluation(c, run.model, task.data, held_out[""])
    with phases.announce("Compiling the evaluation step, and evaluating"):
        values = steps.evaluate(eval_step, task.objective.metrics, weights, batches)
    matrices = {name: values.pop(name) for name in [*values] if isinstance(values[name], np.ndarray)}
    values = {"step": restored.step, "split": f"{c.data.name}, {c.data.eval_split}", **values}
    print(progress.format_page(f"Evaluation of {workdir}", progress.round_values(values)))
    if not multihost.is_primary():
        return
    counted = matrices.get(f"{[*weights][-1]}confusion")
    if counted is None:
        run_files.write_json(workdir / "evaluation.json", values)
    else:
        write_report(workdir, values, counted, artifacts.output_names(named, c.model.num_classes))


def write_report(workdir: Path, values: dict[str, Any], matrix: np.ndarray, classes: list[str]) -> None:
    """Write the evaluation and its confusion matrix, and print the classes of lowest accuracy.

    Args:
        workdir: folder of the run.
        values: metrics.
        matrix: counts, V V: rows are labels, columns predictions.
        classes: names of the classes.
    """
    by_class = dict(zip(classes, confusion.accuracy(matrix), strict=True))
    run_files.write_json(workdir / "evaluation.json", values | {"accuracy": by_class})
    confusion.write_csv(workdir / "confusion.csv", matrix, classes)
    chart = workdir / "plots" / "confusion.png"
    chart.parent.mkdir(exist_ok=True)
    plots.plot_confusion(matrix, classes, chart, f"{values['split']}, step {values['step']}")
    accuracies = {name: value for name, value in by_class.items() if value is not None}
    worst = sorted(accuracies, key=accuracies.get)[:SHOWN]
    rows = {name: f"accuracy {100 * accuracies[name]:.1f} %" for name in worst}
    errors = confusion.most_confused(matrix, SHOWN)
    rows |= {f"{classes[label]} predicted as {classes[other]}": f"{times} times" for label, other, times in errors}
    print(
        progress.format_page(
            f"Lowest accuracy of {len(accuracies)} classes, and most frequent errors (plot: {chart})", rows
        )
    )
