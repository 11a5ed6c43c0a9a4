"""Evaluate a trained model: `python -m leanformer.evaluate --workdir=runs/quickstart [--best] [--step=N] [--split=S]`.

Prints loss, top-1 and top-5 over the whole of a split, by default the evaluation split, of the raw weights and, where
the run keeps them, of the averaged ones (`ema_`), and writes them to `evaluation.json` in the workdir.
"""

import jax

from leanformer import cli, determinism, experiment, inputs, labels, report
from leanformer import mesh as meshes
from leanformer import step as steps
from leanformer.checkpoint import Checkpoints
from leanformer.errors import CheckpointError, ConfigError


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True),
    cli.Flag("step", "Checkpoint to evaluate; the newest if neither this nor --best is given.", int),
    cli.Flag("best", "Evaluate the best checkpoint by evaluation during training.", bool, default=False),
    cli.Flag("split", "Split of the data; that of the run's evaluations if not given."),
    spread=True,
)
def main(f: cli.Values) -> None:
    if f.best and f.step is not None:
        raise ConfigError(f"--best and --step={f.step} exclude each other.")
    workdir = cli.existing(f.workdir)
    c = report.read_config(workdir)
    determinism.require(c.get("deterministic", False))
    if f.split is not None:
        c.unlock()
        c.data.eval_split = f.split
    train_source, source = inputs.open_data(c, labels.read(workdir))
    labels.tell_old(workdir, train_source.classes)
    run = experiment.build(c, examples=len(train_source), mesh=meshes.fitting(**c.mesh))
    with Checkpoints(workdir / "checkpoints", c.checkpoint.keep) as saved:
        wanted = saved.best() if f.best else f.step
        if f.best and wanted is None:
            raise CheckpointError(f"No checkpoint in {saved.folder} was evaluated during training; leave out --best.")
        restored = saved.restore(run.like, wanted)
        if restored is None:
            raise CheckpointError(f"{saved.folder} holds no checkpoint yet. Train first.")
        state, _ = restored
    weights = {"": state.weights} | ({"ema_": state.ema} if c.optim.ema else {})
    values = steps.evaluate(jax.jit(run.eval_step), weights, run.eval_stream(source))
    values = {"step": int(state.step), "split": f"{c.data.name}, {c.data.eval_split}", **values}
    report.write_json(workdir / "evaluation.json", values)
    print(report.page(f"Evaluation of {workdir}", values))


if __name__ == "__main__":
    cli.run(main)
