"""Shapes as config files, and the runs of them that a response surface is fitted to."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer.config import key_docs, loading
from leanformer.errors import ConfigError, TrainingError
from leanformer.runtime import files, interrupt
from leanformer.training import shapes
from leanformer.training.shapes import Costs, Shape


SMALLEST = 1 / 3  # of the budget: proxies are from here up to all of it, so that the surface is not extrapolated
CONFIG = '''"""{title}

Command:   python -m leanformer.train --config={file} --workdir=DIR
Base:      {base}, of which everything else is.
Counts:    {params:,} parameters.
Planned:   {why}
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load({base!r})
    c.model.update({sizes})
{changes}    return c
'''


@dataclasses.dataclass(frozen=True)
class Base:
    """What the shapes have in common: a config file, by its full path and with its argument, and what was changed of
    it on the command line, by key."""

    file: str
    changes: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, c: ConfigDict) -> "Base":
        """Of a config that was loaded by this name."""
        file, colon, argument = name.partition(":")
        whole = f"{loading.find(file).absolute()}{colon}{argument}"
        plain = dict(key_docs.flat(loading.load(whole)))
        return cls(whole, {key: value for key, value in key_docs.flat(c) if key not in plain or plain[key] != value})


def write(out: Path, base: Base, chosen: Mapping[str, Shape], params: Sequence[int], why: str) -> list[Path]:
    """Writes a config file for each shape, by its name."""
    out.mkdir(parents=True, exist_ok=True)
    changes = "".join(f"    c.{key} = {value!r}\n" for key, value in base.changes.items())
    paths = []
    for (name, shape), number in zip(chosen.items(), params, strict=True):
        path = out / f"{name}.py"
        sizes = shapes.said(shape).replace(",", ", ")
        title = f"{Path(base.file.partition(':')[0]).stem} as planned: {sizes.replace('=', ' ')}."
        content = {"title": title, "file": path.name, "base": base.file, "params": number, "why": why}
        files.write_text(path, CONFIG.format(**content, sizes=sizes, changes=changes))
        paths.append(path)
    return paths


def train(out: Path, base: Base, chosen: Sequence[Shape], costs: Costs, *, why: str, words: Sequence[str]) -> Path:
    """Trains shapes by `leanformer.sweep`, which goes on where it was stopped. Returns its folder.

    Args:
        out: for configs, in out/shapes, and runs, in out/runs.
        words: more of the sweep's.

    Raises:
        ConfigError: the sweep refused them, and said why; or the folder holds proxies of other settings.
        TrainingError: none of them ended.
    """
    out.mkdir(parents=True, exist_ok=True)
    changes = {key: repr(value) for key, value in base.changes.items()}
    settings = [word for word in words if word.startswith("--set=")]  # seeds and shapes may be added
    files.check_same(out / "proxies.json", {"base": base.file, "changes": changes, "settings": settings})
    named = {f"proxy_{'x'.join(map(str, shape))}": shape for shape in chosen}
    paths = write(out / "shapes", base, named, [costs.of("params", shape) for shape in chosen], why)
    given = [f"--config={','.join(map(str, paths))}", f"--workdir={out / 'runs'}", *words]
    status = subprocess.run([sys.executable, "-m", "leanformer.sweep", *given], check=False).returncode
    if status in interrupt.STATUS.values():
        sys.exit(status)
    if status == 2:
        raise ConfigError("The sweep of the proxies was refused, for the reason above. Nothing was planned.")
    if not list((out / "runs").glob("*/summary.json")):
        raise TrainingError(
            f"None of {len(chosen)} proxies ended: {out / 'runs' / 'logs'} and the lines above say why."
        )
    return out / "runs"
