"""Training steps of every family at full size: as shares of the machine's matrix-product rate, or examples a second.

    python benchmarks/zoo.py [--batch=2] [--rounds=7] [--all] [--only=NAME,...] [--json]   # on a CPU, in float32
    python benchmarks/zoo.py --gpu [--batch=128] [--only=NAME,...] [--json]                # on a GPU, in bfloat16

On a CPU the lean shapes of Leaner Transformers' Table 4, and with --all the originals too. Each family's step is timed
in turn with ViT's and with products of matrices, so that all see the same machine, and the least of the rounds counts.
Clocks stand still for nobody: on a machine that does other work besides, CPU seconds, those of all threads of this
process, say more than wall seconds, though not how well the work is spread over cores.

On a GPU both shapes of every family, each in a process of its own, whose peak of memory is then its own; and the ratio
of the two shapes' memory beside the printed one. 128 is a device's part of the batch of 1024 that the paper trained
Table 4 with.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
from collections.abc import Sequence

import jax
import timing

from experiments.paper import ROWS, Row


TABLE = [row for row in ROWS if row.table == 4 and row.model != "DeiT-B"]  # DeiT-B has ViT-B's shapes
VIT = "vit_b_7x16"
DEVICES = 8  # whose memory the paper adds up


def on_cpu(names: Sequence[str], batch: int, rounds: int) -> list[dict]:
    """One row a config."""
    vit, rates, rows = timing.Member(VIT, batch), timing.Rate(), []
    for name in names:
        member = vit if name == VIT else timing.Member(name, batch)
        vit.least = timing.Least()
        for turn in range(rounds + 1):
            rates.measure()
            vit.train()
            if member is not vit:
                member.train()
            if not turn:  # which warms up
                vit.least, member.least = timing.Least(), timing.Least()
        rate, cpu_rate = rates.found()
        (share, cpu_share), beside = member.shares(rate, cpu_rate), vit.shares(rate, cpu_rate)
        rows.append(
            {
                "config": name,
                "GFLOP": round(member.flops / 1e9, 1),
                "step s": round(member.least.wall, 3),
                "CPU s": round(member.least.cpu, 3),
                "rate GFLOP/s": round(rate / 1e9, 1),
                "share": round(share, 3),
                "to ViT's": round(share / beside[0], 2),
                "CPU share": round(cpu_share, 3),
                "CPU, to ViT's": round(cpu_share / beside[1], 2),
                "compile s": round(member.compilation.wall, 1),
                "compile CPU s": round(member.compilation.cpu, 1),
            }
        )
    return rows


def on_gpu(name: str, batch: int) -> dict:
    """What `timing.trained` says of one config, from a fresh process."""
    return {"config": name} | timing.trained(timing.build(name, batch, "bfloat16", "auto"))


def beside_print(rows: list[dict]) -> list[dict]:
    """The rows with the paper's memory, and those of lean shapes with ratios to their originals, found and printed."""
    found = {row["config"]: row for row in rows}
    of_config = {printed.config: printed for printed in TABLE}
    originals = {printed.model: printed for printed in TABLE if printed.variant == "original"}
    return [row | _beside(row, of_config.get(row["config"]), originals, found) for row in rows]


def _beside(row: dict, printed: Row | None, originals: dict[str, Row], found: dict[str, dict]) -> dict:
    memory = round(printed.memory_gb / DEVICES, 2) if printed else None
    more = {"printed GB": memory, "speed ratio": None, "memory ratio": None, "printed ratio": None}
    if printed is None or printed.variant == "original":
        return more
    original = originals[printed.model]
    other = found.get(original.config, {})
    for ratio, figure in (("speed ratio", "examples/s"), ("memory ratio", "peak GB")):
        if row[figure] and other.get(figure):
            more[ratio] = round(row[figure] / other[figure], 3)
    return more | {"printed ratio": round(printed.memory_gb / original.memory_gb, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="the originals too")
    parser.add_argument("--only", help="names of configs, by commas")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    both = options.all or options.gpu
    names = [row.config for row in TABLE if both or row.variant == "lean"]
    names = options.only.split(",") if options.only else names
    if options.gpu:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as one:
            rows = beside_print(list(one.map(on_gpu, names, [options.batch or 128] * len(names))))
    else:
        rows = on_cpu(names, options.batch or 2, options.rounds)
    if options.json:
        print(json.dumps({"jax": jax.__version__, "rows": rows}))
    else:
        timing.show(rows)


if __name__ == "__main__":
    main()
