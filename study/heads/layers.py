"""More heads in later or in earlier layers at fixed total width, in small GPTs: LAYERS.md.

    python -m study.heads.layers [--out=DIR] [--arms=uniform,increasing,decreasing]

With --out, trains the arms one run after another, as `study.heads.language` does: learning rates with seed 100,
then five seeds. The same command resumes; every finished run is a row of study/data/study_layers.csv. Without
it, prints from the rows the differences with their verdicts, and the conditioning by layer.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli, conditioning, config, tasks
from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference
from leanformer.errors import ConfigError
from study.heads import language, verdicts
from study.heads.language import SHORT, TUNING_SEED, Arm, Block
from study.tables import Estimate


ROWS = language.ROWS.with_name("study_layers.csv")
WIDTH, SEEDS = 128, (0, 1, 2, 3, 4)
ARMS = {  # heads by layer
    "uniform": (8,) * 6,
    "increasing": (4, 4, 8, 8, 16, 16),
    "decreasing": (16, 16, 8, 8, 4, 4),
    "steep_increasing": (2, 2, 8, 8, 32, 32),
    "steep_decreasing": (32, 32, 8, 8, 2, 2),
}
PRIMARY = ("uniform", "increasing", "decreasing")
FIELDS = ("block", "num_heads", "heads", "params", "steps", "lr", "seed", "loss", "train_loss", "log10_condition")
FIELDS += ("bounds", "attention_entropy", "date", "device")
BY_LAYER = ("log10_condition", "attention_entropy")


def make_arm(name: str) -> Arm:
    """Return the arm of a name, with the geometric mean of its heads, which is 8 in all."""
    return Arm(name, round(2 ** float(np.mean(np.log2(ARMS[name])))))


def get_config(arm: Arm, lr: float, seed: int, steps: int = SHORT) -> config.ConfigDict:
    """Return the config of a run. Raises ConfigError if its model has other parameters than the uniform one."""
    heads = ARMS[arm.block]
    c = language.make_config(Block(WIDTH, (), {}, steps), lr, seed)
    sizes = {"num_heads": heads, "head_dim": tuple(WIDTH // n for n in heads)}
    with c.unlocked():
        c.model.update(depth=len(heads), value_dim=None, **sizes)
    tasks.resolve(c)
    if arm.block != "uniform":
        same = language.count_parameters(get_config(make_arm("uniform"), lr, seed, steps))
        if (params := language.count_parameters(c)) != same:
            raise ConfigError(f"Arm {arm.block} has {params:,} parameters, uniform {same:,}. They must be equal.")
    return c


def run(arm: Arm, lr: float, seed: int, out: Path, steps: int = SHORT) -> dict[str, Any]:
    """Train one run, or read it if it is finished, and return its row."""
    c = get_config(arm, lr, seed, steps)
    workdir = out / f"{arm.block}-lr={lr:g}-seed={seed}"
    about = {"block": arm.block, "num_heads": arm.heads, "heads": " ".join(map(str, ARMS[arm.block]))}
    return about | language.train(c, workdir) | measure_by_layer(workdir)


def measure_by_layer(workdir: Path) -> dict[str, str]:
    """Return medians by layer over held-out rows, and heads, of a finished run, and the share of κ that are bounds.

    κ is measured on the concatenated head outputs of the last width / 4 tokens, see `language.probe_at_end`.
    """
    values = language.probe_at_end(workdir, ("attention_output", "attention_entropy"))
    output = values["attention_output"]
    last = conditioning.digest([group[0] for group in output] if isinstance(output, list) else output[0])
    entropy = conditioning.digest(values["attention_entropy"])
    bounds = sum(layer["singular"] for layer in last) / sum(layer["count"] for layer in last)
    return {
        "log10_condition": " ".join(f"{math.log10(layer['median']):.4f}" for layer in last),
        "bounds": f"{bounds:.4f}",
        "attention_entropy": " ".join(f"{layer['median']:.4f}" for layer in entropy),
    }


def read_values(rows: Iterable[Mapping[str, Any]], key: str = "loss") -> dict[str, dict[int, Any]]:
    """Return the values by arm and seed, without tuning runs."""
    values: dict[str, dict[int, Any]] = {}
    for row in rows:
        if row["seed"] != TUNING_SEED:
            values.setdefault(row["block"], {})[row["seed"]] = row[key]
    return values


def compare(rows: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[tuple[str, str], tuple[Difference, str]]:
    """Return the paired differences of three arms with their verdicts; empty unless each has three common seeds."""
    values, names = read_values(rows), ("uniform", f"{prefix}increasing", f"{prefix}decreasing")
    seeds = sorted(set.intersection(*(set(values.get(name, {})) for name in names)))
    if len(seeds) < 3:
        return {}
    uniform, increasing, decreasing = names
    losses = {name: np.array([values[name][seed] for seed in seeds]) for name in names}
    pairs = [(increasing, uniform), (decreasing, uniform), (increasing, decreasing)]
    differences = {(a, b): statistics.paired(losses[a], losses[b]) for a, b in pairs}
    corrected = statistics.holm([difference.p_differs() for difference in differences.values()])
    return {
        pair: (difference, verdicts.judge(difference, p))
        for (pair, difference), p in zip(differences.items(), corrected, strict=True)
    }


def decide(judged: Mapping[tuple[str, str], tuple[Difference, str]]) -> str:
    """Return the verdict on the claim that more and narrower heads in later layers are better, by the rule."""
    if not judged:
        return "not run"
    words = {pair: word for pair, (_, word) in judged.items()}
    against_uniform = words["increasing", "uniform"]
    if against_uniform == words["increasing", "decreasing"] == "better":
        return "holds"
    return "refuted" if against_uniform in ("worse", "equivalent") else "undecided"


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    for name, losses in read_values(rows).items():
        yield f"{name:<17} {len(losses)} seeds, loss {np.mean([*losses.values()]):.4f}"
        for key in BY_LAYER:
            means = np.mean([*read_values(rows, key)[name].values()], axis=0)
            yield f"  {key} by layer: {'  '.join(f'{mean:.2f}' for mean in means)}"
    for prefix in ("", "steep_"):
        for (a, b), (difference, word) in compare(rows, prefix).items():
            yield f"{a} minus {b}: {Estimate.of(difference):+.4f nats}: {word}"
    yield f"More heads in later layers are better: {decide(compare(rows))} (margin ±{verdicts.MARGIN} nats)"


@cli.command(
    cli.Flag("out", "Folder for the runs; without it the rows are reported."),
    cli.Flag("arms", "Arms to train, in order.", list, default=[*PRIMARY]),
)
def main(f: cli.Values) -> None:
    if unknown := [name for name in f.arms if name not in ARMS]:
        raise ConfigError(f"--arms={','.join(unknown)}: no such arm. Choose from {', '.join(ARMS)}.")
    for name in f.arms if f.out else ():
        out = Path(f.out).expanduser()
        language.finish_arm(make_arm(name), SEEDS, out, language.Study(run, ROWS, FIELDS))
    print(*report(language.read_rows(ROWS)), sep="\n")


if __name__ == "__main__":
    cli.run(main)
