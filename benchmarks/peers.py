"""A training step of every family beside timm's under PyTorch eager, on a CPU, in float32.

    python benchmarks/peers.py --python=/path/to/python [--rounds=5] [--only=NAME,...]
        [--batch=N] [--unroll=N] [--tiny] [--json]

`--python` is of an environment with torch and timm, which need not be ours; without it, of this one. The two of a
family are processes of their own and step in turn, so that both see the same machine, whatever else it does. `faster`
is timm's seconds by ours in the same round: the median of the rounds, the least and the most; `at best` the least of
timm's rounds by the least of ours. Both train the same
architecture, as their numbers of parameters must show; both draw mixup and drop path, clip and update by AdamW. Ours
draws cutmix too, and counts steps that are not finite.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import timing

from leanformer.costs import count
from leanformer.runtime import malloc


BATCHES = {"vit_b_7x16": 8, "xcit_m_12x16": 2, "volo_d3_lean": 2, "davit_b_lean": 2, "tnt_b_8x16": 2}
HERE = Path(__file__).parent
NEEDED = ("torch", "timm")

FOUR = {"depth": (1, 1, 1, 1), "width": (8, 16, 16, 16), "num_heads": (2, 4, 4, 4), "mlp_dim": (24, 48, 48, 48)}
TINY = {  # sizes for a test
    "vit_b_7x16": {"image_size": 32, "depth": 2, "width": 12, "num_heads": 3, "head_dim": 8, "mlp_dim": 24},
    "xcit_m_12x16": {"image_size": 32, "depth": 2, "width": 16, "num_heads": 3, "head_dim": 8, "mlp_dim": 32}
    | {"class_heads": 2, "class_head_dim": 8},
    "volo_d3_lean": FOUR | {"image_size": 32, "head_dim": (4, 4, 4, 4), "class_heads": 4, "class_head_dim": 4},
    "davit_b_lean": FOUR | {"image_size": 56, "head_dim": (4, 4, 4, 4), "channel_head_dim": (4, 4, 4, 4)},
    "tnt_b_8x16": {"image_size": 32, "depth": 2, "width": 12, "num_heads": 3, "head_dim": 4, "mlp_dim": 24}
    | {"inner_width": 8, "inner_heads": 2, "inner_head_dim": 4, "inner_mlp_dim": 32},
}


def measure(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The row of one config, and the versions of both sides. Raises ConfigError where the two are not the same."""
    ours = timing.ours(HERE / "peers.py", name, options)
    peer = timing.Worker(options.python, str(HERE / "peers_timm.py"), json.dumps(ours.about["peer"]))
    pair = timing.Pair("timm", ours, peer)
    pair.check(name)
    row = {"config": name, "batch": ours.about["peer"]["batch"], "parameters": ours.about["parameters"]}
    row |= pair.step(options.rounds)
    ours.close()
    peer.close()
    return row, [ours.about["versions"], peer.about["versions"]]


def work(name: str, *, batch: int | None, tiny: bool, **model: Any) -> None:
    """Our side: what peers_timm.py is of timm's."""
    malloc.keep_freed()  # as every command does
    batch = batch or (2 if tiny else BATCHES[name])
    member = timing.Member(name, batch, **(TINY[name] if tiny else {}), **model)
    c = member.run.config
    for _ in range(2):  # which warm up
        member.train()
    peer = {"model": c.model.to_dict(), "batch": batch, "clip_norm": c.optim.clip_norm}
    peer |= {"mean": c.data.mean, "std": c.data.std}
    parameters = count.parameters(member.run.state.params)
    print(json.dumps({"versions": f"jax {jax.__version__}", "parameters": parameters, "peer": peer}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(timing.seconds(member.train)), flush=True)


def compare(names: list[str], options: argparse.Namespace) -> None:
    timing.check_python(options.python, NEEDED)
    found = [measure(name, options) for name in names]
    rows, versions = [row for row, _ in found], found[0][1]
    if options.json:
        print(json.dumps({"versions": versions, "rows": rows}))
        return
    timing.show(rows)
    print(f"{' beside '.join(versions)}, eager; {options.rounds} rounds.")


if __name__ == "__main__":
    timing.main(__doc__, [*BATCHES], work, compare, python=sys.executable)
