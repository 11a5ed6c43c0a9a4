"""Table of the settings in the published configs of one layout, and their translation to the keys of config.model."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any


EMPTY: Mapping[str, Any] = MappingProxyType({})
# Names of activations in other libraries that differ from those of `layers.mlp.ACTIVATIONS`.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
ACTIVATIONS |= {"gelu_python": "gelu", "swish": "silu"}


@dataclasses.dataclass(frozen=True)
class Table:
    """Table of the keys of a published config: keys with one of ours, keys with one supported value, and harmless ones.

    Any other key is unknown, and may change what the model computes. Our keys are those of config.model.

    Attributes:
        architecture: value of config.model.name.
        keys: {published key: (our key, value that the library uses without the key)}.
        implied: {our key: value that it has in every such model}.
        fixed: {further published key: only supported value, which is also its default}.
        harmless: published keys that change no output in evaluation.
        derive: function from all published values, with defaults, to {further key of ours: value}.
    """

    architecture: str
    keys: Mapping[str, tuple[str, Any]]
    implied: Mapping[str, Any] = EMPTY
    fixed: Mapping[str, Any] = EMPTY
    harmless: Collection[str] = ()
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: EMPTY

    def names(self, *ours: str) -> dict[str, str]:
        """Return {our key: published key} for those of the keys `ours` that have one; the others are left out."""
        return {key: name for name, (key, _) in self.keys.items() if key in ours}

    def find_unknown(self, content: Mapping[str, Any]) -> list[str]:
        """Return the sorted keys of a published config that are not in the table, except those that begin with _."""
        known = {*self.keys, *self.fixed, *self.harmless}
        return sorted(key for key in content if key not in known and not key.startswith("_"))

    def find_unsupported(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return {key: value} for the keys of a published config whose value no model here supports."""
        return {key: content[key] for key, only in self.fixed.items() if _plain(content.get(key, only)) != _plain(only)}

    def translate(self, content: Mapping[str, Any], *, complete: bool = True) -> dict[str, Any]:
        """Return {key of config.model: value} that a published config requires.

        Args:
            content: the published config.
            complete: True for all our keys of the table, also those with default, implied or derived values; False for
                only those whose published key is in `content`.
        """
        if not complete:
            return {ours: _normalise(ours, content[key]) for key, (ours, _) in self.keys.items() if key in content}
        values = {name: default for name, (_, default) in self.keys.items()} | dict(content)
        ours = {key: values[name] for name, (key, _) in self.keys.items()} | dict(self.implied)
        ours |= self.derive(values)
        heads, width = ours.get("num_heads"), ours.get("width")
        stand_for = {"num_kv_heads": heads, "head_dim": None, "mlp_dim": None}
        if isinstance(heads, int) and isinstance(width, int) and heads > 0:
            stand_for |= {"head_dim": width // heads, "mlp_dim": 4 * width}
        ours |= {key: value for key, value in stand_for.items() if key in ours and ours[key] is None}
        return {key: _normalise(key, value) for key, value in ours.items()}


def _normalise(key: str, value: Any) -> Any:
    if key == "activation" and isinstance(value, str):
        return ACTIVATIONS.get(value, value)
    return (value, value) if key == "image_size" and isinstance(value, int) else _plain(value)


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
