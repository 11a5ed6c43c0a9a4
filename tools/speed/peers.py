"""Training-step speed relative to PyTorch eager on a CPU, float32: timm's image and Hugging Face's language models.

    python -m tools.speed.peers --python=PYTHON [--rounds=5] [--only=NAME,...] [--batch=N] [--unroll=N] [--json]

--python is the interpreter of an environment with torch, timm and transformers (default: this one). The two sides of a
config are processes that step alternately, so that both see the same load on the machine. `faster` is the peer's
seconds divided by ours in the same round: median, minimum (`least`) and maximum (`most`) over rounds; `at best` is the
peer's fastest round divided by ours. Both sides train the same architecture, which is checked by the number of
parameters, with the same types of augmentation and AdamW; peers_huggingface.py documents what is replaced in its
models. --tiny tries the command on small models.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import cli
from leanformer.costs import count
from leanformer.data.text.rows import num_masked
from leanformer.errors import USER_ERROR, ConfigError, LeanformerError
from tools.speed import timing


HERE = Path(__file__).parent
BATCHES = {"vit_b_7x16": 8, "xcit_m_12x16": 2, "volo_d3_lean": 2, "davit_b_lean": 2, "tnt_b_8x16": 2}
BATCHES |= {"gpt2_tinystories_12x12": 16, "gpt2_tinystories_4x16": 16, "bert_crammed_16x12": 8, "bert_crammed_10x24": 8}
STAGES = {"depth": (1, 1, 1, 1), "width": (8, 16, 16, 16), "num_heads": (2, 4, 4, 4), "mlp_dim": (24, 48, 48, 48)}
TEXT = {"vocabulary": 101, "max_length": 12, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 24}
TINY = {
    "vit_b_7x16": {"image_size": 32, "depth": 2, "width": 12, "num_heads": 3, "head_dim": 8, "mlp_dim": 24},
    "xcit_m_12x16": {"image_size": 32, "depth": 2, "width": 16, "num_heads": 3, "head_dim": 8, "mlp_dim": 32}
    | {"class_heads": 2, "class_head_dim": 8},
    "volo_d3_lean": STAGES | {"image_size": 32, "head_dim": (4, 4, 4, 4), "class_heads": 4, "class_head_dim": 4},
    "davit_b_lean": STAGES | {"image_size": 56, "head_dim": (4, 4, 4, 4), "channel_head_dim": (4, 4, 4, 4)},
    "tnt_b_8x16": {"image_size": 32, "depth": 2, "width": 12, "num_heads": 3, "head_dim": 4, "mlp_dim": 24}
    | {"inner_width": 8, "inner_heads": 2, "inner_head_dim": 4, "inner_mlp_dim": 32},
}


def is_text(name: str) -> bool:
    return name.startswith(("gpt2", "bert"))


def script(name: str) -> Path:
    """Return the script of a config's peer."""
    return HERE / f"peers_{'huggingface' if is_text(name) else 'timm'}.py"


def describe(c: ConfigDict, batch: int) -> dict[str, Any]:
    """Return the argument of a peer's script."""
    peer = {"model": c.model.to_dict(), "batch": batch, "clip_norm": c.optim.clip_norm}
    if "mean" in c.data:
        return peer | {"mean": c.data.mean, "std": c.data.std}
    return peer | {"num_masked": num_masked(c.mask_share, c.model.max_length) if c.task == "masked" else 0}


def serve_steps(name: str, batch: int | None, tiny: bool, **model: Any) -> None:
    """Run our side: one training step per input line."""
    cli.keep_freed_memory()  # as every command does
    batch = batch or (2 if tiny else BATCHES[name])
    step = timing.TimedStep(name, batch, **(TINY.get(name, TEXT) if tiny else {}), **model)
    c = step.run.config
    for _ in range(2):  # warm-up
        step.train()
    peer = describe(c, batch)
    parameters = count.parameters(step.run.state.params)
    print(json.dumps({"versions": f"jax {jax.__version__}", "parameters": parameters, "peer": peer}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(timing.time_call(step.train)), flush=True)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a config. Raise ConfigError unless both sides have the same number of parameters."""
    flags = [f"--{flag}={value}" for flag in ("batch", "unroll") if (value := getattr(args, flag))]
    flags += ["--tiny"] * args.tiny
    ours = timing.Worker(sys.executable, "-m", "tools.speed.peers", f"--worker={name}", *flags)
    peer = timing.Worker(args.python, str(script(name)), json.dumps(ours.description["peer"]))
    counts = [worker.description["parameters"] for worker in (ours, peer)]
    is_same = counts[0] == counts[1]
    times = timing.compare_workers(ours, peer, args.rounds) if is_same else {}
    ours.close()
    peer.close()
    if not is_same:
        raise ConfigError(
            f"{name} has {counts[0]:,} parameters here and {counts[1]:,} in the peer: not the same model."
        )
    versions = f"{ours.description['versions']}, {peer.description['versions']}"
    row = {"config": name, "batch": ours.description["peer"]["batch"], "parameters": counts[0]}
    return row | times | {"versions": versions}


def check_python(python: str, packages: tuple[str, ...]) -> None:
    """Raise ConfigError unless `python` runs and has the packages."""
    program = f"import importlib.util as u; print(*(n for n in {packages} if u.find_spec(n) is None))"
    try:
        missing = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"--python={python} cannot be run: {error}") from error
    if missing:
        raise ConfigError(f"--python={python} lacks {', '.join(missing)}: pip install {' '.join(missing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of an environment with the peers' packages"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(BATCHES), help="config names, separated by commas")
    parser.add_argument("--batch", type=int, help="examples per step, on both sides")
    parser.add_argument("--unroll", type=int, help="model.unroll of our side")
    parser.add_argument("--tiny", action="store_true", help="small models, whose times are meaningless")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=BATCHES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve_steps(args.worker, args.batch, args.tiny, **({"unroll": args.unroll} if args.unroll else {}))
        return
    try:
        names = args.only.split(",")
        if unknown := [name for name in names if name not in BATCHES]:
            raise ConfigError(f"--only={args.only}: {', '.join(unknown)} unknown. Choose from {', '.join(BATCHES)}.")
        check_python(args.python, ("torch", *sorted({"transformers" if is_text(name) else "timm" for name in names})))
        timing.show([measure(name, args) for name in names], as_json=args.json)
    except LeanformerError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
