"""Heads at fixed total width in small GPTs: part 1 of PLAN.md.

    python -m study.heads.language --out=DIR [--blocks=A,E,E2,B,F,D,G,C | --blocks=C:4,C:32]

Trains the arms of the blocks in order, or single arms by their number of heads, one run after another: first three
learning rates with seed 100, then the best of them with seeds 0, 1, 2. Runs are stored in DIR, so the same command
resumes, and every finished run is a row of study/data/study_language.csv, which `study.heads.verdicts`
reads. On a GPU: JAX_DEFAULT_MATMUL_PRECISION=highest for float32 as on a CPU, and XLA_FLAGS=--xla_gpu_autotune_level=0
if several run at once, since eight without it waited minutes for compilation on an H200.
"""

import csv
import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from leanformer import cli, config
from leanformer.conditioning import Summary, condition
from leanformer.costs import count
from leanformer.errors import ConfigError
from leanformer.runtime.mesh import make_mesh
from leanformer.training import evaluators, inference, model_setup, run_files, step
from study import common


ROWS = Path(__file__).parents[1] / "data" / "study_language.csv"
RATES, TUNING_SEED, SEEDS = (2e-3, 4e-3, 8e-3), 100, (0, 1, 2)
DEPTH, TOKENS, SHORT, LONG = 4, 128, 1000, 4000
REPAIRED = 32  # dimension of queries and keys in block E
FIELDS = ("block", "num_heads", "width", "head_dim", "value_dim", "mlp_dim", "params", "steps", "lr", "seed", "loss")
FIELDS += ("train_loss", "log10_condition", "bounds", "output_rank", "attention_rank", "attention_entropy")
FIELDS += ("date", "device")
ROWS_PROBED = 8  # held-out rows of tokens on which conditioning is measured


class Block(NamedTuple):
    """Arms that differ in the number of heads only."""

    width: int
    heads: tuple[int, ...]
    keys: dict[str, Any]  # of the config's section model
    steps: int = SHORT
    query_key_dim: int | None = None  # width / heads if None
    mlp_as: str | None = None  # block whose parameter count the MLP is widened to


BLOCKS = {
    "A": Block(128, (1, 2, 4, 8, 16, 32), {}),
    "B": Block(128, (1, 2, 4, 8, 16, 32), {"qk_norm": "rmsnorm"}),
    "C": Block(128, (1, 4, 16, 32), {"positions": "none", "rotary": 10_000.0}),
    "D": Block(128, (1, 4, 16, 32), {}, LONG),
    "E": Block(128, (8, 16, 32), {}, query_key_dim=REPAIRED),
    "E2": Block(128, (8, 16, 32), {}, mlp_as="E"),
    "F": Block(64, (1, 2, 4, 8, 16), {}),
    "G": Block(256, (1, 2, 4, 8, 16, 32), {}),
    "H": Block(512, (1, 2, 4, 8, 16), {}),
    "I": Block(64, (1, 4, 16), {}, LONG),
    "J": Block(256, (1, 4, 16, 32), {}, LONG),
}


class Arm(NamedTuple):
    """Block and number of heads."""

    block: str
    heads: int


def parse_arms(text: str) -> list[Arm]:
    """Return the arms of a block, "C", or one of them, "C:32". Raises ConfigError if the plan has no such arm."""
    block, _, heads = text.partition(":")
    arms = [Arm(block, n) for n in BLOCKS[block].heads if heads in ("", str(n))] if block in BLOCKS else []
    if not arms:
        planned = "; ".join(f"{name} with {', '.join(map(str, b.heads))} heads" for name, b in BLOCKS.items())
        raise ConfigError(f"--blocks={text}: not in the plan. Choose from {planned}.")
    return arms


def get_config(arm: Arm, lr: float, seed: int) -> config.ConfigDict:
    """Return the config of a run."""
    block = BLOCKS[arm.block]
    c = make_config(block, lr, seed).unlock()
    value_dim = block.width // arm.heads
    c.model.update(num_heads=arm.heads, head_dim=block.query_key_dim or value_dim, value_dim=value_dim, **block.keys)
    if block.mlp_as:
        c.model.mlp_dim = widen_mlp(c, count_parameters(get_config(Arm(block.mlp_as, arm.heads), lr, seed)))
    return c.lock()


def make_config(block: Block, lr: float, seed: int) -> config.ConfigDict:
    """Return the config that all arms of a block share, whose heads are not set yet."""
    c = config.load("quickstart_gpt").unlock()
    c.update(total_steps=block.steps, batch_size=16, seed=seed, loggers=(), log_every=100)
    c.model.update(width=block.width, depth=DEPTH, mlp_dim=4 * block.width, max_length=TOKENS)
    c.optim.update(lr=lr, warmup_steps=100)
    c.probe.every = 0
    c.eval.update(every=0, batch_size=64)
    c.checkpoint.update(every=500, keep=1)
    return c.lock()


def count_parameters(c: config.ConfigDict) -> int:
    """Return the number of parameters of a config's model."""
    model = model_setup.set_up_model(c, mesh=make_mesh(devices=jax.devices()[:1]))
    return count.parameters(model.weights)


def widen_mlp(c: config.ConfigDict, params: int) -> int:
    """Return the MLP width at which the model has the nearest number of parameters to `params`."""
    per_unit = DEPTH * (2 * c.model.width + 1)
    return c.model.mlp_dim + round((params - count_parameters(c)) / per_unit)


def plan_tuning(
    arm: Arm, rows: list[dict[str, Any]], rates: Sequence[float] = RATES, score: str = "loss"
) -> Iterator[float]:
    """Yield the learning rates that an arm still has to try: `rates`, then one beyond an edge."""
    tried = {row["lr"]: row[score] for row in rows_of(rows, arm, TUNING_SEED)}
    missing = [lr for lr in rates if lr not in tried]
    yield from missing
    if not missing and len(tried) == len(rates):
        best = min(tried, key=tried.__getitem__)
        if best in (rates[0], rates[-1]):
            yield best / 2 if best == rates[0] else best * 2


def best_rate(arm: Arm, rows: list[dict[str, Any]], score: str = "loss") -> float:
    """Return the learning rate with the lowest score of the tuning seed."""
    return float(min(rows_of(rows, arm, TUNING_SEED), key=lambda row: row[score])["lr"])


def rows_of(rows: list[dict[str, Any]], arm: Arm, seed: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of an arm, of one seed if given."""
    return [r for r in rows if Arm(r["block"], r["num_heads"]) == arm and seed in (None, r["seed"])]


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the rows of finished runs, numbers as numbers and lists by layer as tuples."""
    if not path.is_file():
        return []
    words = ("block", "texts", "arm", "rotary", "size", "date", "device")
    whole = ("depth", "num_heads", "width", "head_dim", "value_dim", "mlp_dim", "params", "step", "steps", "seed")

    def parse(key: str, text: str) -> Any:
        kind: Any = str if key in words else int if key in whole else float
        return tuple(map(kind, text.split())) if " " in text and kind is not str else kind(text)

    with path.open(newline="") as file:
        return [{key: parse(key, text) for key, text in row.items()} for row in csv.DictReader(file)]


def append_row(row: dict[str, Any], path: Path = ROWS, fields: Sequence[str] = FIELDS) -> None:
    """Add a line to the table, with a header if it is new."""
    new = not path.is_file()
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            table.writeheader()
        table.writerow(row)


def name_run(arm: Arm, lr: float, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{arm.block}-heads={arm.heads}-lr={lr:g}-seed={seed}"


def run(arm: Arm, lr: float, seed: int, out: Path) -> dict[str, Any]:
    """Train one run, or read it if it is finished, and return its row."""
    c = get_config(arm, lr, seed)
    workdir = out / name_run(arm, lr, seed)
    trained, m = train(c, workdir), c.model
    return {
        **{"block": arm.block, "num_heads": arm.heads, "width": m.width, "head_dim": m.head_dim},
        **{"value_dim": m.value_dim, "mlp_dim": m.mlp_dim, **trained},
        **{name: f"{value:.4f}" for name, value in measure_at_end(workdir).items()},
    }


def train(c: config.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Train a config, or read its run if it is finished, and return the columns of a row that do not need the model."""
    summary = common.train(c, workdir)
    training = run_files.read_records(workdir, "train")[-1]["loss"]
    return {
        **{"params": summary["params"], "steps": c.total_steps, "lr": c.optim.lr, "seed": c.seed},
        **{"loss": f"{summary['final']['loss']:.5f}", "train_loss": f"{training:.5f}"},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "device": jax.devices()[0].device_kind,
    }


def probe_at_end(workdir: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return measures of a finished run on held-out rows: two summaries of a matrix, of its last width / 4 rows and of
    all.

    The matrix of all 128 tokens is singular in float32 in every model, since causal attention averages few values in
    the first rows.
    """
    opened = inference.open_run(workdir)
    tail = opened.config.model.width // 4

    def reduce(x: jax.Array) -> tuple[Summary, Summary]:
        return condition(x[..., -tail:, :]), condition(x)

    read = jax.jit(step.make_probe_step(opened.model.graphdef, opened.task.objective, names, reduce=reduce))
    split = opened.task.data.open(opened.config.data.eval_split)
    batch = evaluators.probe_batch(opened.model, opened.task.data, split, ROWS_PROBED)
    return jax.device_get(read(inference.restore_weights(workdir, opened.model).weights, batch))


def measure_at_end(workdir: Path) -> dict[str, float]:
    """Return medians over layers, held-out rows and heads of a finished run, and the share of κ that are bounds.

    κ is measured on the concatenated head outputs of the last width / 4 tokens, see `probe_at_end`.
    """
    values = probe_at_end(workdir, ("attention_output", "attention_probabilities", "attention_entropy"))
    (last, whole), (_, probabilities) = values["attention_output"], values["attention_probabilities"]
    return {
        "log10_condition": float(np.median(last.log10_condition)),
        "bounds": float(np.mean(last.negligible > 0)),
        "output_rank": float(np.median(whole.effective_rank)),
        "attention_rank": float(np.median(probabilities.effective_rank)),
        "attention_entropy": float(np.median(values["attention_entropy"].value)),
    }


class Study(NamedTuple):
    """How the arms of a part of the study are trained and recorded.

    Attributes:
        run: function from (arm, learning rate, seed, folder of the runs) that trains one run and returns its row.
        path: table of the rows.
        fields: its columns.
        rates: learning rates of the tuning runs, in increasing order.
        score: column whose least value chooses the learning rate.
    """

    run: Callable[[Arm, float, int, Path], dict[str, Any]] = run
    path: Path = ROWS
    fields: Sequence[str] = FIELDS
    rates: Sequence[float] = RATES
    score: str = "loss"


LANGUAGE = Study()


def finish_arm(arm: Arm, seeds: Sequence[int], out: Path, study: Study = LANGUAGE) -> None:
    """Train what is missing of an arm: tuning runs first, then the seeds at the best learning rate."""
    path = study.path
    while rates := list(plan_tuning(arm, read_rows(path), study.rates, study.score)):
        for lr in rates:
            record(arm, study.run(arm, lr, TUNING_SEED, out), path, study.fields)
    lr = best_rate(arm, read_rows(path), study.score)
    for seed in seeds:
        if not rows_of(read_rows(path), arm, seed):
            record(arm, study.run(arm, lr, seed, out), path, study.fields)


def record(arm: Arm, row: dict[str, Any], path: Path = ROWS, fields: Sequence[str] = FIELDS) -> None:
    """Print a row and add it to the table, unless another process that waited for the same run has done so."""
    if row["lr"] in [other["lr"] for other in rows_of(read_rows(path), arm, row["seed"])]:
        return
    append_row(row, path, fields)
    names = ("block", "num_heads", "lr", "seed", "loss", "log10_condition")
    print("  ".join(f"{name} {row[name]}" for name in names), flush=True)


@cli.command(
    cli.Flag("out", "Folder for the runs.", required=True),
    cli.Flag(
        "blocks",
        "Blocks of PLAN.md to train, in order; BLOCK:HEADS for one arm.",
        list,
        default=["A", "E", "E2", "B", "F", "D", "G", "C"],
    ),
)
def main(f: cli.Values) -> None:
    for arm in [arm for name in f.blocks for arm in parse_arms(name)]:
        finish_arm(arm, SEEDS, Path(f.out).expanduser())


if __name__ == "__main__":
    cli.run(main)
