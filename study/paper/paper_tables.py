"""Parameter counts of Leaner Transformers (arXiv 2505.20802), as reported and as computed from its architectures.

    python -m study.paper.paper_tables [--memory] [--out=FILE]

2026-11-22: 21 of 22 models of Tables 4 and 5 agree, 2 of 10 of Table 3, all 4 of Tables 1 and 2. DaViT-B lean differs
(62.0 M reported, 62,653,416 computed), as the ranges of the text do; three counts of Table 3 match 6 or 8 heads.

Prints Markdown tables: how each lean model adds heads, with the count that the other way would give; parameters and
FLOPs per example; and for each pair the parameters that depth, heads and MLP save.
--memory compiles a training step of each model, and multiplies the memory of one device by the number of devices
(bfloat16, cheap operations recomputed; the paper presumably used float32 PyTorch, so compare ratios).
--out writes the counts as a CSV file: data/paper_counts.csv.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from ml_collections import ConfigDict

from leanformer import cli, config, cost, models
from leanformer.costs import count
from leanformer.errors import ConfigError
from study import tables
from study.paper.paper import OTHER_MLP, RANGES, READINGS, ROWS, Row


def params(c: ConfigDict) -> int:
    """Return the number of parameters of a config's model."""
    model = nnx.eval_shape(lambda: models.build(**c.model.to_dict(), rngs=nnx.Rngs(0)))
    return count.parameters(nnx.state(model, nnx.Param))


def examine(row: Row, memory: bool = False) -> list[Any]:
    """Return the table cells of a model: reported and computed parameters, FLOPs, reported and computed memory."""
    c = config.load(row.config)
    costs = cost.cost(c, memory=False)
    verdict = "agrees" if row.agrees(costs["params"]) else "**differs**"
    cells = [row.table or "text", f"{row.model} {row.variant}", f"`{row.config}`", row.params]
    cells += [f"{costs['params']:,}", verdict, *(f"{costs[key] / 1e9:.3g}" for key in ("forward_flops", "train_flops"))]
    return [*cells, row.memory_gb or "", f"{peak_bytes(row) / 1e9:.1f}" if memory and row.memory_gb else ""]


def peak_bytes(row: Row) -> int:
    """Return the bytes that a training step needs on all devices, compiled for this machine."""
    c = config.load(row.config).unlock()
    c.batch_size //= row.devices
    c.probe.every = 0
    return row.devices * cost.cost(c)["train_memory_bytes"]


def split_savings(original: ConfigDict, lean: ConfigDict) -> dict[str, int]:
    """Return the parameters that the lean model saves by depth, heads and MLP.

    The saving of one change depends on the changes before it, so each is averaged over all orders (Shapley value).

    Raises:
        ConfigError: something else changed as well.
    """
    groups = {key: _group(key) for key in original.model if original.model[key] != lean.model[key]}
    if others := [key for key, group in groups.items() if group is None]:
        raise ConfigError(f"Original and lean model differ in {', '.join(others)}: neither depth, heads nor MLP.")
    counts: dict[frozenset[str], int] = {}

    def size(changed: frozenset[str]) -> int:
        changed &= set(groups.values())
        if changed not in counts:
            c = original.copy_and_resolve_references().unlock()
            c.model.update({key: lean.model[key] for key, group in groups.items() if group in changed})
            counts[changed] = params(c)
        return counts[changed]

    shares = dict.fromkeys(("depth", "heads", "MLP"), 0.0)
    orders = list(itertools.permutations(shares))
    for order in orders:
        for i, group in enumerate(order):
            shares[group] += size(frozenset(order[:i])) - size(frozenset(order[: i + 1]))
    return {group: round(total / len(orders)) for group, total in shares.items()}


def _group(key: str) -> str | None:
    if key == "mlp_dim":
        return "MLP"
    return "heads" if "head" in key or key == "value_dim" else "depth" if "depth" in key else None


def compare(model: str) -> list[Any]:
    """Return the table cells of a pair: the share of parameters that is saved, and how much of it by which change."""
    original, lean = (next(r for r in ROWS if (r.model, r.variant) == (model, kind)) for kind in ("original", "lean"))
    configs = [config.load(row.config) for row in (original, lean)]
    before, after = map(params, configs)
    saved = before - after
    ratio = f"{lean.memory_gb / original.memory_gb:.3f}" if lean.memory_gb else ""
    parts = (f"{x / saved:.0%}" for x in split_savings(*configs).values())
    return [model, f"{saved:,}", f"{saved / before:.1%}", *parts, ratio]


def total_widths(c: ConfigDict) -> tuple[int, ...]:
    """Return heads x head dimension of each stage of a config's model."""
    return tuple(n * h for n, h in zip(stages(c.model.num_heads), stages(c.model.head_dim), strict=True))


def narrows_heads(original: ConfigDict, lean: ConfigDict) -> bool:
    """Return whether the lean model keeps the total width, up to 2 %, and has narrower heads; False if it widens.

    GPT-2 is the case for the tolerance: its 12 heads have dimension 42, the integer part of 512 / 12.
    """
    ratios = [after / before for before, after in zip(total_widths(original), total_widths(lean), strict=True)]
    return max(ratios) < 1.02


def read_other_way(original: ConfigDict, lean: ConfigDict) -> ConfigDict:
    """Return the lean config with its heads added the other way: wider instead of narrower, or narrower.

    Head dimensions that keep the total width are rounded down, as the paper's GPT-2 rounds 512 / 12.
    """
    c = lean.copy_and_resolve_references().unlock()
    if narrows_heads(original, lean):
        c.model.update({key: original.model[key] for key in original.model if key.endswith("head_dim")})
    else:
        c.model.head_dim = total_widths(original)[0] // lean.model.num_heads
    return c


def describe_pair(model: str) -> list[Any]:
    """Return the table cells of a pair: heads, total width, depth and MLP before and after, and both counts."""
    rows = [next(r for r in ROWS if (r.model, r.variant) == (model, kind)) for kind in ("original", "lean")]
    original, lean = (config.load(row.config) for row in rows)
    heads = [
        [f"{n} x {h}" for n, h in zip(stages(c.model.num_heads), stages(c.model.head_dim), strict=True)]
        for c in (original, lean)
    ]
    sizes = [_change(*([*map(str, stages(c.model[key]))] for c in (original, lean))) for key in ("depth", "mlp_dim")]
    widths = _change(*([*map(str, total_widths(c))] for c in (original, lean)))
    cells = [model, "narrower" if narrows_heads(original, lean) else "as wide", _change(*heads), widths]
    return [*cells, *sizes, rows[1].params, f"{params(lean):,}", f"{params(read_other_way(original, lean)):,}"]


def list_counts() -> Iterator[dict[str, Any]]:
    """Yield a row per model of the tables: reported and computed parameters, and how the pair adds heads."""
    for row in ROWS:
        original, lean = (
            config.load(next(r.config for r in ROWS if (r.model, r.variant) == (row.model, variant)))
            for variant in ("original", "lean")
        )
        computed = params(config.load(row.config))
        cells = {"table": row.table, "model": row.model, "variant": row.variant, "config": row.config}
        cells |= {"reported": row.params, "computed": computed, "agrees": row.agrees(computed)}
        cells["mlp"] = "other" if row.config in OTHER_MLP else "as reported"
        yield cells | {"heads": "narrower" if narrows_heads(original, lean) else "as wide"}


def stages(value: Any) -> tuple[int, ...]:
    """Return the sizes of the stages of a model, of which most have one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _change(before: list[str], after: list[str]) -> str:
    """Format what changes: the stages that differ, or the value if it stays."""
    if before == after:
        return ", ".join(before)
    pairs = {f"{a} → {b}": None for a, b in zip(before, after, strict=True) if a != b}
    return ", ".join(pairs)


def table(titles: str, rows: Sequence[Sequence[Any]]) -> str:
    """Format rows as Markdown; `titles` are separated by |."""
    lines = [titles.split("|"), ["---"] * len(rows[0]), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


@cli.command(
    cli.Flag("memory", "Compile a training step of each model for its memory; minutes.", bool, default=False),
    cli.Flag("out", "CSV file for the counts."),
)
def main(f: cli.Values) -> None:
    names = dict.fromkeys(row.model for row in ROWS)
    print("How the lean model adds heads, by its parameters (stages that change)\n")
    titles = "model|heads become|heads x dimension|total width|depth|MLP|reported|these shapes|added the other way"
    print(table(titles, [*map(describe_pair, names)]), end="\n\n")
    rows = [examine(row, f.memory) for row in (*ROWS, *RANGES, *READINGS)]
    titles = "table|model|config|reported|computed|verdict|forward GFLOP|training GFLOP|reported GB|GB"
    print(table(titles, rows))
    print("\nParameters saved by the lean model, and shares of the saving by change (negative: it has more there)\n")
    print(
        table(
            "model|saved|of the original|by depth|by heads|by MLP|memory lean : original, reported",
            [*map(compare, names)],
        )
    )
    if f.out:
        tables.write(Path(f.out), [*list_counts()])


if __name__ == "__main__":
    cli.run(main)
