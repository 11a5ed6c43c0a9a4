"""Base class of model architectures: accepted keys of config.model, and properties that training needs."""

import dataclasses
import inspect
import itertools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

import jax.numpy as jnp
from flax import nnx

from leanformer.config.per_layer import PER_LAYER
from leanformer.errors import ConfigError
from leanformer.layers.attention_registry import ATTENTIONS, AttentionConfig, check_mask, options_of
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.mlp import MlpConfig
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.stack import list_groups


REQUIRED = inspect.Parameter.empty
SETTINGS = {f.name: f for part in (AttentionConfig, MlpConfig, BlockConfig) for f in dataclasses.fields(part)}
SIZES = ("width", "depth", "num_heads", "head_dim", "mlp_dim")  # keys without a default
ALWAYS = ("value_dim", "drop_path", "remat", "unroll", "backend")  # keys of every architecture that does not fix them
WORDS = {
    int: "an integer from 1",
    float: "a finite number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
    Sequence: "a tuple of integers from 1, one per layer or stage",
    tuple: "a pair of integers from 1",
}


class Family(nnx.Module):
    """Base class of the models of `leanformer.models`.

    The constructor takes the keys of config.model that only this architecture has, `blocks`, the settings of its blocks
    (one BlockConfig, or one per stage if `staged`), and `rngs`. In all methods `arguments` are a section config.model
    without its name. Class attributes describe the architecture. Besides those below, `classifiers` are the modules of
    classifiers, by the first parts of the names of their parameters; `staged` is True if sizes of blocks are one number
    per stage; `layered` is True if they may be one number per layer instead of one for all.

    Attributes:
        no_decay: last parts of the names of parameters exempt from weight decay, besides biases and norms.
        attentions: attention types by the names of `model.attention`.
        blocks: `Stack` of the blocks; an architecture that overrides `stacks` may not have it.
        takes: keys of block settings that this architecture accepts besides SIZES and ALWAYS, with their defaults.
        fixed: values of block settings that cannot be configured.
    """

    no_decay: tuple[str, ...] = ()
    classifiers = ("head",)
    attentions: Mapping[str, type[MultiHeadAttention]] = ATTENTIONS
    blocks: Any
    staged = False  # True: sizes of blocks are one number per stage
    layered = True  # True: unless `staged`, sizes of PER_LAYER are one number, or one number per layer
    takes: Mapping[str, Any] = types.MappingProxyType({})
    fixed: Mapping[str, Any] = types.MappingProxyType({})

    @classmethod
    def keys(cls) -> dict[str, tuple[Any, Any]]:
        """Return {key: (type, default)} of the accepted keys of config.model, except options of attention.

        The default of a key that must be set is REQUIRED.
        """
        defaults = dict.fromkeys(SIZES, REQUIRED) | {name: SETTINGS[name].default for name in ALWAYS}
        defaults |= {"attention": "softmax"} | dict(cls.takes)
        keys = {name: (cls._type(name, x), x) for name, x in defaults.items() if name not in cls.fixed}
        parameters = inspect.signature(cls.__init__).parameters.values()
        more = {p.name: (p.annotation, p.default) for p in parameters if p.name not in ("self", "blocks", "rngs")}
        return keys | more

    @classmethod
    def _type(cls, name: str, default: Any) -> Any:
        if name == "attention":
            return str
        plain = next(kind for kind in _alternatives(SETTINGS[name].type) if kind is not types.NoneType)
        if cls.staged and name in (*SIZES, "value_dim"):
            plain = Sequence[int]
        elif cls._is_per_layer(name):
            plain = plain | Sequence[int]
        return plain | None if default is None else plain

    @classmethod
    def _family(cls) -> str:
        """Return the name of the architecture, that of its module."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def _is_per_layer(cls, name: str) -> bool:
        """Return whether a key may have one number per layer."""
        return cls.layered and not cls.staged and name in PER_LAYER

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> None:
        """Check a section config.model without its name.

        Raises:
            ConfigError: an argument is missing, unknown, of another type or length, or the attention does not support
                the masks of the model.
        """
        keys, name = cls.keys(), cls._family()
        missing = [key for key, (_, default) in keys.items() if default is REQUIRED and key not in arguments]
        if missing:
            raise ConfigError(
                f'model.name="{name}" needs model.{", model.".join(missing)} as well. Start from a config of this '
                "family."
            )
        for key in arguments.keys() & keys.keys():
            check_type(key, arguments[key], keys[key][0])
        kind = arguments.get("attention", keys["attention"][1])
        for key, value in cls.options(arguments).items():
            plain = cls.attentions[kind].options[key]
            if cls._is_per_layer(key):
                check_type(key, value, plain | Sequence[int])
            else:
                check_type(key, value, plain, least=0)
        cls._check_lengths(arguments)
        check_mask(kind, cls.mask_parts(arguments), cls.attentions)

    @classmethod
    def _check_lengths(cls, arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError if a size has one number per layer, but not as many as there are layers."""
        depth = arguments["depth"]
        for name, value in arguments.items():
            if cls._is_per_layer(name) and isinstance(value, tuple | list) and len(value) != depth:
                raise ConfigError(
                    f"model.{name}={tuple(value)}: {len(value)} numbers for model.depth={depth} layers. Set one number "
                    f"for all layers, {depth} numbers, or a schedule such as linear:4-12."
                )

    @classmethod
    def options(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return {name: value} of the options of the attention type that are set in a section config.model.

        They are the arguments that are not keys of the architecture, without those that are None.

        Raises:
            ConfigError: an argument is neither a key of the architecture nor an option of the attention type.
        """
        keys = cls.keys()
        others = {key: value for key, value in arguments.items() if key not in keys}
        return options_of(arguments.get("attention", keys["attention"][1]), cls.attentions, **others)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return {key: default} of the keys of config.model that have a default."""
        return {key: default for key, (_, default) in cls.keys().items() if default is not REQUIRED}

    @classmethod
    def settings(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return {name: value} of every setting of a model, including those that are fixed or not configured.

        They are all settings of blocks, attention and MLP, and the keys of the architecture; `arguments` replace
        defaults.
        """
        values = {name: field.default for name, field in SETTINGS.items() if field.default is not dataclasses.MISSING}
        return {**values, **cls.defaults(), **cls.fixed, **arguments}

    @classmethod
    def from_section(cls, arguments: Mapping[str, Any], *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> "Family":
        """Build a model from a section config.model without its name. Raises ConfigError as `check` does.

        Args:
            arguments: values by key; missing keys have their defaults.
            dtype: dtype of the activations.
            rngs: random keys of the initial weights.
        """
        cls.check(arguments)
        keys = cls.keys()
        values = cls.defaults() | {key: value for key, value in arguments.items() if key in keys}
        blocks = {key: values.pop(key) for key in list(values) if key in SETTINGS or key == "attention"}
        blocks |= {"kind": cls.attentions[blocks.pop("attention")], "options": cls.options(arguments), "dtype": dtype}
        blocks |= cls.fixed
        make: Any = cls  # a constructor with the keys of the subclass
        if not cls.staged:
            return make(**values, blocks=block_config(blocks), rngs=rngs)
        return make(**values, blocks=tuple(map(block_config, _by_stage(blocks))), rngs=rngs)

    @classmethod
    def attention_widths(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return {"head_dim": H of queries and keys, "value_dim": H' of values} of all attentions with T × S matrices.

        Both are tuples of equal length, with one number for equal layers, or one per layer or stage.
        """
        head_dims = widths(arguments["head_dim"])
        kind = cls.attentions.get(arguments.get("attention"), MultiHeadAttention)
        queries = tuple(kind.query_width(width, arguments) for width in head_dims)
        values = widths(arguments.get("value_dim")) or head_dims
        number = max(len(queries), len(values))  # one size may be one number, and the other one per layer
        return {"head_dim": queries * (number // len(queries)), "value_dim": values * (number // len(values))}

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the parts of a `masks.Mask` that the attention uses with this section config.model."""
        return ()

    def stacks(self) -> dict[str, nnx.Module]:
        """Return the stacked blocks whose conditioning is measured, by the names of the model's tap results.

        Parameters of a stack have a leading axis L; unequal layers are `stack.Groups`. By default the result is
        {"blocks": `blocks.layers`}.
        """
        return {"blocks": self.blocks.layers}

    def measured(self) -> dict[str, Any]:
        """Return {stack: parameters of its blocks}, with a leading axis L, as `conditioning.weights` takes them.

        Parameters are nested dictionaries; those of several groups of equal layers are a list with one entry per group.
        """
        groups = {name: list_groups(layers) for name, layers in self.stacks().items()}
        values = {name: [nnx.as_pure(nnx.state(x, nnx.Param)) for x in several] for name, several in groups.items()}
        return {name: several if len(several) > 1 else several[0] for name, several in values.items()}


class WithClassAttention(Family):
    """Base class of architectures whose last blocks are class attention, with heads of dimension `class_head_dim`.

    The key `class_head_dim` of config.model must be set; values of class attention have the same dimension.
    """

    @classmethod
    def attention_widths(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return {"head_dim": dimensions of queries and keys, "value_dim": dimensions of values} of all attentions.

        Both are tuples of equal length: first the numbers of `Family.attention_widths`, one for equal layers or one per
        layer or stage, and last one more, `class_head_dim`, for the class attention.
        """
        of_class = widths(arguments["class_head_dim"])
        return {name: sizes + of_class for name, sizes in super().attention_widths(arguments).items()}


def widths(sizes: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return a size, or several sizes (one per layer or stage), as a tuple; () for None."""
    return () if sizes is None else (sizes,) if isinstance(sizes, int) else tuple(sizes)


def block_config(values: Mapping[str, Any]) -> BlockConfig:
    """Return the settings of blocks from a flat mapping of the fields of BlockConfig, AttentionConfig and MlpConfig.

    Sizes may be tuples with one number per layer; consecutive equal layers become one of the `groups`. An `mlp_dim` of
    None or 0 gives blocks without an MLP.

    Args:
        values: fields by name, among them `options`, the mapping of the attention's own options, and `mlp_dim`.
    """
    sizes = {**values, **values["options"]}
    if any(isinstance(sizes.get(name), tuple | list) for name in PER_LAYER):
        layers = itertools.groupby(_plain_config(_of_layer(values, i)) for i in range(values["depth"]))
        groups = [dataclasses.replace(layer, depth=len([*equal])) for layer, equal in layers]
        return dataclasses.replace(groups[-1], depth=values["depth"], groups=tuple(groups) if len(groups) > 1 else ())
    return _plain_config(values)


def _of_layer(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the flat settings of one layer."""

    def pick(settings: Mapping[str, Any]) -> dict[str, Any]:
        several = {key: settings[key] for key in PER_LAYER if isinstance(settings.get(key), tuple | list)}
        return {**settings, **{key: sizes[index] for key, sizes in several.items()}}

    return pick(values) | {"options": pick(values["options"])}


def _plain_config(values: Mapping[str, Any]) -> BlockConfig:
    """Return the settings of equal blocks."""

    def part(kind: Any) -> dict[str, Any]:
        return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}

    mlp = MlpConfig(**part(MlpConfig)) if values["mlp_dim"] else None
    return BlockConfig(**part(BlockConfig), attention=AttentionConfig(**part(AttentionConfig)), mlp=mlp)


def _by_stage(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of each stage. Raises ConfigError if sizes have different numbers of stages."""
    sizes = {name: values[name] for name in (*SIZES, "value_dim") if values.get(name) is not None}
    if len({len(size) for size in sizes.values()}) > 1:
        listed = ", ".join(f"model.{name}={tuple(size)}" for name, size in sizes.items())
        raise ConfigError(f"{listed}: different numbers of stages. Set one number per stage for each.")
    stages = zip(*sizes.values(), strict=True)
    return [{**values, **dict(zip(sizes, stage, strict=True))} for stage in stages]


def check_type(key: str, value: Any, annotation: Any, least: int = 1) -> None:
    """Raise ConfigError if the value of a key of config.model has another type, or is an integer below `least`.

    Args:
        key: name of the key, for the message.
        value: value to check.
        annotation: allowed types: a key of WORDS such as `int`, `Sequence[int]`, `tuple[int, int]`, or a union of
            these.
        least: smallest value of an integer, alone or in a sequence.
    """
    expected = _alternatives(annotation)
    if any(_fits(value, kind, least) for kind in expected):
        return
    if isinstance(value, int) and not isinstance(value, bool) and int in expected:
        raise ConfigError(f"model.{key}={value} must be at least {least}.")
    words = " or ".join(WORDS[get_origin(kind) or kind] for kind in expected)
    raise ConfigError(f"model.{key}={value!r}: expected {words}.")


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
