"""Config files of planned shapes, and proxy runs that a response surface is fitted to."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer.analysis import shapes
from leanformer.analysis.shapes import Costs, Shape
from leanformer.config import key_docs, loading
from leanformer.errors import ConfigError, TrainingError
from leanformer.runtime import files, interrupt


SMALLEST = 1 / 3  # of the budget: proxies lie between this and all of it, so that the surface is not extrapolated
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
    """Common part of the planned configs.

    Attributes:
        file: full path of a config file, with its argument.
        changes: keys that were set on the command line.
    """

    file: str
    changes: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, c: ConfigDict) -> "Base":
        """Return the base of a config that was loaded by this name."""
        file, colon, argument = name.partition(":")
        whole = f"{loading.find(file).absolute()}{colon}{argument}"
        plain = dict(key_docs.flat(loading.load(whole)))
        return cls(whole, {key: value for key, value in key_docs.flat(c) if key not in plain or plain[key] != value})

    def write(self, out: Path, named: Mapping[str, Shape], costs: Costs, why: str) -> list[Path]:
        """Write a config file for each shape, by its name."""
        out.mkdir(parents=True, exist_ok=True)
        changes = "".join(f"    c.{key} = {value!r}\n" for key, value in self.changes.items())
        paths = [out / f"{name}.py" for name in named]
        for path, shape in zip(paths, named.values(), strict=True):
            sizes = shapes.describe(shape).replace(",", ", ")
            title = f"{Path(self.file.partition(':')[0]).stem} as planned: {sizes.replace('=', ' ')}."
            content = {"title": title, "file": path.name, "base": self.file, "params": costs.of("params", shape)}
            files.write_text(path, CONFIG.format(**content, why=why, sizes=sizes, changes=changes))
        return paths


def train(out: Path, base: Base, chosen: Sequence[Shape], costs: Costs, *, why: str, words: Sequence[str]) -> Path:
    """Train shapes with `leanformer.sweep`, which resumes what was interrupted. Return the folder of the runs.

    Args:
        out: folder for configs (out/shapes) and runs (out/runs).
        words: further arguments of the sweep.

    Raises:
        ConfigError: the sweep refused them and said why, or the folder holds proxies of other settings.
        TrainingError: no run ended.
    """
    out.mkdir(parents=True, exist_ok=True)
    changes = {key: repr(value) for key, value in base.changes.items()}
    settings = [word for word in words if word.startswith("--set=")]  # seeds and shapes may be added
    files.check_same(out / "proxies.json", {"base": base.file, "changes": changes, "settings": settings})
    named = {f"proxy_{'x'.join(map(str, shape))}": shape for shape in chosen}
    paths = base.write(out / "shapes", named, costs, why)
    given = [f"--config={','.join(map(str, paths))}", f"--workdir={out / 'runs'}", *words]
    status = subprocess.run([sys.executable, "-m", "leanformer.sweep", *given], check=False).returncode
    if status in interrupt.STATUS.values():
        sys.exit(status)
    if status == 2:
        raise ConfigError("The sweep of the proxies was refused, for the reason above. Nothing was planned.")
    if not list((out / "runs").glob("*/summary.json")):
        raise TrainingError(f"None of {len(chosen)} proxies ended: see {out / 'runs' / 'logs'} and the lines above.")
    return out / "runs"
