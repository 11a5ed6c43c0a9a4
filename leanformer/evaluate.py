"""Evaluate a trained model: `python -m leanformer.evaluate --workdir=runs/quickstart [--best] [--step=N] [--split=S]`.

Prints the metrics of the run's task over the whole of a split, by default the evaluation split, of the raw weights and,
where the run keeps them, of the averaged ones (`ema_`); and of classes which is taken for which, by name, of the
averaged ones or else the raw ones. In the workdir are then `evaluation.json`, with the accuracy of each class,
`confusion.csv` and `plots/confusion.png`.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from leanformer import cli, tasks
from leanformer.reports import confusion, plots
from leanformer.runtime import determinism, peers
from leanformer.runtime import mesh as meshes
from leanformer.tasks import artifacts
from leanformer.training import inference, report, streams
from leanformer.training import step as steps


SHOWN = 5  # classes, and mistakes


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True, writes=True),
    cli.Flag("step", "Checkpoint to evaluate; the newest if neither this nor --best is given.", int),
    cli.Flag("best", "Evaluate the best checkpoint by evaluation during training.", bool, default=False),
    cli.Flag("split", "Split of the data; that of the run's evaluations if not given."),
    spread=True,
)
def main(f: cli.Values) -> None:
    workdir = inference.run_folder(f.workdir)
    c = artifacts.load_config(workdir)
    determinism.require(c.get("deterministic", False))
    mesh = meshes.fitting(**c.mesh)
    run = inference.open_run(workdir, mesh=mesh, **({} if f.split is None else {"eval_split": f.split}))
    c, task = run.config, run.task
    meshes.check_batch(mesh, "eval.batch_size", c.eval.batch_size)
    train_source, held_out = tasks.open_data(task.data, c, artifacts.load_classes(workdir))
    artifacts.check_tokenizer(workdir, train_source)
    named = tasks.names(train_source)
    artifacts.warn_missing_classes(workdir, named)
    restored = run.restore(f.step, best=f.best)
    weights = {"": restored.weights} | ({"ema_": restored.ema} if restored.ema else {})
    eval_step = jax.jit(run.model.eval_step(task.objective, detail=True))
    batches = streams.evaluation(c, run.model, task.data, held_out[""])
    values = steps.evaluate(eval_step, task.objective.metrics, weights, batches)
    matrices = {name: values.pop(name) for name in [*values] if isinstance(values[name], np.ndarray)}
    values = {"step": restored.step, "split": f"{c.data.name}, {c.data.eval_split}", **values}
    print(report.page(f"Evaluation of {workdir}", report.rounded(values)))
    if not peers.first():
        return
    counted = matrices.get(f"{[*weights][-1]}confusion")
    if counted is None:
        report.write_json(workdir / "evaluation.json", values)
    else:
        tell(workdir, values, counted, artifacts.output_names(named, c.model.num_classes))


def tell(workdir: Path, values: dict[str, Any], matrix: np.ndarray, classes: list[str]) -> None:
    """Writes the evaluation and its matrix, and says which classes fare worst."""
    by_class = dict(zip(classes, confusion.accuracy(matrix), strict=True))
    report.write_json(workdir / "evaluation.json", values | {"accuracy": by_class})
    confusion.write_csv(workdir / "confusion.csv", matrix, classes)
    chart = workdir / "plots" / "confusion.png"
    chart.parent.mkdir(exist_ok=True)
    plots.plot_confusion(matrix, classes, chart, f"{values['split']}, step {values['step']}")
    known = {name: share for name, share in by_class.items() if share is not None}
    rows = {name: f"{100 * known[name]:.1f} % right" for name in sorted(known, key=known.get)[:SHOWN]}
    mistakes = confusion.mistakes(matrix, SHOWN)
    rows |= {f"{classes[label]} taken for {classes[taken]}": f"{times} times" for label, taken, times in mistakes}
    print(report.page(f"Hardest of {len(known)} classes, and most frequent mistakes; all in {chart}", rows))


if __name__ == "__main__":
    cli.run(main)
