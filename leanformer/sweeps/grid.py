"""The members of a sweep: every point of a grid of configs, keys and seeds, and which of them one program can train."""

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer import cli
from leanformer.config import key_docs, loading
from leanformer.config.rules import LENGTHS
from leanformer.errors import ConfigError
from leanformer.training import report, vmap
from leanformer.training.restoring import steps_in


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    workdir: Path
    words: tuple[str, ...]  # of the training command

    @property
    def finished(self) -> bool:
        return (self.workdir / "summary.json").is_file()

    @functools.cached_property
    def config(self) -> ConfigDict:
        """Not checked yet. Raises ConfigError where it cannot be loaded."""
        return cli.parse([cli.CONFIG], self.words).config

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "leanformer.train", *self.words, f"--workdir={self.workdir}"]

    @property
    def members(self) -> tuple["Member", ...]:
        return (self,)


@dataclasses.dataclass(frozen=True)
class Group:
    """Members that one program trains; as one of them."""

    members: tuple[Member, ...]

    @property
    def workdir(self) -> Path:
        """That of the first."""
        return self.members[0].workdir

    @property
    def finished(self) -> bool:
        return all(member.finished for member in self.members)

    @property
    def command(self) -> list[str]:
        said = (json.dumps([str(member.workdir), *member.words]) for member in self.members)
        return [sys.executable, "-m", "leanformer.train_vmap", *(f"--member={text}" for text in said)]


def grouped(wanted: Sequence[Member]) -> list[Member | Group]:
    """Those that one program can train, with as many steps done, as groups. Raises ConfigError as `together.check`."""
    found: dict[Any, list[Member]] = {}
    for member in wanted:
        vmap.check([member.config])
        alike = (vmap.group_key(member.config), *steps_in(member.workdir / "checkpoints")[-1:])
        found.setdefault(alike, []).append(member)
    return [Group(tuple(members)) if len(members) > 1 else members[0] for members in found.values()]


def unfinished(found: Sequence[Member]) -> list[Member]:
    """Those that have not ended, and those that have, but are asked to train for longer now, as `train` does it.

    Raises:
        ConfigError: the folder of a member is of a run that was asked something else.
    """
    wanted, kept = [], set()
    for member in found:
        begun = member.finished or (member.workdir / "config.json").is_file()
        differing = report.changes(member.workdir, member.config) if begun else {}
        silent = {key for key in differing if key_docs.silent(key, member.config)}
        longer = {key for key, (was, now) in differing.items() if key in LENGTHS and now > was}
        if other := [key for key in differing if key not in silent | longer]:
            said = "; ".join(f"{key}={differing[key][0]}, asked is {differing[key][1]}" for key in other[:3])
            said += f"; and {len(other) - 3} more keys" * (len(other) > 3)
            raise ConfigError(
                f"{member.workdir} is of another run: {said}. Take another --workdir, or delete that folder to train "
                "it anew. No member was started."
            )
        for key in sorted(longer):
            print(f"*** {member.workdir.name} goes on for longer: {key} {differing[key][0]} -> {differing[key][1]}")
        if longer or not member.finished:
            wanted.append(member)
        else:
            kept |= silent
    if kept:
        print(f"What has ended is left as it is, with another {', '.join(sorted(kept))} than is asked for now.")
    return wanted


def members(
    configs: Sequence[str], over: Sequence[str], fixed: Sequence[str], seeds: int, folder: Path
) -> list[Member]:
    """Every point of the grid, by a name that says what it is.

    Raises:
        ConfigError: no config file, a flag that is not KEY=VALUE, or seeds by name.
    """
    if not configs or seeds < 1:
        raise ConfigError(f"--config: {len(configs)} files, --seeds={seeds}: at least 1 of each.")
    keys = [*(pair(text, "--over")[0] for text in over), *{pair(text, "--set")[0] for text in fixed}]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"{twice[0]} is told twice, by --over: say it once, with all values, and not by --set too.")
    grid = {key: values.split(",") for key, values in (pair(text, "--over") for text in over)}
    if "seed" in keys:
        raise ConfigError("The seeds of a sweep are 0, 1, ...: give how many with --seeds=N, and no key seed.")
    grid["seed"] = [str(seed) for seed in range(seeds)]
    same = tuple("--config.{}={}".format(*pair(text, "--set")) for text in fixed)
    found = []
    for config, *point in itertools.product(_whole(configs), *grid.values()):
        file, *argument = config.split(":", 1)
        changes = dict(zip(grid, point, strict=True))
        said = [f"{key.rpartition('.')[2]}={value}" for key, value in changes.items()]
        words = tuple(f"--config.{key}={value}" for key, value in changes.items())
        config = ":".join([str(loading.find(file).absolute()), *argument])
        name = ",".join([Path(file).stem, *argument, *said]).replace("/", "_")  # one folder, though a value is a path
        found.append(Member(folder / name, (f"--config={config}", *same, *words)))
    if len({member.workdir for member in found}) < len(found):
        raise ConfigError("Two members have the same name: config files, or last parts of --over keys, are alike.")
    return found


def _whole(parts: Sequence[str]) -> list[str]:
    """Config files whose arguments were cut at their own commas: "a:x=1", "y=2" is one, a.py with x and y."""
    found: list[str] = []
    for part in parts:
        if found and "=" in part.partition(":")[0]:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def pair(text: str, flag: str) -> tuple[str, str]:
    """The two parts of a flag's KEY=VALUE. Raises ConfigError for what is none."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ConfigError(f'{flag}="{text}" is not KEY=VALUE.')
    return key, value
