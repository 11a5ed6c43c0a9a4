"""Help texts of config keys, read from the comments beside their defaults, and help pages."""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from leanformer import config
from leanformer.config import common
from leanformer.errors import ConfigError


RUN_ONLY_KEYS = ("log_every", "loggers", "hang_seconds", "deterministic", "data.workers", "data.prefetch")
RUN_ONLY_SECTIONS = ("checkpoint.", "probe.", "mesh.", "eval.every", "eval.batch_size")


def is_run_only(key: str, c: Any) -> bool:
    """Return True if a dotted key of config `c` changes only the speed of a run and its saved files, no result."""
    return key in RUN_ONLY_KEYS or key.startswith(RUN_ONLY_SECTIONS)


def key_comments(*functions: Any) -> dict[str, str]:
    """Return {dotted key: help text}: the comments behind or above the lines of `functions` that set config keys."""
    texts: dict[str, str] = {}
    for function in functions:
        source = inspect.getsource(function)
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
        comments = {t.start[0]: t.string.lstrip("# ") for t in tokens}
        alone = {t.start[0] for t in tokens if t.line.strip()[0] == "#"}  # lines with nothing but a comment
        for key, line in _keys(ast.parse(source)):
            above = []
            while (line_above := line - 1 - len(above)) in alone:
                above.insert(0, comments[line_above])
            words = comments.get(line) or " ".join(above)
            if words:
                texts[key] = words
    return texts


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
    """Return {dotted key: help text} for the config of a task type; the texts of images if the type is unknown."""
    parts = config.KINDS[task].parts if task in config.KINDS else ()
    shared = (common.common, common.optimizer, common.section, common.softmax, common.interventions)
    return _family_texts() | key_comments(*shared, config.base, config.model, *parts)


def _family_texts() -> dict[str, str]:
    return {f"model.{name}": words for name, words in config.FAMILIES.items()}


def help_page(c: ConfigDict | None = None, section: str = "") -> str:
    """Return a help page of config keys, each with its value and help text.

    Args:
        c: config; None for the defaults of all tasks.
        section: section or key that the page is restricted to, such as "model"; "" for all.

    Raises:
        ConfigError: no key is in `section`.
    """
    if c is not None:
        groups = {"": _lines(c, help_texts(c.task), section)}
    else:
        listed = dict(iterate_keys(config.base()))
        groups = {
            "Keys of image configs, --config.KEY=VALUE, with the defaults of config.base():": _lines(
                config.base(), help_texts("images"), section
            ),
            "Keys of model that only some architectures have, with values in configs/:": [
                f"  {key:<{WIDTH}} {words}" for key, words in _family_texts().items() if _is_in(key, section)
            ],
        }
        for task, kind in config.KINDS.items():
            others = {key: value for key, value in iterate_keys(kind.defaults()) if key not in listed}
            listed |= others
            function: Any = kind.defaults
            values = f"with the defaults of config.{function.__name__}():"
            title = f'Further keys of task="{task}" ({kind.name}), {values}'
            groups[title] = _lines(others, help_texts(task), section)
    parts = ["\n".join([title, "", *lines] if title else lines) for title, lines in groups.items() if lines]
    if not parts:
        sections = sorted({key.partition(".")[0] for key, _ in iterate_keys(c or config.base()) if "." in key})
        raise ConfigError(f"{section}: no section or key of the config. Sections are: {', '.join(sections)}.")
    return "\n\n".join(parts)


WIDTH = 46
NO_HELP = "key of the config file, without a help text"


def _is_in(key: str, section: str) -> bool:
    return not section or key == section or key.startswith(f"{section}.")


def _lines(c: Any, words: dict[str, str], section: str = "") -> list[str]:
    """Format the keys of a section, one line per key."""
    return [
        f"  {f'{key}={format_value(value)}':<{WIDTH}} {meaning(words, key)}"
        for key, value in iterate_keys(c)
        if _is_in(key, section)
    ]


def meaning(words: dict[str, str], key: str) -> str:
    """Return the help text of a dotted key, or of the section that contains it; NO_HELP if neither has one.

    Args:
        words: help texts by dotted key, from `help_texts`.
    """
    while key not in words and key:
        key = key.rpartition(".")[0]
    return words.get(key, NO_HELP)


def format_value(value: Any) -> str:
    """Format the value of a key as typed on the command line: a tuple as (1,2); an empty section as {}."""
    if isinstance(value, ConfigDict):
        return "{}"
    return f"({','.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def iterate_keys(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pairs (dotted key, value) of a config, with `prefix` before each key; an empty section is a value."""
    for name, value in tree.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from iterate_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
