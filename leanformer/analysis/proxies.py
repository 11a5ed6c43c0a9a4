"""Config files of planned architectures, and proxy runs to which the response surface is fitted."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer.analysis import shapes
from leanformer.analysis.shapes import Costs, Shape
from leanformer.config import find_file, iterate_keys, load
from leanformer.errors import ConfigError, TrainingError
from leanformer.runtime import files, stopping


SMALLEST = 1 / 3  # lowest cost of a proxy run as a fraction of the budget, to avoid extrapolation
CONFIG = '''"""{title}

Command:   python -m leanformer.train --config={file} --workdir=DIR
Base:      {base}, which sets all other keys.
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
    """Config that all planned configs load and change in their sizes only."""

    file: str  # full path of the config file, with its argument after a colon if any
    changes: Mapping[str, Any]  # keys that were set on the command line, without the planned sizes

    @classmethod
    def of(cls, name: str, config: ConfigDict) -> "Base":
        """Return the base of a config that was loaded from the file `name`, FILE or FILE:ARGUMENT."""
        file, colon, argument = name.partition(":")
        whole = f"{find_file(file).absolute()}{colon}{argument}"
        plain, planned = dict(iterate_keys(load(whole))), {f"model.{axis}" for axis in shapes.AXES}
        differ = {key: x for key, x in iterate_keys(config) if key not in plain or plain[key] != x}
        return cls(whole, {key: value for key, value in differ.items() if key not in planned})

    def write(self, out: Path, named: Mapping[str, Shape], costs: Costs, why: str) -> list[Path]:
        """Write one config file per architecture to a folder, with the reason `why`, and return the paths."""
        changes = "".join(f"    c.{key} = {value!r}\n" for key, value in self.changes.items())
        paths = [out / f"{name}.py" for name in named]
        for path, shape in zip(paths, named.values(), strict=True):
            sizes = shapes.describe(shape).replace(",", ", ")
            title = f"{Path(self.file.partition(':')[0]).stem} as planned: {sizes.replace('=', ' ')}."
            content = {"title": title, "file": path.name, "base": self.file, "params": costs.of("params", shape)}
            files.write_text(path, CONFIG.format(**content, why=why, sizes=sizes, changes=changes))
        return paths


def train(out: Path, base: Base, chosen: Sequence[Shape], costs: Costs, *, why: str, words: Sequence[str]) -> Path:
    """Train architectures with `leanformer.sweep` in a child process, and return the folder of the runs.

    The same call resumes an interrupted sweep; `words` are its further flags. Single runs may fail. A stop signal to
    the sweep ends this process with the same exit status.
    """
    changes = {key: repr(value) for key, value in base.changes.items()}
    settings = [word for word in words if word.startswith("--set=")]  # seeds and shapes may be added
    files.check_same(out / "proxies.json", {"base": base.file, "changes": changes, "settings": settings})
    named = {f"proxy_{'x'.join(map(str, shape))}": shape for shape in chosen}
    paths = base.write(out / "shapes", named, costs, why)
    given = [f"--config={','.join(map(str, paths))}", f"--workdir={out / 'runs'}", *words]
    status = subprocess.run([sys.executable, "-m", "leanformer.sweep", *given], check=False).returncode
    if status in stopping.STATUS.values():
        sys.exit(status)
    if status == 2:
        raise ConfigError("The sweep of the proxy runs failed; the reason is above. Nothing was planned.")
    if not list((out / "runs").glob("*/summary.json")):
        raise TrainingError(f"None of {len(chosen)} proxy runs finished. See {out / 'runs' / 'logs'}.")
    return out / "runs"
