"""Vectorised (vmap) training of several runs as one program on one device, for `sweep --vmap`.

python -m leanformer.train_vmap --member='["DIR", "--config=FILE", "--config.seed=0"]' --member=...

The runs may differ only in seed and learning rates. A single small model does not use a device fully. Each folder is an
ordinary run with the same examples, random draws, records, checkpoints and summary; steps differ only by float32
rounding, and `train` can resume it. The same command resumes interrupted runs, which must all be at the same step.
"""

import sys

from leanformer.runtime import signals, terminal


if __name__ == "__main__":
    terminal.open_streams(result=False)
    signals.exit_on_stop()  # before the imports below, which take seconds
    print("Loading JAX.", file=sys.stderr, flush=True)

import json
from collections.abc import Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from leanformer import cli, config, tasks
from leanformer.costs import oom_suggestions
from leanformer.data import pool
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as meshes
from leanformer.train import start
from leanformer.training import checks, train_setup, vmap
from leanformer.training.timer import Timer


def train(members: Sequence[tuple[Path, ConfigDict]], again: str = "the same call") -> int:
    """Train all runs as one program to the end, or to a stop request. Return the exit status, as `leanformer.train`.

    Args:
        members: folder and validated config of each run, at least one.
        again: command that resumes the runs, for messages.

    Raises:
        ConfigError: the runs cannot be one program, or are at different steps.
        TrainingError: one run diverged, which ends all of them, or the program does not fit the device.
    """
    vmap.check([c for _, c in members])
    pool.check_main_program(members[0][1].data.workers)

    def prepare(timer: Timer) -> vmap.EnsembleRun:
        mesh = meshes.make_mesh(devices=jax.local_devices()[:1])
        return vmap.EnsembleRun(
            [train_setup.prepare(c, workdir, timer, mesh=mesh, name=workdir.name) for workdir, c in members]
        )

    return start(prepare, members[0][1].hang_seconds, again=again)


def _parse_member(text: str) -> list[str]:
    """Return the folder and the flags of a run. Raises ConfigError if the text is not a JSON list of strings."""
    try:
        words = json.loads(text)
    except json.JSONDecodeError:
        words = None
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        raise ConfigError(f"--member={text}: expected a JSON list of a folder and flags, as `sweep --vmap` writes it.")
    return words


@cli.command(
    cli.Flag("member", "Run, as a JSON list of its folder and the flags of its config.", required=True, many=True),
)
def main(f: cli.Values) -> int:
    members = []
    for text in f.member:
        folder, *words = _parse_member(text)
        c = cli.parse([cli.CONFIG], words).config
        tasks.resolve(c)
        members.append((Path(folder).expanduser(), c))
    checks.check(members[0][1])
    for _, c in members[1:]:  # they may differ only in the keys that `vmap.check` allows
        config.check(c)
    with oom_suggestions.explained(members[0][1], runs=len(members)):
        return train(members, again=f"python -m leanformer.train_vmap {f.argv}")


if __name__ == "__main__":
    cli.run(main)
