"""Every row of the paper that a config covers, rebuilt: `python -m leanformer.audit [--out=DIR] [--nomemory]`.

`--device=h100` compiles for that GPU, which need not be here (the extra `gpu-compile`), instead of the device at hand.

Printed against computed parameters, FLOPs, memory of one training step by the compiled program, and how much of what
the lean model saves is depth, heads and MLP. Writes DIR/audit.md, audit.json and audit.png. Nothing is trained, nothing
is allocated. Memory is that of the program compiled for the device at hand, for one device's share of the batch as the
config trains it (bfloat16 activations, cheap things computed again), times the devices whose memory is printed; the
print is presumably of float32 PyTorch, so ratios of lean to original are what can be compared.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer import cli, config
from leanformer.config.loading import SHIPPED
from leanformer.costs import count, plugin
from leanformer.errors import ConfigError
from leanformer.reports import plots
from experiments.paper import RANGES, READINGS, ROWS, Row
from leanformer.runtime import files
from leanformer.training import compiled, experiment, report


def load(name: str, folder: Path = SHIPPED) -> ConfigDict:
    """The config of a row: "<file>" or "<file>:<argument>"."""
    file, *argument = name.split(":")
    c = config.load(":".join([str(folder / f"{file}.py"), *argument]))
    config.check(c)
    return c


def params(c: ConfigDict) -> int:
    *_, (parameters, _) = experiment.model(c)
    return count.parameters(parameters)


def examine(row: Row, folder: Path, *, memory: bool, device: str | None = None) -> dict[str, Any]:
    """The computed figures of one row beside the printed ones.

    device: of `plugin.DEVICES`, that memory is compiled for; the one at hand if None.
    """
    c = load(row.config, folder)
    run = experiment.build(c, examples=compiled.NOMINAL_EXAMPLES, mesh=None)
    found = count.parameters(run.like.params)
    forward, training = run.flops_per_example
    step = None
    if memory:
        c.unlock()
        c.batch_size //= row.devices
        c.probe.every = 0
        step = row.devices * (compiled.peak(c, device) if device else _peak_here(c))
    return {
        **{"table": row.table, "model": row.model, "variant": row.variant, "config": row.config},
        **{"printed_params": row.params, "params": found, "agrees": row.agrees(found)},
        **{"forward_flops": forward, "train_flops": training},
        **{"printed_memory_gb": row.memory_gb, "train_memory_bytes": step, "top1": row.score},
    }


def _peak_here(c: ConfigDict) -> int:
    return count.peak_memory(experiment.build(c, examples=compiled.NOMINAL_EXAMPLES, mesh=None).compile_train_step())


def saved(original: ConfigDict, lean: ConfigDict) -> dict[str, int]:
    """Parameters that the lean model saves, by what changed: depth, heads, MLP; they add up to the whole.

    What one change saves depends on which came before it, so each is averaged over all orders (its Shapley value).

    Raises:
        ConfigError: something else changed as well.
    """
    groups = {key: _group(key) for key in original.model if original.model[key] != lean.model[key]}
    strange = [key for key, group in groups.items() if group is None]
    if strange:
        raise ConfigError(f"Original and lean differ in {', '.join(strange)}: neither depth, heads nor MLP.")
    changed = frozenset(groups.values())
    known: dict[frozenset[str], int] = {}

    def size(taken: frozenset[str]) -> int:
        taken &= changed  # what did not change need not be counted with and without
        if taken not in known:
            c = original.copy_and_resolve_references()
            c.unlock()
            c.model.update({key: lean.model[key] for key, group in groups.items() if group in taken})
            known[taken] = params(c)
        return known[taken]

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


def pairs(found: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Originals with their lean models, and what was saved by what."""
    by_model: dict[str, dict[str, Any]] = {}
    for row in found:
        by_model.setdefault(row["model"], {"model": row["model"]})[row["variant"]] = row
    return [
        pair | {"saved": saved(load(pair["original"]["config"], folder), load(pair["lean"]["config"], folder))}
        for pair in by_model.values()
        if {"original", "lean"} <= pair.keys()
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _in_units(params: int, printed: str) -> str:
    return f"{params / 1e6:.3f} M" if printed.endswith("M") else f"{params / 1e3:.3f} k"


def _short(params: int) -> str:
    return f"{params / 1e6:.1f} M" if abs(params) >= 1e6 else f"{params / 1e3:.1f} k" if params else "0"


def markdown(
    found: Sequence[dict[str, Any]],
    ranges: Sequence[dict[str, Any]],
    readings: Sequence[dict[str, Any]],
    compared: Sequence[dict],
) -> str:
    """The report."""

    def row(r: dict[str, Any]) -> list[str]:
        memory = "" if r["train_memory_bytes"] is None else f"{r['train_memory_bytes'] / 1e9:.1f}"
        flops = (f"{r[key] / 1e9:.3g}" for key in ("forward_flops", "train_flops"))
        verdict = "agrees" if r["agrees"] else f"**does not** ({_in_units(r['params'], r['printed_params'])})"
        printed = "" if r["printed_memory_gb"] is None else str(r["printed_memory_gb"])
        name = [str(r["table"] or ""), f"{r['model']} {r['variant']}", f"`{r['config']}`"]
        return [*name, r["printed_params"], f"{r['params']:,}", verdict, *flops, printed, memory]

    def pair(p: dict[str, Any]) -> list[str]:
        before, after = (p[kind]["params"] for kind in ("original", "lean"))
        steps = [p[kind]["train_memory_bytes"] for kind in ("original", "lean")]
        ours = "" if None in steps else f"{1 - steps[1] / steps[0]:.1%}"
        prints = [p[kind]["printed_memory_gb"] for kind in ("original", "lean")]
        shares = (_short(p["saved"][group]) for group in ("depth", "heads", "MLP"))
        return [p["model"], f"{1 - after / before:.1%}", _short(before - after), *shares] + [
            *("" if None in prints else f"{1 - prints[1] / prints[0]:.1%}", ours)
        ]

    titles = ("table", "row", "config", "printed", "computed", "verdict", "forward GFLOP", "training GFLOP")
    titles += ("printed memory GB", "memory GB")
    cuts = (
        "model",
        "parameters saved",
        "of which",
        "by depth",
        "by heads",
        "by MLP",
        "memory cut, printed",
        "memory cut",
    )
    agreeing = sum(r["agrees"] for r in found)
    return "\n\n".join(
        [
            "# Leaner Transformers (arXiv 2505.20802), rebuilt",
            f"{agreeing} of {len(found)} printed parameter counts agree. FLOPs are per example, 2 a multiply-add, "
            "products alone; memory is of one training step, by the compiled program, summed over as many devices as "
            "it was printed of.",
            _table(titles, [row(r) for r in found]),
            "## Ranges in the text",
            _table(titles, [row(r) for r in ranges]),
            "## Counts of Table 3 that another number of heads gives to the digit",
            _table(titles, [row(r) for r in readings]),
            "## What was saved, and by what",
            "Negative: the lean model spends more there. Each share is an average over the orders of the changes.",
            _table(cuts, [pair(p) for p in compared]),
            "",
        ]
    )


@cli.command(
    cli.Flag("out", "Folder to write to.", default="audit", writes=True),
    cli.Flag("configs", "Folder of the config files; those that ship with leanformer if unset."),
    cli.Flag("memory", "Compile a training step of each row for its memory; minutes.", bool, default=True),
    cli.Flag("device", f"GPU to compile for, here or not: {', '.join(plugin.DEVICES)}; the device at hand if unset."),
)
def main(f: cli.Values) -> None:
    if f.device:
        plugin.description(f.device)  # what is wrong with it is said now, not after the first rows
    out, folder = Path(f.out).expanduser(), Path(f.configs) if f.configs else SHIPPED
    found = [examine(row, folder, memory=f.memory, device=f.device) for row in ROWS]
    ranges, readings = ([examine(row, folder, memory=False) for row in rows] for rows in (RANGES, READINGS))
    compared = pairs(found, folder)
    text = markdown(found, ranges, readings, compared)
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    files.write_text(out / "audit.md", text)
    saving = {p["model"]: p["saved"] for p in compared}
    content = {"rows": found, "ranges": ranges, "readings": readings, "saved": saving}
    report.write_json(out / "audit.json", content | report.provenance())
    scored = [p for p in compared if p["original"]["table"] in (4, 5)]  # all on the same images
    plots.plot_arrows(scored, out / "audit.png", "Leaner Transformers, Tables 4 and 5")
    print(f"Wrote audit.md, audit.json and audit.png to {out}.")


if __name__ == "__main__":
    cli.run(main)
