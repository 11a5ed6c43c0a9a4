"""Help texts of config keys, read from the comments beside their defaults, and help pages."""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from leanformer import config


RUN_ONLY_KEYS = ("log_every", "loggers", "hang_seconds", "deterministic", "data.workers", "data.prefetch")
RUN_ONLY_SECTIONS = ("checkpoint.", "probe.", "mesh.", "eval.every", "eval.batch_size")


def is_run_only(key: str, c: Any) -> bool:
    """Return True if a key of config `c` changes only the speed of a run and its saved files, no result."""
    ends_it = key == "eval.every" and c.eval.get("patience", 0) > 0  # early stopping counts evaluations
    return (key in RUN_ONLY_KEYS or key.startswith(RUN_ONLY_SECTIONS)) and not ends_it


def key_comments(*functions: Any) -> dict[str, str]:
    """Return help texts by key: the comments behind or above the lines of `functions` that set keys."""
    texts: dict[str, str] = {}
    for function in functions:
        source = inspect.getsource(function)
        comments, alone = _comments(source)
        for key, line in _keys(ast.parse(source)):
            above = []
            while (line_above := line - 1 - len(above)) in alone:
                above.insert(0, comments[line_above])
            words = comments.get(line) or " ".join(above)
            if words:
                texts[key] = words
    return texts


def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """Return comments by line number, and the numbers of lines with nothing but a comment."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    return {t.start[0]: t.string.lstrip("# ") for t in tokens}, {t.start[0] for t in tokens if t.line.strip()[0] == "#"}


def _keys(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield keys with line numbers, from `c.a.b = ...`, and from `b=...` in a call whose value becomes `c.a`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        root, *path = ast.unparse(node.targets[0]).split(".")
        name = ".".join([*(["model"] if root == "m" else []), *path])
        yield name, node.lineno
        if isinstance(node.value, ast.Call):
            yield from ((f"{name}.{keyword.arg}", keyword.value.lineno) for keyword in node.value.keywords)


def help_texts(task: str) -> dict[str, str]:
    """Return the help texts of the keys of a task type; those of images if the type is unknown."""
    families = {f"model.{name}": words for name, words in config.FAMILIES.items()}
    kind = config.KINDS.get(task)
    shared = (
        config.common,
        config.optimizer,
        config.section,
        config.softmax,
        config.interventions,
        config.base,
        config.model,
    )
    return families | key_comments(*shared, *(kind.parts if kind else ()))


def help_page(c: ConfigDict | None = None) -> str:
    """Return a help page of all keys with value and help text: of a config, or of the defaults."""
    if c is not None:
        return _lines(c, help_texts(c.task))
    listed = dict(iterate_keys(config.base()))
    lines = ["Keys of image configs, --config.KEY=VALUE, with the defaults of config.base():", ""]
    lines += [_lines(config.base(), help_texts("images")), ""]
    lines += ["Keys of model that only some architectures have, with values in configs/:", ""]
    lines += [f"  {key:<{WIDTH}} {words}" for key, words in config.FAMILIES.items()]
    for task, kind in config.KINDS.items():
        others = {key: value for key, value in iterate_keys(kind.defaults()) if key not in listed}
        if others:
            values = f"with the defaults of config.{kind.defaults.__name__}():"
            lines += [
                "",
                f'Further keys of task="{task}" ({kind.name}), {values}',
                "",
                _lines(others, help_texts(task)),
            ]
            listed |= others
    return "\n".join(lines)


WIDTH = 46


def _lines(c: Any, words: dict[str, str]) -> str:
    return "\n".join(f"  {f'{key}={_shown(value)}':<{WIDTH}} {_meaning(words, key)}" for key, value in iterate_keys(c))


def _meaning(words: dict[str, str], key: str) -> str:
    """Return the help text of a key, or of the section that contains it."""
    return words[key] if key in words else _meaning(words, key.rpartition(".")[0])


def _shown(value: Any) -> str:
    if isinstance(value, ConfigDict):
        return "{}"
    return f"({','.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def iterate_keys(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys, as on the command line, with their values."""
    for name, value in tree.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from iterate_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
