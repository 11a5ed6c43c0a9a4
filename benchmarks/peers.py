"""A training step of every family beside timm's under PyTorch eager, on a CPU, in float32.

    python benchmarks/peers.py --python=/path/to/python [--rounds=5] [--only=NAME,...] [--tiny] [--json]

`--python` is of an environment with torch and timm, which need not be ours; without it, of this one. The two of a
family are processes of their own and step in turn, so that both see the same machine, whatever else it does. `faster`
is timm's seconds by ours in the same round: the median of the rounds, the least and the most. Both train the same
architecture, as their numbers of parameters must show; both draw mixup and drop path, clip and update by AdamW. Ours
draws cutmix too, and counts steps that are not finite.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import timing
import zoo

from leanformer.costs import count
from leanformer.errors import USER_ERROR, ConfigError, LeanformerError
from leanformer.runtime import malloc


BATCHES = {"vit_b_7x16": 8, "xcit_m_12x16": 2, "volo_d3_lean": 2, "davit_b_lean": 2, "tnt_b_8x16": 2}
HERE = Path(__file__).parent
NEEDED = ("torch", "timm")
INSTALL = (
    "Install them, as by `pip install torch timm`, or name an environment that has them: --python=/path/to/python."
)

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


class Worker:
    """A process that says in a line what it is, and answers each line with a step's seconds."""

    def __init__(self, *command: str):
        self.command = command
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.about = self._answer()

    def step(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.communicate()

    def _answer(self) -> Any:
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise LeanformerError(f"{' '.join(self.command[:2])} ended; what it said stands above.")


@dataclasses.dataclass
class Pair:
    """Seconds of the rounds of a config's two workers."""

    config: str
    batch: int
    parameters: int
    ours: list[float] = dataclasses.field(default_factory=list)
    peer: list[float] = dataclasses.field(default_factory=list)

    def row(self) -> dict[str, Any]:
        faster = [theirs / ours for ours, theirs in zip(self.ours, self.peer, strict=True)]
        return {
            "config": self.config,
            "batch": self.batch,
            "parameters": self.parameters,
            "ours s": round(statistics.median(self.ours), 3),
            "timm s": round(statistics.median(self.peer), 3),
            "faster": round(statistics.median(faster), 2),
            "least": round(min(faster), 2),
            "most": round(max(faster), 2),
        }


def check(python: str) -> None:
    """Raises ConfigError where `python` is none, or has not what is needed."""
    program = f"import importlib.util as u; print(*(name for name in {NEEDED} if u.find_spec(name) is None))"
    try:
        missing = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"--python={python} cannot be run: {error}. {INSTALL}") from error
    if missing:
        raise ConfigError(f"--python={python} has no {' and no '.join(missing.split())}. {INSTALL}")


def measure(name: str, python: str, rounds: int, *, tiny: bool) -> tuple[dict[str, Any], list[str]]:
    """The row of one config, and the versions of both sides. Raises ConfigError where the two are not the same."""
    ours = Worker(sys.executable, str(HERE / "peers.py"), f"--worker={name}", *(["--tiny"] if tiny else []))
    peer = Worker(python, str(HERE / "peers_timm.py"), json.dumps(ours.about["peer"]))
    found = ours.about["parameters"], peer.about["parameters"]
    if found[0] != found[1]:
        raise ConfigError(f"{name} has {found[0]:,} parameters here and {found[1]:,} in timm: not the same model.")
    pair = Pair(name, ours.about["peer"]["batch"], found[0])
    for turn in range(rounds):
        for worker, times in ((ours, pair.ours), (peer, pair.peer))[:: 1 if turn % 2 else -1]:
            time.sleep(0.2)  # or threads of the other still spin
            times.append(worker.step())
    ours.close()
    peer.close()
    return pair.row(), [ours.about["versions"], peer.about["versions"]]


def work(name: str, *, tiny: bool) -> None:
    """Our side: what peers_timm.py is of timm's."""
    malloc.keep_freed()  # as every command does
    batch = 2 if tiny else BATCHES[name]
    run = timing.build(name, batch, "float32", "xla", **(TINY[name] if tiny else {}))
    step, state = run.compile_train_step(), run.initial_state()
    images, key, c = timing.batch_of(run), run.run_key(), run.config
    for _ in range(2):  # which warm up
        state, _ = jax.block_until_ready(step(state, images, key))
    peer = {"model": c.model.to_dict(), "batch": batch, "clip_norm": c.optim.clip_norm}
    peer |= {"mean": c.data.mean, "std": c.data.std}
    parameters = count.parameters(run.like.params)
    print(json.dumps({"versions": f"jax {jax.__version__}", "parameters": parameters, "peer": peer}), flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, images, key))
        print(json.dumps(time.perf_counter() - begun), flush=True)


def compare(options: argparse.Namespace) -> None:
    names = options.only.split(",") if options.only else list(BATCHES)
    if unknown := [name for name in names if name not in BATCHES]:
        raise ConfigError(f"--only={options.only}: {', '.join(unknown)} is none of {', '.join(BATCHES)}.")
    if options.rounds < 1:
        raise ConfigError(f"--rounds={options.rounds}: 1 at least.")
    check(options.python)
    found = [measure(name, options.python, options.rounds, tiny=options.tiny) for name in names]
    rows, versions = [row for row, _ in found], found[0][1]
    if options.json:
        print(json.dumps({"versions": versions, "rows": rows}))
        return
    zoo.show(rows)
    print(f"{' beside '.join(versions)}, eager; {options.rounds} rounds.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of an environment with torch and timm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="names of configs, by commas")
    parser.add_argument("--tiny", action="store_true", help="small shapes, whose seconds say nothing")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=BATCHES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        work(options.worker, tiny=options.tiny) if options.worker else compare(options)
    except LeanformerError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
