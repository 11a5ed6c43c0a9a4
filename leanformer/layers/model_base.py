"""Base class of model architectures: accepted keys of config.model, and properties that training needs."""

import dataclasses
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from leanformer.config import declare
from leanformer.config.architectures import PER_LAYER, BlockKeys
from leanformer.config.rules import require
from leanformer.layers.blocks import BlockConfig, MlpConfig
from leanformer.layers.latent import LatentAttention
from leanformer.layers.masks import check_supported
from leanformer.layers.multihead import AttentionConfig, MultiHeadAttention
from leanformer.layers.nystrom import NystromAttention
from leanformer.layers.stack import list_groups


# Attention types by the names of `model.attention`: modules like `MultiHeadAttention`, with two class attributes:
# `options`, their keys of config.model with types, declared in config/attention.py, and `masks`, the supported parts.
ATTENTIONS = types.MappingProxyType(
    {"softmax": MultiHeadAttention, "latent": LatentAttention, "nystrom": NystromAttention}
)
SETTINGS = {f.name: f for part in (AttentionConfig, MlpConfig, BlockConfig) for f in dataclasses.fields(part)}
STAGED = ("width", "depth", "num_heads", "head_dim", "mlp_dim", "value_dim")  # sizes that stages have one each of


class Family(nnx.Module):
    """Base class of the models of `leanformer.models`.

    The constructor takes `keys`, an instance of the declaration `keys`; `blocks`, the settings of its blocks (one
    BlockConfig, or one per stage if `staged`); and `rngs`. In all methods `arguments` are a section config.model
    without its name. Models are called with inputs and, by name, a `key` per example, which switches training on with
    dropout, drop path and batch statistics, and a `tap` (see `blocks.Block`).

    Attributes:
        keys: declaration of the keys of config.model; those that are settings of blocks, attention or MLP by their
            names have their effect through `blocks`.
        fixed: settings of blocks that cannot be configured.
        attentions: attention types by the names of `model.attention`.
        staged: True if sizes of blocks are one number per stage.
        layered: True if the sizes PER_LAYER may be one number per layer.
        no_decay: last parts of the names of parameters exempt from weight decay, besides biases and norms.
        classifiers: modules of classifiers, by the first parts of the names of their parameters.
        blocks: `Stack` of the blocks; an architecture that overrides `stacks` may not have it.
    """

    keys: type[BlockKeys]
    fixed: Mapping[str, Any] = types.MappingProxyType({})
    attentions: Mapping[str, type[MultiHeadAttention]] = ATTENTIONS
    staged = False
    layered = True
    no_decay: tuple[str, ...] = ()
    classifiers = ("head",)
    blocks: Any

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the keys of a section, and the options of its attention that are set; or raise ConfigError."""
        names = declare.types_of(cls.keys)
        options = {name: x for name, x in arguments.items() if name not in names and x is not None}
        values: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in arguments.items() if name in names
        }
        declare.check({**vars(cls.keys()), **values}, cls.keys, "model.")
        keys = cls.keys(**values)
        for name, value in {**vars(keys), "num_kv_heads": options.get("num_kv_heads")}.items():
            numbers = widths(value) if isinstance(value, int | tuple | list) and not isinstance(value, bool) else ()
            require(min(numbers, default=1) >= 1, f"model.{name}={value} must be at least 1.")
        known = f"Choose one of: {', '.join(cls.attentions)}."
        require(keys.attention in cls.attentions, f'model.attention="{keys.attention}": unknown type. {known}')
        kind = cls.attentions[keys.attention]
        for name, value in options.items():
            require(
                name in kind.options,
                f'model.{name}={value!r}: not supported by the model or model.attention="{keys.attention}". Unset it.',
            )
            expected = kind.options[name]
            require(declare.fits(value, expected), f"model.{name}={value!r}: expected {declare.describe(expected)}.")
        for name in PER_LAYER:
            value = {**vars(keys), **options}.get(name)
            if isinstance(value, tuple | list) and not (cls.staged and name in STAGED):
                valid = cls.layered and len(value) == keys.depth
                remedy = "Set one number, or one per layer." if cls.layered and not cls.staged else "Set one number."
                require(valid, f"model.{name}={tuple(value)} does not fit model.depth={keys.depth}. {remedy}")
        check_supported(f'model.attention="{keys.attention}"', kind.masks, cls.mask_parts(vars(keys)))
        return keys, options

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return {key: default} of the keys of config.model, without the name and the options of attention."""
        return {name: value for name, value in vars(cls.keys()).items() if name != "name"}

    @classmethod
    def settings(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return {name: value} of all settings of blocks, attention, MLP and architecture, with `arguments`."""
        values = {name: field.default for name, field in SETTINGS.items() if field.default is not dataclasses.MISSING}
        return {**values, **cls.defaults(), **cls.fixed, **arguments}

    @classmethod
    def from_section(cls, arguments: Mapping[str, Any], *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> "Family":
        """Build a model from a section config.model without its name; the backend is "xla" if missing."""
        keys, options = cls.parse({"backend": "xla"} | {**arguments})
        values = vars(keys) | {"kind": cls.attentions[keys.attention], "options": options, "dtype": dtype}
        values |= cls.fixed
        del values["attention"]  # the field of BlockConfig with this name has the settings
        make: Any = cls
        if not cls.staged:
            return make(keys, block_config(values), rngs=rngs)
        return make(keys, tuple(map(block_config, _by_stage(values))), rngs=rngs)

    @classmethod
    def attention_widths(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return {"head_dim": H of queries and keys, "value_dim": H' of values} of all attentions with T × S matrices.

        Both are tuples of equal length: one number for equal layers, or one per layer or stage; and one for class
        attention.
        """
        head_dims = widths(arguments["head_dim"])
        kind = cls.attentions.get(arguments.get("attention"), MultiHeadAttention)
        queries = tuple(kind.query_width(width, arguments) for width in head_dims)
        values = widths(arguments.get("value_dim")) or head_dims
        number = max(len(queries), len(values))  # one size may be one number, and the other one per layer
        of_class = widths(arguments.get("class_head_dim"))
        both = {"head_dim": queries * (number // len(queries)), "value_dim": values * (number // len(values))}
        return {name: sizes + of_class for name, sizes in both.items()}

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the parts of a `masks.Mask` that the attention uses with this section config.model."""
        return ()

    def stacks(self) -> dict[str, nnx.Module]:
        """Return the stacked blocks whose conditioning is measured, by the names of the model's tap results.

        Parameters of a stack have a leading axis L; unequal layers are `stack.Groups`.
        """
        return {"blocks": self.blocks.layers}

    def measured(self) -> dict[str, Any]:
        """Return {stack: nested parameters of its blocks} for `conditioning.weights`; lists for unequal layers."""
        groups = {name: list_groups(layers) for name, layers in self.stacks().items()}
        values = {name: [nnx.as_pure(nnx.state(x, nnx.Param)) for x in several] for name, several in groups.items()}
        return {name: several if len(several) > 1 else several[0] for name, several in values.items()}


def widths(sizes: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return a size, or several sizes (one per layer or stage), as a tuple; () for None."""
    return () if sizes is None else (sizes,) if isinstance(sizes, int) else tuple(sizes)


def block_config(values: Mapping[str, Any]) -> BlockConfig:
    """Return the settings of blocks from a flat mapping of the fields of BlockConfig, AttentionConfig and MlpConfig.

    Sizes may be tuples with one number per layer; consecutive equal layers become one of the `groups`. An `mlp_dim` of
    None or 0 gives blocks without an MLP.
    """
    sizes = {**values, **values["options"]}
    if any(isinstance(sizes.get(name), tuple | list) for name in PER_LAYER):
        layers = itertools.groupby(_plain_config(_of_layer(values, i)) for i in range(values["depth"]))
        groups = [dataclasses.replace(layer, depth=len([*equal])) for layer, equal in layers]
        return dataclasses.replace(groups[-1], depth=values["depth"], groups=tuple(groups) if len(groups) > 1 else ())
    return _plain_config(values)


def _of_layer(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    def pick(settings: Mapping[str, Any]) -> dict[str, Any]:
        several = {key for key in PER_LAYER if isinstance(settings.get(key), tuple | list)}
        return {key: value[index] if key in several else value for key, value in settings.items()}

    return pick(values) | {"options": pick(values["options"])}


def _plain_config(values: Mapping[str, Any]) -> BlockConfig:
    def part(kind: Any) -> dict[str, Any]:
        return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}

    mlp = MlpConfig(**part(MlpConfig)) if values["mlp_dim"] else None
    return BlockConfig(**part(BlockConfig), attention=AttentionConfig(**part(AttentionConfig)), mlp=mlp)


def _by_stage(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of each stage. Raises ConfigError if sizes have different numbers of stages."""
    sizes = {name: values[name] for name in STAGED if values.get(name) is not None}
    listed = ", ".join(f"model.{name}={tuple(size)}" for name, size in sizes.items())
    require(len({len(size) for size in sizes.values()}) == 1, f"{listed}: different numbers of stages.")
    stages = zip(*sizes.values(), strict=True)
    return [{**values, **dict(zip(sizes, stage, strict=True))} for stage in stages]
