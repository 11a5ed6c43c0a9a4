"""Runs of a sweep: the grid of configs, keys and seeds."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from leanformer import cli, tasks
from leanformer.config import find_file, is_run_only
from leanformer.config.key_docs import split_values
from leanformer.config.rules import LENGTHS
from leanformer.errors import ConfigError
from leanformer.quantities import find
from leanformer.runtime import files
from leanformer.runtime.text import format_value
from leanformer.tasks.task import Score
from leanformer.training import run_files


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """Run of a sweep.

    Attributes:
        workdir: folder of the run.
        words: arguments of the training command: --config=FILE, then --config.KEY=VALUE with the seed last, without
            --workdir.
    """

    workdir: Path
    words: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """True if the folder has a summary.json, which is written at the end of training."""
        return (self.workdir / "summary.json").is_file()

    @property
    def final_score(self) -> str:
        """Final score and loss as text, as far as the run recorded them; empty if it has not finished.

        Raises WorkdirError if its summary.json is corrupted.
        """
        if not self.finished:
            return ""
        summary = files.read_json(self.workdir / "summary.json")
        final, score = summary["final"], Score.read(summary["score"])
        names = [name for name in dict.fromkeys((score.name, "loss")) if final.get(name) is not None]
        return "  ".join(f"{find(name).label} {format_value(name, final[name])}" for name in names)

    @functools.cached_property
    def config(self) -> ConfigDict:
        """Config of the run, not validated yet. Raises ConfigError if it cannot be loaded."""
        c = cli.parse([cli.CONFIG], self.words).config
        tasks.resolve(c)
        return c

    @property
    def command(self) -> list[str]:
        """Command that trains the run, as a list of words, beginning with the Python interpreter."""
        return [sys.executable, "-m", "leanformer.train", *self.words, f"--workdir={self.workdir}"]


def select_unfinished(members: Sequence[SweepRun]) -> list[SweepRun]:
    """Return the runs that have not finished, and the finished ones whose config now has a greater length.

    The length is total_steps, total_epochs or total_tokens. Keys that affect no result may differ
    (`is_run_only`). Prints which runs are extended.

    Raises ConfigError if the folder of a run holds a run whose config differs in any other way.
    """
    pending = []
    for member in members:
        started = member.finished or (member.workdir / "config.json").is_file()
        changes = run_files.config_changes(member.workdir, member.config) if started else {}
        changes = {key: ends for key, ends in changes.items() if not is_run_only(key)}
        longer = {
            key: ends for key, ends in changes.items() if key in LENGTHS and None not in ends and ends[1] > ends[0]
        }
        if other := [f"{key}={was}, now {now}" for key, (was, now) in changes.items() if key not in longer]:
            raise ConfigError(
                f"{member.workdir} holds a run with a different config: {'; '.join(other)}. Use another --workdir, or "
                "delete this folder to train the run again. No run was started."
            )
        for key, (was, now) in longer.items():
            print(f"{member.workdir.name} is extended: {key} {was} -> {now}")
        if longer or not member.finished:
            pending.append(member)
    return pending


def make_runs(
    configs: Sequence[str], over: Sequence[str], fixed: Sequence[str], seeds: int, folder: Path
) -> list[SweepRun]:
    """Return one run per point of the grid and seed. Nothing is written.

    The folder of a run is named after its config and values, such as "quickstart,num_heads=8,seed=0".

    Args:
        configs: config files, FILE or FILE:ARGUMENT.
        over: values of --over, KEY=VALUE,... or KEY,KEY=VALUExVALUE,...; the grid is their product.
        fixed: values of --set, KEY=VALUE, for all runs.
        seeds: number of seeds, 0 to seeds - 1, of every point.
        folder: folder of the sweep, in which each run has its folder.

    Raises:
        ConfigError: there is no config file, a config file does not exist, a flag is not of this form, a key
            is given twice or is the seed, or two runs would have the same folder.
    """
    if not configs:
        raise ConfigError("--config: at least 1 file is required.")
    axes = [_parse_over(text) for text in over]
    same = [parse_assignment(text, "--set") for text in fixed]
    keys = [*(key for key, _ in same), *(key for points in axes for key in points[0])]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"{twice[0]} is given more than once. Pass all its values in one --over.")
    if "seed" in keys:
        raise ConfigError("A sweep does not take the key seed: its seeds are 0, 1, ... Pass their number as --seeds=N.")
    axes.append([{"seed": str(seed)} for seed in range(seeds)])
    common = tuple(f"--config.{key}={value}" for key, value in same)
    result = []
    for config, points in itertools.product(_join_arguments(configs), itertools.product(*axes)):
        file, *argument = config.split(":", 1)
        changes = {key: value for point in points for key, value in point.items()}
        values = [f"{key.rpartition('.')[2]}={value}" for key, value in changes.items()]
        words = tuple(f"--config.{key}={value}" for key, value in changes.items())
        config = ":".join([str(find_file(file).absolute()), *argument])
        name = ",".join([Path(file).stem, *argument, *values]).replace("/", "_")  # a value may be a path
        result.append(SweepRun(folder / name, (f"--config={config}", *common, *words)))
    names = [member.workdir.name for member in result]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"Two runs of the sweep would have the folder {twice[0]}. Give each value once, rename a config file, or "
            "vary only one key ending in the same word with --over."
        )
    return result


def _parse_over(text: str) -> list[dict[str, str]]:
    """Return the points of one --over, each with the values of its keys.

    Several keys move together: "model.num_heads,model.head_dim=2x32,4x16" has two points.
    """
    names, values = parse_assignment(text, "--over")
    keys = names.split(",")
    points = [value.split("x") if len(keys) > 1 else [value] for value in split_values(values)]
    if wrong := [point for point in points if len(point) != len(keys) or not all(point)]:
        raise ConfigError(
            f"--over={text}: {'x'.join(wrong[0])} is not one value for each of {len(keys)} keys. Join them by x, as in "
            "--over=model.num_heads,model.head_dim=2x32,4x16."
        )
    return [dict(zip(keys, point, strict=True)) for point in points]


def _join_arguments(parts: Sequence[str]) -> list[str]:
    """Return config files with their arguments, which were split at commas: "a:x=1", "y=2" becomes "a:x=1,y=2"."""
    configs: list[str] = []
    for part in parts:
        head = part.partition(":")[0]
        if configs and "=" in head and not head.endswith(".py"):
            configs[-1] += f",{part}"
        else:
            configs.append(part)
    return configs


def parse_assignment(text: str, flag: str) -> tuple[str, str]:
    """Return the key and the value in a flag's value KEY=VALUE.

    Args:
        text: value of the flag.
        flag: flag as typed, such as "--set", for the message.

    Raises:
        ConfigError: the text does not have this form, or a part is empty.
    """
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ConfigError(f'{flag}="{text}" is not KEY=VALUE.')
    return key, value
