"""Config keys declared as frozen dataclasses: a field is a key, with its type, default, and a comment, its meaning."""

import ast
import functools
import inspect
import io
import math
import tokenize
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from leanformer.errors import ConfigError


__all__ = ["ConfigDict", "Literal", "Size", "check", "dataclass", "field", "meanings", "section"]

Size = int | tuple[int, ...]  # one number, or one per layer


def section(declaration: Any) -> ConfigDict:
    """Return the ConfigDict, not locked, of an instance of a declaration; nested declarations become sections."""
    result = ConfigDict()
    for key in fields(declaration):
        result[key.name] = _typed(key.type, getattr(declaration, key.name))
    return result


def _typed(annotation: Any, value: Any) -> Any:
    """Return what to store in a ConfigDict, which takes the type of a key from its first value."""
    if is_dataclass(value):
        return section(value)
    if isinstance(value, ConfigDict):
        return ConfigDict(value)
    kinds = {get_origin(kind) or kind for kind in _alternatives(annotation)} - {NoneType}
    if len(kinds) > 1:
        return FieldReference(value, field_type=object)
    (kind,) = kinds
    return placeholder(str if kind is Literal else kind) if value is None else value


def iterate_keys(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pairs (dotted key, value) of a config, with `prefix` before each key; an empty section is a value."""
    for name, value in tree.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from iterate_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def check(values: Any, declaration: Any, prefix: str = "") -> None:
    """Raise ConfigError if a declared key is missing or has a value of another type; other keys are ignored."""
    for key in fields(declaration):
        name, value = f"{prefix}{key.name}", values.get(key.name, MISSING)
        if is_dataclass(key.type) and isinstance(value, ConfigDict):
            check(value, key.type, f"{name}.")
        elif value is MISSING or not fits(value, key.type):
            found = " is missing" if value is MISSING else f"={value!r}"
            meaning = meanings(declaration).get(key.name, "")
            raise ConfigError(f"{name}{found}: expected {describe(key.type)}. Its meaning: {meaning}.")


def types_of(declaration: Any) -> dict[str, Any]:
    return {key.name: key.type for key in fields(declaration)}


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def fits(value: Any, annotation: Any) -> bool:
    """Return True if a value has an annotated type; an integer is also a number."""
    return any(_is(value, kind) for kind in _alternatives(annotation))


def _is(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        several = isinstance(value, tuple | list)
        parts = parts[:1] * len(value) if several and parts[-1] is ... else parts
        return several and len(value) == len(parts) and all(map(fits, value, parts))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def describe(annotation: Any) -> str:
    """Return a type as it is declared."""
    kinds = _alternatives(annotation)
    names = (kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("typing.") for kind in kinds)
    return " or ".join(names).replace("NoneType", "None")


def meanings(declaration: Any, prefix: str = "") -> dict[str, str]:
    """Return {dotted key: meaning} from the comments at the fields, or else at the same field of a base class."""
    result: dict[str, str] = {}
    for cls in reversed(declaration.__mro__):
        if is_dataclass(cls):
            texts = _comments(inspect.getfile(cls))[cls.__name__]
            result |= {f"{prefix}{key}": text for key, text in texts.items()}
    for key in fields(declaration):
        if is_dataclass(key.type):
            result |= meanings(key.type, f"{prefix}{key.name}.")
        elif any(get_origin(kind) is Literal for kind in _alternatives(key.type)):
            result[f"{prefix}{key.name}"] += f" ({describe(key.type)})"
    return result


@functools.cache
def _comments(file: str) -> dict[str, dict[str, str]]:
    """Return {class: {field: the comment behind it, or else the lines of comments above it}} of a file."""
    source = Path(file).read_text(encoding="utf-8")
    found = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    comments = {t.start[0]: t.string.lstrip("# ") for t in found}
    alone = {t.start[0] for t in found if t.line.lstrip().startswith("#")}
    result: dict[str, dict[str, str]] = {}
    for cls in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        texts = result.setdefault(cls.name, {})
        for node in cls.body:
            if isinstance(node, ast.AnnAssign):
                above: list[str] = []
                while (line := node.lineno - 1 - len(above)) in alone:
                    above.insert(0, comments[line])
                if text := comments.get(node.end_lineno or 0) or " ".join(above):
                    texts[ast.unparse(node.target)] = text
    return result
