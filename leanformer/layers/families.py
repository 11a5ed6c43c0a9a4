"""What a family of models says of itself beside its constructor, so that nobody guesses it from names of keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from leanformer.layers.kinds import KINDS
from leanformer.layers.multihead import MultiHeadAttention


def widths(found: int | Sequence[int] | None) -> tuple[int, ...]:
    """One width, one a stage, or none."""
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


class Family(nnx.Module):
    """A model of `models`; each overrides what differs in it. `arguments` are those of its constructor, by name."""

    no_decay: tuple[str, ...] = ()  # parameters exempt from weight decay, besides biases and norms
    classifiers = ("head",)  # parameters of classifiers, by the first part of their names
    bottom_up: tuple[tuple[str, ...], ...] = ()  # see rates.BottomUp; without it there is no optim.layer_decay
    attentions: Mapping[str, type[nnx.Module]] = KINDS  # the kinds that `attention` may name

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
