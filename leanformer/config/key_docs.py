"""What each key of a config means, read out of `config.py`, where it stands beside the key; and pages of it."""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from leanformer import config


def meanings(*functions: Any) -> dict[str, str]:
    """{key: the comment behind its line, or on the lines above it} of functions of `config.py` that set keys."""
    found: dict[str, str] = {}
    for function in functions:
        source = inspect.getsource(function)
        comments, alone = _comments(source)
        for key, line in _keys(ast.parse(source)):
            above = []
            while (line_above := line - 1 - len(above)) in alone:
                above.insert(0, comments[line_above])
            words = comments.get(line) or " ".join(above)
            if words:
                found[key] = words
    return found


def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """Comments by line, and the lines that hold nothing else."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    return {t.start[0]: t.string.lstrip("# ") for t in tokens}, {t.start[0] for t in tokens if t.line.strip()[0] == "#"}


def _keys(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Keys that are set, with their lines: `c.a.b = ...`, and `b=...` in a call whose value becomes `c.a`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        root, *path = ast.unparse(node.targets[0]).split(".")
        name = ".".join([*(["model"] if root == "m" else []), *path])
        yield name, node.lineno
        if isinstance(node.value, ast.Call):
            yield from ((f"{name}.{keyword.arg}", keyword.value.lineno) for keyword in node.value.keywords)


def of_images() -> dict[str, str]:
    """Meanings of the keys of image models."""
    families = {f"model.{name}": words for name, words in config.FAMILIES.items()}
    return families | meanings(config.base, config.model)


def of_sequences() -> dict[str, str]:
    """Meanings of the keys of token sequences."""
    return of_images() | meanings(config.sequences)


def page(c: ConfigDict | None = None) -> str:
    """Every key with its value and its meaning: of a config, or by default."""
    if c is not None:
        return _lines(c, of_sequences() if "max_length" in c.model else of_images())
    images, sequences = config.base(), config.sequences()
    own = [f"  {key:<{WIDTH}} {words}" for key, words in config.FAMILIES.items()]
    others = {key: value for key, value in flat(sequences) if key not in dict(flat(images))}
    return "\n".join(
        [
            *("Keys of every config of images, --config.KEY=VALUE, with the values of config.base():", ""),
            _lines(images, of_images()),
            *("", "Keys of model that only some families have; their values are in configs/:", "", *own),
            *("", "Keys of token sequences besides, with the values of config.sequences():", ""),
            _lines(others, of_sequences()),
        ]
    )


WIDTH = 46


def _lines(c: Any, words: dict[str, str]) -> str:
    return "\n".join(f"  {f'{key}={_shown(value)}':<{WIDTH}} {_meaning(words, key)}" for key, value in flat(c))


def _meaning(words: dict[str, str], key: str) -> str:
    """Its own, or that of the section it is in."""
    return words[key] if key in words else _meaning(words, key.rpartition(".")[0])


def _shown(value: Any) -> str:
    if isinstance(value, ConfigDict):
        return "{}"
    return f"({','.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys, as they are typed, with their values."""
    for name, value in tree.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
