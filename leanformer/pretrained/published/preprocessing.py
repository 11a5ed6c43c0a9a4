"""Normalisation of images in the files beside published weights, compared with that of the config."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanformer.runtime import multihost


TOLERANCE = 1e-6
KEYS = {  # file, path of the section, keys of mean and standard deviation
    "huggingface": ("preprocessor_config.json", (), ("image_mean", "image_std")),
    "timm": ("config.json", ("pretrained_cfg",), ("mean", "std")),
}


def warn_normalisation(path: str | Path, layout: str, mean: Sequence[float | int], std: Sequence[float | int]) -> None:
    """Warn if published weights were trained with another normalisation of images than that of the config.

    Args:
        path: file of weights, index of several, or their folder.
        layout: layout of the weights, "huggingface" or "timm".
        mean, std: keys of config.data, one number per channel.
    """
    path = Path(path).expanduser()
    name, sections, keys = KEYS[layout]
    file = (path if path.is_dir() else path.parent) / name
    theirs = [_find_numbers(file, sections, key) for key in keys] if multihost.is_primary() else []
    for key, ours, other in zip(("mean", "std"), (mean, std), theirs, strict=False):
        if other is not None and not _is_close(ours, other):
            print(
                f"WARNING: {file}: these weights expect data.{key}={tuple(other)}, but it is {tuple(ours)}: outputs "
                f'differ from those of the published model. Set --config.data.{key}="{tuple(other)}".',
                file=sys.stderr,
                flush=True,
            )


def _find_numbers(file: Path, sections: Sequence[str], key: str) -> list[Any] | None:
    """Return a list of numbers in a JSON file; None if the file, or the list, does not exist or is something else."""
    try:
        content: Any = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    for section in (*sections, key):
        content = content.get(section) if isinstance(content, dict) else None
    numbers = isinstance(content, list) and content and all(isinstance(x, int | float) for x in content)
    return content if numbers else None


def _is_close(ours: Sequence[float | int], theirs: Sequence[float | int]) -> bool:
    """Return whether two normalisations are equal; a grey image has that of all channels."""
    pairs = zip(ours if len(ours) > 1 else [*ours] * len(theirs), theirs, strict=False)
    return len(ours) in (1, len(theirs)) and all(abs(a - b) <= TOLERANCE for a, b in pairs)
