"""Base class of model families: which keys of config.model a family takes, and what trainers must know of it."""

import dataclasses
import inspect
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

import jax.numpy as jnp
from flax import nnx

from leanformer.errors import ConfigError
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.kinds import KINDS, AttentionConfig, check_mask, options_of
from leanformer.layers.mlp import MlpConfig
from leanformer.layers.multihead import MultiHeadAttention


REQUIRED = inspect.Parameter.empty
SETTINGS = {f.name: f for part in (AttentionConfig, MlpConfig, BlockConfig) for f in dataclasses.fields(part)}
SIZES = ("width", "depth", "num_heads", "head_dim", "mlp_dim")  # without a default
ALWAYS = ("value_dim", "drop_path", "remat", "unroll", "backend")  # keys that every family takes unless it fixes them
WORDS = {
    int: "a whole number from 1",
    float: "a finite number",
    bool: "True or False",
    str: "a word",
    types.NoneType: "None",
    Sequence: "a tuple of whole numbers from 1, one a stage",
    tuple: "a pair of whole numbers from 1",
}


class Family(nnx.Module):
    """A model of `models`; each overrides what differs in it.

    The constructor takes the keys of config.model that only this family has, `blocks`, the settings of its blocks (one
    BlockConfig, or one per stage where the family is `staged`), and `rngs`. `arguments` are a section config.model.
    """

    no_decay: tuple[str, ...] = ()  # parameters exempt from weight decay, besides biases and norms
    classifiers = ("head",)  # parameters of classifiers, by the first part of their names
    bottom_up: tuple[tuple[str, ...], ...] = ()  # see rates.BottomUp; without it there is no optim.layer_decay
    attentions: Mapping[str, type[nnx.Module]] = KINDS  # the kinds that `attention` may name
    staged = False  # whether sizes of blocks are one number per stage
    takes: Mapping[str, Any] = types.MappingProxyType({})  # more keys of blocks, with this family's defaults
    fixed: Mapping[str, Any] = types.MappingProxyType({})  # settings of blocks that no key changes

    @classmethod
    def keys(cls) -> dict[str, tuple[Any, Any]]:
        """Return type and default of each key of config.model that the family takes, but for options of attention."""
        defaults = dict.fromkeys(SIZES, REQUIRED) | {name: SETTINGS[name].default for name in ALWAYS}
        defaults |= {"attention": "softmax"} | dict(cls.takes)
        found = {}
        for name, default in defaults.items():
            if name not in cls.fixed:
                found[name] = (str if name == "attention" else cls._type(name, default), default)
        own = inspect.signature(cls.__init__).parameters.values()
        own = {p.name: (p.annotation, p.default) for p in own if p.name not in ("self", "blocks", "rngs")}
        return found | own

    @classmethod
    def _type(cls, name: str, default: Any) -> Any:
        plain = next(kind for kind in _alternatives(SETTINGS[name].type) if kind is not types.NoneType)
        plain = Sequence[int] if cls.staged and name in (*SIZES, "value_dim") else plain
        return plain | None if default is None else plain

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> None:
        """Raises ConfigError on the first argument that is missing, unknown, or not of its type."""
        keys, name = cls.keys(), cls.__module__.rpartition(".")[2]
        missing = [key for key, (_, default) in keys.items() if default is REQUIRED and key not in arguments]
        if missing:
            raise ConfigError(
                f'model.name="{name}" needs model.{", model.".join(missing)} as well. Start from a config of that '
                "family."
            )
        for key in arguments.keys() & keys.keys():
            check_type(key, arguments[key], keys[key][0])
        kind = arguments.get("attention", keys["attention"][1])
        for key, value in cls.options(arguments).items():
            check_type(key, value, cls.attentions[kind].options[key], least=0)
        check_mask(kind, cls.mask_parts(arguments), cls.attentions)

    @classmethod
    def options(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the attention takes. Raises ConfigError for others."""
        keys = cls.keys()
        others = {key: value for key, value in arguments.items() if key not in keys}
        return options_of(arguments.get("attention", keys["attention"][1]), cls.attentions, **others)

    @classmethod
    def from_section(cls, arguments: Mapping[str, Any], *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> "Family":
        """Return the model of a section config.model without its name. Raises ConfigError as `check`."""
        cls.check(arguments)
        keys = cls.keys()
        values = {key: default for key, (_, default) in keys.items() if default is not REQUIRED}
        values |= {key: value for key, value in arguments.items() if key in keys}
        blocks = {key: values.pop(key) for key in list(values) if key in SETTINGS or key == "attention"}
        blocks |= {"kind": cls.attentions[blocks.pop("attention")], "options": cls.options(arguments), "dtype": dtype}
        blocks |= cls.fixed
        if not cls.staged:
            return cls(**values, blocks=block_config(blocks), rngs=rngs)
        return cls(**values, blocks=tuple(map(block_config, _by_stage(blocks))), rngs=rngs)

    @classmethod
    def attention_widths(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The widths of queries and keys, and of values, wherever the model attends by T × S matrices."""
        own, kind = widths(arguments["head_dim"]), cls.attentions.get(arguments.get("attention"), MultiHeadAttention)
        queries = tuple(kind.query_width(width, arguments) for width in own)
        return {"head_dim": queries, "value_dim": widths(arguments.get("value_dim")) or own}

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """The parts of a `masks.Mask` that the model gives to its attention."""
        return ()

    def stacks(self) -> dict[str, nnx.Module]:
        """The stacked blocks whose conditioning is measured, by the names under which taps come back from the model."""
        return {"blocks": self.blocks.layers}

    def measured(self) -> dict[str, Any]:
        """The parameters of `stacks`, leading axis L, as `conditioning.weights` takes them."""
        return {name: nnx.as_pure(nnx.state(block, nnx.Param)) for name, block in self.stacks().items()}


class WithClassAttention(Family):
    """A family whose last blocks attend from the class token, by heads of their own width."""

    @classmethod
    def attention_widths(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        of_class = widths(arguments["class_head_dim"])
        return {name: found + of_class for name, found in super().attention_widths(arguments).items()}


def widths(found: int | Sequence[int] | None) -> tuple[int, ...]:
    """One width, one a stage, or none."""
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def block_config(values: Mapping[str, Any]) -> BlockConfig:
    """Return the settings of blocks out of one table by name, such as a section config.model."""

    def part(kind: type) -> dict[str, Any]:
        return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}

    mlp = MlpConfig(**part(MlpConfig)) if values["mlp_dim"] else None
    return BlockConfig(**part(BlockConfig), attention=AttentionConfig(**part(AttentionConfig)), mlp=mlp)


def _by_stage(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of each stage. Raises ConfigError unless all sizes have as many."""
    sizes = {name: values[name] for name in (*SIZES, "value_dim") if values.get(name) is not None}
    if len({len(size) for size in sizes.values()}) > 1:
        found = ", ".join(f"model.{name}={tuple(size)}" for name, size in sizes.items())
        raise ConfigError(f"Sizes are one number a stage, and these have different numbers of stages: {found}.")
    stages = zip(*sizes.values(), strict=True)
    return [{**values, **dict(zip(sizes, stage, strict=True))} for stage in stages]


def check_type(key: str, value: Any, annotation: Any, least: int = 1) -> None:
    """Raises ConfigError for a value of a key of config.model that is not of its type, or a size under `least`."""
    wanted = _alternatives(annotation)
    if any(_fits(value, kind, least) for kind in wanted):
        return
    if isinstance(value, int) and not isinstance(value, bool) and int in wanted:
        raise ConfigError(f"model.{key}={value} must be at least {least}.")
    words = " or ".join(WORDS[get_origin(kind) or kind] for kind in wanted)
    raise ConfigError(f"model.{key}={value!r}: wanted {words}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _fits(value: Any, kind: Any, least: int) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if get_origin(kind) in (Sequence, tuple):
        several = isinstance(value, tuple | list) and len(value) > 0 and all(_fits(x, int, least) for x in value)
        return several and (get_origin(kind) is Sequence or len(value) == len(get_args(kind)))
    return isinstance(value, kind)
